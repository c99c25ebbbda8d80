"""Deaths of workers: their causes in words, their counts, and the evidence that is kept."""

import logging
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gllm.messages.lifecycle import Heartbeat
from gllm.recovery.placement import PlaceName
from gllm.runtime.head.crash_folder import CrashFolder, read_memory_kills

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerDeath:
    """An unplanned death of a worker that held a place."""

    sender: int
    place: PlaceName
    kind: str
    """killed, failed, frozen or lost."""
    cause: str
    """Complete description, which names the place."""
    time: float
    """Time at which it was noticed; time.monotonic()."""
    stacks: str = ""
    """Stacks of the process's threads, if it wrote any."""


class DeathLog:
    """Counts recoveries and keeps the evidence of deaths."""

    def __init__(self, crash_folder: str | None) -> None:
        self.recoveries: Counter[str] = Counter()
        """Recoveries that have begun, by kind of death."""
        self.recovery_seconds: list[float] = []
        """Pauses of the recoveries that have ended."""
        self.cause = ""
        """Cause of the running recovery, or of the last one."""
        self.heartbeats: dict[int, Heartbeat] = {}
        """Latest heartbeat by sender."""
        self._crashes = CrashFolder(crash_folder)

    def begin_recovery(self, kind: str, cause: str) -> None:
        """Count a death, a loss or a planned change that ends a generation which was ready.

        Args:
            kind: of the death; `node` for the loss of a node, `link` for that of its connections;
                rebalanced, drained or joined for a planned change.
            cause: complete description.
        """
        self.recoveries[kind] += 1
        self.cause = cause

    def end_recovery(self, since: float) -> float:
        """Note that the engine is ready again; return the pause in seconds."""
        seconds = time.monotonic() - since
        self.recovery_seconds.append(seconds)
        return seconds

    def keep_evidence(
        self, death: WorkerDeath, generation: int, num_requests: int, suspects: Collection[int]
    ) -> Path | None:
        """Write what is known about a death; return the file, None if it cannot be written.

        Args:
            death: the death.
            generation: number of the generation that it ended.
            num_requests: requests in the engine.
            suspects: wire ids of the sequences with rows in uncommitted plans.
        """
        heartbeat = self.heartbeats.pop(death.sender, None)
        try:
            sections = {
                "Cause": f"{death.cause}\nkind: {death.kind}, generation {generation}",
                "Requests": f"{num_requests} in the engine; sequences in uncommitted plans: "
                f"{', '.join(map(str, sorted(suspects))) or 'none'}",
                "Last heartbeat": "" if heartbeat is None else str(heartbeat),
                "Stacks": death.stacks,
                "Kernel log": read_memory_kills(),
            }
            return self._crashes.record(f"stage-{death.place.label}", sections)
        except Exception:
            # The recovery has begun, and nothing else would execute its actions.
            log.exception("the evidence of a death could not be kept")
            return None

    def close(self, has_given_up: bool) -> None:
        """Remove the evidence, unless a folder was configured for it or the engine gave up."""
        folder = self._crashes.close(has_given_up)
        if has_given_up and folder is not None:
            log.error("evidence of the deaths of workers: %s", folder)
