"""Timer that reports the passing of time to the recovery."""

import asyncio
import logging
import time
from collections.abc import Callable

from gllm.recovery.actions import Action, KillWorker
from gllm.recovery.recovery import Recovery

log = logging.getLogger(__name__)


class RecoveryTimer:
    """Calls `on_timer` of a recovery at its deadlines."""

    def __init__(self, recovery: Recovery, execute: Callable[[list[Action]], None]) -> None:
        """Create a timer that is not set.

        Args:
            recovery: has the deadlines.
            execute: executes the actions that follow; it calls `schedule` again.
        """
        self._recovery = recovery
        self._execute = execute
        self._handle: asyncio.TimerHandle | None = None

    def schedule(self) -> None:
        """Set the timer to the next deadline."""
        self.cancel()
        deadline = self._recovery.next_deadline
        if deadline < float("inf"):
            delay = max(0.0, deadline - time.monotonic())
            self._handle = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def cancel(self) -> None:
        """Do not call anything any more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _on_timer(self) -> None:
        actions = self._recovery.on_timer(time.monotonic())
        for action in actions:
            if isinstance(action, KillWorker):
                name, about = self._recovery.name_of(action.sender), {"about": action.sender}
                log.warning("the worker of %s is killed: %s", name, action.cause, extra=about)
        self._execute(actions)
