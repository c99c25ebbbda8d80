"""Reports of a worker that computes: its utilization to the parent, step times to the driver."""

import asyncio
from collections.abc import Callable

from gllm.messages.reports import StageTimes, StageUtilization
from gllm.recovery.placement import WorkerPlacement
from gllm.runtime.worker.backend import DeviceBackend
from gllm.runtime.worker.stage import StageRunner

REPORT_SECONDS = 0.5
"""Interval between two reports."""


class StageReporter:
    """Sends reports as long as the worker has steps."""

    def __init__(
        self,
        place: WorkerPlacement,
        runner: StageRunner,
        backend: DeviceBackend,
        send_to_parent: Callable[[StageUtilization], None],
        send_to_driver: Callable[[StageTimes], None],
    ) -> None:
        """Create a reporter; `schedule` has to be called with each step.

        Args:
            place: of the worker; step times are those of the ranks 0.
            runner: counts and times the steps.
            backend: counts the host's time and compilations.
            send_to_parent: sends totals.
            send_to_driver: sends step times.
        """
        self._place, self._runner, self._backend = place, runner, backend
        self._send_to_parent, self._send_to_driver = send_to_parent, send_to_driver
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def schedule(self) -> None:
        """Report in half a second, unless a report is scheduled already."""
        if self._timer is None and not self._is_closed:
            self._timer = self._loop.call_later(REPORT_SECONDS, self._report)

    def close(self) -> None:
        """Report nothing any more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _report(self) -> None:
        self._timer = None
        runner, backend = self._runner, self._backend
        self._send_to_parent(
            StageUtilization(
                self._place.stage,
                runner.num_steps,
                runner.busy_seconds,
                backend.host_seconds,
                backend.num_compilations,
                self._place.rank,
            )
        )
        times = StageTimes(self._place.stage, *runner.pop_step_times())
        if not self._place.rank:
            self._send_to_driver(times)
        if runner.is_busy or times.steps:
            # Once more after the last step, so that bubbles are known up to its end.
            self.schedule()
