"""Deaths of workers: what is known about each, before and after the recovery has decided."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

from gllm.recovery.actions import Action, GiveUp
from gllm.recovery.records import RecoveryState
from gllm.recovery.recovery import Recovery
from gllm.runtime.head.action_executor import ActionExecutor
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.deaths import DeathLog, WorkerDeath

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.05
"""Time after an exit in which the last messages of the process may still arrive."""
LOST_SECONDS = 1.0
"""Time after the end of a session in which the exit of its process may still be reported."""


class DeathHandler:
    """Reports deaths to the recovery, with the requests to blame, and keeps their evidence."""

    def __init__(
        self,
        recovery: Recovery,
        executor: ActionExecutor,
        client: EngineClient,
        deaths: DeathLog,
        execute: Callable[[list[Action]], None],
    ) -> None:
        """Create the handler.

        Args:
            recovery: decides what follows.
            executor: has the connections to the workers.
            client: has the running requests.
            deaths: log of the deaths.
            execute: executes the actions that follow.
        """
        self._recovery = recovery
        self._executor = executor
        self._client = client
        self._deaths = deaths
        self._execute = execute
        self._timers: dict[int, asyncio.TimerHandle] = {}
        """Timers of workers whose session has ended."""

    def on_failed(self, sender: int, cause: str) -> None:
        """Handle a worker's own report that it fails."""
        place = self._recovery.name_of(sender) or "a standby worker"
        self._on_death(sender, "failed", f"{place} failed: {cause}", self._recovery.on_failed)

    def on_warm_up_failed(self, driver: int, error: str) -> None:
        """Handle the error of a generation's first step, which its driver has reported."""
        cause = f"the warm-up step failed: {error}"
        self._on_death(driver, "failed", cause, self._recovery.on_failed)

    def on_frozen(self, sender: int, cause: str) -> None:
        """Replace a frozen worker."""
        self._on_death(sender, "frozen", cause, self._recovery.on_lost)

    def on_session_lost(self, sender: int, cause: str) -> None:
        """Wait for the exit of a worker whose session has ended; if there is none, replace it."""
        place = self._recovery.name_of(sender)
        worker = "a standby worker" if place is None else f"the worker of {place}"
        cause = f"the connection to {worker} was lost: {cause}"
        self.forget(sender)
        self._timers[sender] = asyncio.get_running_loop().call_later(
            LOST_SECONDS, self._on_lost, sender, cause
        )

    def forget(self, sender: int) -> None:
        """Do not wait any more for the exit of a worker whose session has ended."""
        if (timer := self._timers.pop(sender, None)) is not None:
            timer.cancel()

    def _on_lost(self, sender: int, cause: str) -> None:
        self._timers.pop(sender, None)
        self._on_death(sender, "lost", cause, self._recovery.on_lost)

    def on_exit(self, sender: int, description: str) -> None:
        """Handle the exit of a process, after its last messages."""
        stacks = self._read_stacks(sender)
        delay = 0.0 if self._recovery.is_exiting(sender) else REPORT_SECONDS
        asyncio.get_running_loop().call_later(
            delay, self._on_reaped, sender, description, stacks, time.monotonic()
        )

    def _on_reaped(self, sender: int, description: str, stacks: str, now: float) -> None:
        """Handle the exit of a process whose last messages have arrived."""
        place = self._recovery.name_of(sender)
        self._executor.connections.channels.forget(sender)
        self._executor.connections.nodes.forget(sender)
        if place is None or self._recovery.is_exiting(sender):
            if not self._recovery.is_exiting(sender) and not self._recovery.is_over:
                log.warning("a standby worker has ended: %s", description)
            self._deaths.heartbeats.pop(sender, None)
            self._execute(self._recovery.on_exit(sender, description, now))
            return
        cause = f"the worker of {place} ({description})"
        self._on_death(sender, "killed", cause, self._recovery.on_exit, stacks, now)

    def _on_death(
        self,
        sender: int,
        kind: str,
        cause: str,
        report: Callable[[int, str, float, bool], list[Action]],
        stacks: str = "",
        now: float | None = None,
    ) -> None:
        """Handle the unplanned death of a worker.

        Args:
            sender: the worker.
            kind: killed, failed, frozen or lost.
            cause: description for logs and errors.
            report: method of the recovery for this event.
            stacks: stacks that the process has written.
            now: time at which it was noticed; by default now.
        """
        if self._recovery.is_over or self._recovery.is_exiting(sender):
            return
        now = time.monotonic() if now is None else now
        place = self._recovery.name_of(sender)
        if place is None:
            log.warning("a standby worker has died: %s", cause)
            self._execute(report(sender, cause, now, False))
            return
        was_ready = self._recovery.state is RecoveryState.READY
        num_requests, generation = self._client.num_requests, self._recovery.generation
        suspects = self._executor.read_suspects() if was_ready else set()
        is_poison = was_ready and self._client.on_death(suspects)
        stacks = stacks or self._read_stacks(sender)
        death = WorkerDeath(sender, place, kind, cause, now, stacks)
        actions = report(sender, cause, now, is_poison)
        if was_ready and not any(isinstance(action, GiveUp) for action in actions):
            self._deaths.begin_recovery(kind, cause)
        evidence = self._keep_evidence(death, generation, num_requests, suspects)
        self._execute(actions)
        if not self._recovery.is_over:
            log.warning(
                "%s; requests: %d, sequences being computed: %d%s; evidence: %s",
                cause,
                num_requests,
                len(suspects),
                ", one of which has caused it and was ended" if is_poison else "",
                evidence,
                extra={"about": sender},
            )

    def _read_stacks(self, sender: int) -> str:
        """Return the stacks that a process has written; empty if they cannot be read."""
        try:
            return self._executor.connections.nodes.read_stacks(sender)
        except Exception:
            log.exception("the stacks of a worker could not be read")
            return ""

    def _keep_evidence(
        self, death: WorkerDeath, generation: int, num_requests: int, suspects: Collection[int]
    ) -> Path | None:
        """Write what is known about a death; see `DeathLog.keep_evidence`."""
        try:
            return self._deaths.keep_evidence(death, generation, num_requests, suspects)
        except Exception:
            # The recovery has begun, and nothing else would execute its actions.
            log.exception("the evidence of a death could not be kept")
            return None
