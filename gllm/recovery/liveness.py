"""Liveness: find workers that exist but do not work.

The workers send heartbeats, and the node samples their processes. A worker is frozen if it is
stopped or silent for too long, or if its step takes far longer than earlier ones while the process
computes nothing.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CHECK_SECONDS = 1.0
"""Interval between two heartbeats of a worker, and longest one between two checks."""
FREEZE_SECONDS = 10.0
"""Default time for which a frozen worker has been stopped, or idle without a heartbeat."""
MIN_SILENT_SECONDS = 5.0
"""Shortest time without a heartbeat after which an idle worker is frozen, however short the time
for a stopped one is: a busy machine can delay a few heartbeats."""
BUSY_SILENT_SECONDS = 60.0
"""Shortest time without a heartbeat after which a worker is frozen even if it uses its cores or
loads its weights: imports, copies and page faults can block heartbeats."""
STEP_FACTOR = 10.0
"""The step of a frozen worker takes longer than the longest earlier one by this factor ..."""
STEP_FREEZE_TIMES = 3.0
"""... and by this multiple of the time for a stopped worker, without progress of its CPU time."""
WAITING_FACTOR = 2.0
"""A step that waits for another rank of its stage may take longer by this factor."""
BUSY_STEP_TIMES = 20.0
"""Multiple of the health timeout that a step may take while its process uses its cores. A process
that computes without an end is unhealthy after it."""
IDLE_SHARE = 0.02
"""Share of a core below which a process makes no progress; heartbeats alone need less."""
MAX_CHECK_SECONDS = 5.0
"""Interval between two checks after which the head itself was suspended, so that silence of the
workers means nothing."""


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """CPU time of a worker process, and whether it is stopped (SIGSTOP or a debugger)."""

    is_stopped: bool
    """True if a signal or a debugger has stopped the process (state T in /proc)."""
    cpu_seconds: float
    """CPU time of all threads since the start of the process."""


@dataclass(slots=True)
class _Watched:
    """Worker that is watched."""

    last_heartbeat: float = math.inf
    """Infinity before the first heartbeat: the process may still import its modules."""
    stopped_since: float = math.inf
    busy_at: float = -math.inf
    """Last time at which the process used its cores."""
    sample: ProcessSample | None = None
    sample_time: float = 0.0
    step: int | None = None
    """Step under way; None while there is none."""
    step_started: float = math.inf
    longest_step_seconds: float = 0.0
    """Longest time of an earlier step that a heartbeat has reported."""
    is_waiting: bool = False
    """True if the step waits for another rank of the stage."""


class FrozenDetector:
    """Finds workers that hang, from their heartbeats and the CPU time of their processes."""

    def __init__(self, freeze_seconds: float = FREEZE_SECONDS) -> None:
        """Create a detector without workers.

        Args:
            freeze_seconds: time after which a stopped worker counts as frozen; other times follow
                from it.
        """
        self.check_seconds = min(CHECK_SECONDS, freeze_seconds / 4)
        """Interval at which `check` has to be called."""
        self._freeze_seconds = freeze_seconds
        self._silent_seconds = max(freeze_seconds, MIN_SILENT_SECONDS)
        self._busy_silent_seconds = max(freeze_seconds, BUSY_SILENT_SECONDS)
        self._step_seconds = STEP_FREEZE_TIMES * freeze_seconds
        self._watched: dict[int, _Watched] = {}
        """By sender, in the order of their stages."""
        self._last_check = -math.inf

    def watch(self, senders: Iterable[int]) -> None:
        """Start to check the workers of a new epoch, in the order of their stages."""
        self._watched = {sender: _Watched() for sender in senders}

    def on_heartbeat(
        self,
        sender: int,
        step: int | None,
        step_seconds: float,
        now: float,
        is_waiting: bool = False,
    ) -> None:
        """Handle a worker's heartbeat.

        Args:
            sender: the worker.
            step: number of the step that it computes; None for no step.
            step_seconds: time since it began the step.
            now: time in seconds.
            is_waiting: True if the step waits for another rank of the stage.
        """
        worker = self._watched.get(sender)
        if worker is None:
            return
        worker.last_heartbeat = now
        if worker.step is not None and step != worker.step:
            # Until the heartbeat before this one the earlier step was under way.
            seconds = now - CHECK_SECONDS - worker.step_started
            worker.longest_step_seconds = max(worker.longest_step_seconds, seconds)
        worker.step, worker.is_waiting = step, is_waiting
        worker.step_started = math.inf if step is None else now - step_seconds

    def restart_times(self, senders: Iterable[int], now: float) -> None:
        """Restart the timeouts of workers whose state is unknown at the moment."""
        for sender in senders:
            if worker := self._watched.get(sender):
                self._restart_times(worker, now)

    def check(
        self, samples: Mapping[int, ProcessSample], now: float, is_serving: bool
    ) -> dict[int, str]:
        """Return the cause for each frozen worker; call it every `check_seconds`.

        Args:
            samples: state of each worker's process, by sender, where it is known.
            now: time in seconds.
            is_serving: False while the workers load weights or initialize.
        """
        was_suspended = now - self._last_check > MAX_CHECK_SECONDS
        self._last_check = now
        for sender, worker in self._watched.items():
            if was_suspended:
                self._restart_times(worker, now)
            self._note_sample(worker, samples.get(sender), now)
        causes = {
            sender: cause
            for sender, worker in self._watched.items()
            if (cause := self._silence(worker, now, is_serving))
        }
        if not causes and is_serving:
            for sender, worker in self._watched.items():
                if cause := self._stuck_step(worker, now):
                    # Later stages wait for the first one whose step does not end.
                    return {sender: cause}
        return causes

    def has_living_step(
        self, now: float, timeout_seconds: float, predicted_seconds: float = 0.0
    ) -> bool:
        """Return True if a step is under way that may still end by itself.

        A step may take `timeout_seconds` longer than STEP_FACTOR times what is expected of it, or
        BUSY_STEP_TIMES times that while its process uses its cores.

        Args:
            now: time in seconds.
            timeout_seconds: health timeout.
            predicted_seconds: predicted time of the longest step under way.
        """
        return any(
            self._is_living(worker, now, timeout_seconds, predicted_seconds)
            for worker in self._watched.values()
        )

    def _is_living(
        self, worker: _Watched, now: float, timeout_seconds: float, predicted_seconds: float
    ) -> bool:
        is_stopped = worker.stopped_since < math.inf
        if worker.step is None or is_stopped or self._silence(worker, now, is_serving=True):
            return False
        expected = STEP_FACTOR * max(worker.longest_step_seconds, predicted_seconds)
        is_busy = now - worker.busy_at < self._silent_seconds
        patience = timeout_seconds * (BUSY_STEP_TIMES if is_busy else 1.0)
        return now - worker.step_started < expected + patience

    @staticmethod
    def _restart_times(worker: _Watched, now: float) -> None:
        """Restart the times of a worker."""
        worker.busy_at = now
        worker.stopped_since = math.inf
        worker.last_heartbeat = now if worker.last_heartbeat < math.inf else math.inf
        worker.step_started = now if worker.step is not None else math.inf

    @staticmethod
    def _note_sample(worker: _Watched, sample: ProcessSample | None, now: float) -> None:
        """Note the use of the cores since the last sample."""
        before, seconds = worker.sample, now - worker.sample_time
        if sample is None:
            return
        if not sample.is_stopped:
            worker.stopped_since = math.inf
        elif worker.stopped_since == math.inf:
            worker.stopped_since = now
        if before is None or sample.cpu_seconds - before.cpu_seconds >= IDLE_SHARE * seconds:
            worker.busy_at = now
        worker.sample, worker.sample_time = sample, now

    def _silence(self, worker: _Watched, now: float, is_serving: bool) -> str:
        """Return the cause if a worker is stopped or silent for too long, else nothing."""
        silent_seconds = now - worker.last_heartbeat
        is_idle = now - worker.busy_at >= self._silent_seconds and is_serving
        limit = self._silent_seconds if is_idle else self._busy_silent_seconds
        is_silent = silent_seconds >= limit
        stopped_seconds = now - worker.stopped_since
        if stopped_seconds >= self._freeze_seconds or (is_silent and stopped_seconds >= 0):
            return f"it has been stopped for {stopped_seconds:.0f} seconds (state T)"
        if is_silent:
            return f"it has sent no heartbeat for {silent_seconds:.0f} seconds"
        return ""

    def _stuck_step(self, worker: _Watched, now: float) -> str:
        """Return the cause if a worker's step does not end, else nothing."""
        seconds = now - worker.step_started
        limit = STEP_FACTOR * worker.longest_step_seconds + self._step_seconds
        if worker.is_waiting:
            # The rank that it waits for is found first.
            limit *= WAITING_FACTOR
        if seconds < limit or now - worker.busy_at < self._step_seconds:
            return ""
        return f"its step {worker.step} has taken {seconds:.0f} seconds without progress"
