"""Periodic check of the workers' processes for frozen ones."""

import asyncio
import logging
import time
from collections.abc import Callable

from gllm.messages.lifecycle import Heartbeat
from gllm.recovery.liveness import FrozenDetector
from gllm.recovery.placement import Placement
from gllm.recovery.records import RecoveryState
from gllm.recovery.recovery import Recovery
from gllm.runtime.head.node import Node

log = logging.getLogger(__name__)

DUMP_SECONDS = 0.3
"""Time in which a frozen worker writes its stacks before it is killed."""


class LivenessWatch:
    """Checks the workers of the present epoch, and logs the stacks of frozen ones."""

    def __init__(
        self,
        recovery: Recovery,
        nodes: Node,
        freeze_seconds: float,
        on_frozen: Callable[[int, str], None],
        is_silent: Callable[[int], bool] | None = None,
    ) -> None:
        """Start the checks on the running event loop.

        Args:
            recovery: knows which workers have been killed.
            nodes: run the workers.
            freeze_seconds: time for which a frozen worker has been stopped.
            on_frozen: called with the sender of a frozen worker and a description.
            is_silent: returns True if nothing is known of a worker, because its machine is silent;
                None if all workers run on this machine.
        """
        self._recovery = recovery
        self._nodes = nodes
        self._on_frozen = on_frozen
        self._is_silent = is_silent
        self._loop = asyncio.get_running_loop()
        self._detector = FrozenDetector(freeze_seconds)
        self._placement: Placement | None = None
        self._timer = self._loop.call_later(self._detector.check_seconds, self._check)

    def watch(self, placement: Placement) -> None:
        """Watch the workers of a new epoch and no others."""
        self._placement = placement
        self._detector.watch(placement.senders)

    def on_heartbeat(self, sender: int, message: Heartbeat) -> None:
        """Handle a worker's heartbeat."""
        step = None if message.step < 0 else message.step
        now, seconds = time.monotonic(), message.step_seconds
        self._detector.on_heartbeat(sender, step, seconds, now, message.is_waiting)

    def close(self) -> None:
        """End the checks."""
        self._timer.cancel()

    def _check(self) -> None:
        self._timer = self._loop.call_later(self._detector.check_seconds, self._check)
        if self._placement is None:
            return
        now = time.monotonic()
        sampled = {sender: self._nodes.sample(sender) for sender in self._placement.senders}
        samples = {sender: sample for sender, sample in sampled.items() if sample is not None}
        # A silent node is lost as a whole, or its workers are heard again.
        if self._is_silent is not None:
            self._detector.forgive(filter(self._is_silent, self._placement.senders), now)
        is_serving = self._recovery.state is RecoveryState.READY
        causes = self._detector.check(samples, now, is_serving)
        for sender, cause in causes.items():
            if not self._recovery.is_exiting(sender):
                self._nodes.dump_stacks(sender)
                place = self._placement.name_of(sender)
                cause = f"the worker of {place} is frozen: {cause}"
                self._loop.call_later(DUMP_SECONDS, self._report, sender, cause)

    def _report(self, sender: int, cause: str) -> None:
        """Report a frozen worker, once it had the time to write its stacks."""
        if not self._recovery.is_exiting(sender):
            stacks = self._nodes.read_stacks(sender) or "none"
            log.warning("%s; its stacks: %s", cause, stacks, extra={"about": sender})
            self._on_frozen(sender, cause)
