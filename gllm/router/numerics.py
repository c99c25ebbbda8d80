"""Engines that may continue a request's tokens: those with equal numerics, others if need be."""

import logging
from collections.abc import Iterable

from gllm.router.dispatch_target import DispatchTarget
from gllm.runtime.head.journal import JournalEntry

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
"""Time for which a request with tokens waits for an engine with equal numerics."""


class NumericsIndex:
    """Names of the attached engines by numerics. Pure: time is an argument."""

    def __init__(self, patience_seconds: float) -> None:
        self.num_inexact_migrations = 0
        """Requests that an engine with other numerics continued."""
        self._patience_seconds = patience_seconds
        self._names: dict[str, frozenset[str]] = {}
        """All names under the empty string."""
        self._pairs: set[tuple[str, str]] = set()
        """Engines between which such a migration was logged."""

    def update(self, engines: Iterable[DispatchTarget]) -> None:
        """Replace the attached engines."""
        names: dict[str, set[str]] = {"": set()}
        for engine in engines:
            names[""].add(engine.name)
            names.setdefault(engine.numerics, set()).add(engine.name)
        self._names = {numerics: frozenset(engines_of) for numerics, engines_of in names.items()}

    def eligible(
        self, entry: JournalEntry, parked_seconds: float, reserved: str
    ) -> list[frozenset[str]]:
        """Return the names of engines that may get a request, in the order of preference.

        Args:
            entry: of the request.
            parked_seconds: time for which it has waited for an engine.
            reserved: engine that nobody gets at present; requests wait until it is free.
        """
        equal = self._names.get(entry.numerics, frozenset())
        if not entry.numerics or reserved in equal or parked_seconds < self._patience_seconds:
            return [equal]
        return [equal, self._names[""] - equal]

    def on_submission(self, entry: JournalEntry, engine: DispatchTarget) -> None:
        """Count and log a submission to an engine with other numerics than those of the tokens."""
        if entry.numerics in ("", engine.numerics):
            return
        entry.numerics = engine.numerics
        self.num_inexact_migrations += 1
        if (entry.engine, engine.name) not in self._pairs:
            self._pairs.add((entry.engine, engine.name))
            log.warning(
                "no engine with the numerics of %s takes requests: %s continues what it began, so "
                "texts may differ from then on",
                entry.engine,
                engine.name,
            )
