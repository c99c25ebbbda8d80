"""Pools of Splitwise: prompt, token and mixed machines, each with a home.

A machine's home is the role that it announces. It joins the mixed pool when the other phase has no
machine with room, and returns home when it has no more work of that phase. One that stays mixed for
`REPURPOSE_SECONDS` gets the other phase as its home.

Source: "Splitwise" (ISCA'24, arXiv 2311.18677), section 4.2. The paper says "a considerable amount
of time" and gives no number.
"""

from collections.abc import Sequence
from typing import NamedTuple

from gllm.routing.disaggregation.pair_loads import PairLoads
from gllm.routing.state import EngineSnapshot

REPURPOSE_SECONDS = 60.0
"""Time in the mixed pool after which a machine changes its home."""

OPPOSITE_ROLES = {"prefill": "decode", "decode": "prefill"}
"""Role of the other phase."""


class Pools(NamedTuple):
    """Engines by the phase that they run at present: prefill only, decode only, or both (mixed)."""

    prefill: list[EngineSnapshot]
    decode: list[EngineSnapshot]
    mixed: list[EngineSnapshot]


class _Stay(NamedTuple):
    """Stay of a machine in the mixed pool."""

    home: str
    since: float


class RolePools:
    """Assigns engines to the prefill, decode and mixed pools of Splitwise.

    An engine joins the mixed pool when it gets work of the other phase, and leaves it when that
    work has ended. Source: "Splitwise" (ISCA'24, arXiv 2311.18677), section 4.2.
    """

    def __init__(self, loads: PairLoads) -> None:
        """Create the pools.

        Args:
            loads: work of each machine by phase.
        """
        self._loads = loads
        self._stays: dict[str, _Stay] = {}

    def divide(self, engines: Sequence[EngineSnapshot]) -> Pools:
        """Return the engines by pool, after idle ones have left the mixed pool."""
        pools = Pools([], [], [])
        for engine in engines:
            if engine.role not in OPPOSITE_ROLES or self._is_away(engine):
                pools.mixed.append(engine)
            elif engine.role == "prefill":
                pools.prefill.append(engine)
            else:
                pools.decode.append(engine)
        return pools

    def lend(self, engine: EngineSnapshot, now: float) -> None:
        """Move an engine to the mixed pool, because it gets work of the other phase."""
        if engine.role in OPPOSITE_ROLES and engine.name not in self._stays:
            self._stays[engine.name] = _Stay(engine.role, now)

    def forget(self, engine: str) -> None:
        """Remove an engine."""
        self._stays.pop(engine, None)

    def overdue(self, engines: Sequence[EngineSnapshot], now: float) -> list[EngineSnapshot]:
        """Return the engines that have been mixed for REPURPOSE_SECONDS, to swap their role.

        The last engine with the role of a phase is never returned.
        """
        pools = self.divide(engines)
        num_left = {role: sum(engine.role == role for engine in engines) for role in OPPOSITE_ROLES}
        overdue = []
        for engine in pools.mixed:
            stay = self._stays.get(engine.name)
            if stay is None or now - stay.since < REPURPOSE_SECONDS or num_left[stay.home] < 2:
                continue
            num_left[stay.home] -= 1
            overdue.append(engine)
        return overdue

    def _is_away(self, engine: EngineSnapshot) -> bool:
        """Return True if a machine is in the mixed pool; one without foreign work returns home."""
        stay = self._stays.get(engine.name)
        if stay is None:
            return False
        load = self._loads.of(engine.name)
        num_foreign = load.num_decodes if stay.home == "prefill" else load.num_prefills
        if engine.role == stay.home and num_foreign:
            return True
        del self._stays[engine.name]
        return False
