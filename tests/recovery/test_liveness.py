"""Frozen workers are found, slow and starved ones are left alone."""

from collections.abc import Callable, Container

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.recovery.liveness import (
    BUSY_SILENT_SECONDS,
    BUSY_STEP_TIMES,
    FREEZE_SECONDS,
    MIN_SILENT_SECONDS,
    STEP_FACTOR,
    STEP_FREEZE_TIMES,
    FrozenDetector,
    ProcessSample,
)
from tests.support.examples import num_examples

STEP_SECONDS = STEP_FREEZE_TIMES * FREEZE_SECONDS
"""Time after which a step without progress is a fault."""


class Clock:
    """Two workers in seconds, until one of them is found frozen."""

    def __init__(self, freeze_seconds: float = FREEZE_SECONDS) -> None:
        self.detector = FrozenDetector(freeze_seconds)
        self.detector.watch([1, 2])
        self.now = 1000.0

    def run(
        self,
        seconds: float,
        beats: Callable[[int], tuple[int | None, float] | None],
        sample: Callable[[int], ProcessSample | None],
        is_serving: bool = True,
        waiting: Container[int] = (),
    ) -> dict[int, str]:
        """Return the causes of the first check that finds any."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            for sender in (1, 2):
                if (beat := beats(sender)) is not None:
                    self.detector.on_heartbeat(sender, *beat, self.now, sender in waiting)
            samples = {s: each for s in (1, 2) if (each := sample(s)) is not None}
            if causes := self.detector.check(samples, self.now, is_serving):
                return causes
        return {}


def idle(sender: int) -> ProcessSample:
    return ProcessSample(False, 5.0)


def beating(sender: int) -> tuple[int | None, float]:
    return None, 0.0


def test_idle_workers_with_heartbeats_live_for_ever() -> None:
    assert Clock().run(1000, beating, idle) == {}


def test_a_stopped_worker_is_frozen_and_one_that_goes_on_is_not() -> None:
    clock = Clock()
    clock.run(5, beating, idle)
    stopped = lambda sender: ProcessSample(sender == 2, 5.0)  # noqa: E731
    only_first = lambda sender: (None, 0.0) if sender == 1 else None  # noqa: E731
    assert clock.run(FREEZE_SECONDS - 2, only_first, stopped) == {}
    assert clock.run(100, beating, idle) == {}
    begin = clock.now
    causes = clock.run(100, only_first, stopped)
    assert list(causes) == [2]
    assert "stopped" in causes[2]
    assert FREEZE_SECONDS - 1 <= clock.now - begin <= FREEZE_SECONDS + 2


def test_a_silent_worker_is_frozen_and_a_busy_one_has_more_time() -> None:
    for is_busy, seconds in ((False, FREEZE_SECONDS), (True, BUSY_SILENT_SECONDS)):
        clock = Clock()
        clock.run(5, beating, idle)
        begin = clock.now

        def sample(sender: int, clock: Clock = clock, is_busy: bool = is_busy) -> ProcessSample:
            return ProcessSample(False, clock.now * 0.5 if is_busy else 5.0)

        causes = clock.run(200, lambda sender: (None, 0.0) if sender == 2 else None, sample)
        assert list(causes) == [1]
        assert "no heartbeat" in causes[1]
        assert seconds - 1 <= clock.now - begin <= seconds + 2


@pytest.mark.parametrize("freeze_seconds", [2.0, 7.0, 100.0])
def test_all_times_follow_from_that_of_a_stopped_worker(freeze_seconds: float) -> None:
    def seconds_until_found(
        beats: Callable[[int], tuple[int | None, float] | None],
        sample: Callable[[int, float], ProcessSample],
    ) -> float:
        clock = Clock(freeze_seconds)
        clock.run(5, beating, idle)
        begin = clock.now
        assert clock.run(1000, beats, lambda sender: sample(sender, clock.now))
        return clock.now - begin

    def silent(sender: int) -> None:
        return None

    def is_near(seconds: float, expected: float) -> bool:
        return expected - 1 <= seconds <= expected + 2

    seconds = seconds_until_found(silent, lambda sender, now: ProcessSample(True, 5.0))
    # The check after one second is the first that sees the stop; silence counts from the beginning.
    assert seconds == min(freeze_seconds + 1, max(freeze_seconds, MIN_SILENT_SECONDS))
    seconds = seconds_until_found(silent, lambda sender, now: ProcessSample(False, 5.0))
    assert is_near(seconds, max(freeze_seconds, MIN_SILENT_SECONDS))
    seconds = seconds_until_found(silent, lambda sender, now: ProcessSample(False, now))
    assert is_near(seconds, max(freeze_seconds, BUSY_SILENT_SECONDS))
    clock = Clock(freeze_seconds)
    begin = clock.now
    assert clock.run(1000, lambda sender: (7, clock.now - begin), idle)
    assert is_near(clock.now - begin, STEP_FREEZE_TIMES * freeze_seconds)


@pytest.mark.parametrize(("freeze_seconds", "check_seconds"), [(10.0, 1.0), (1.0, 0.25)])
def test_short_times_are_checked_more_often(freeze_seconds: float, check_seconds: float) -> None:
    assert FrozenDetector(freeze_seconds).check_seconds == check_seconds


def test_before_the_first_heartbeat_and_while_loading_silence_is_no_fault() -> None:
    clock = Clock()
    assert clock.run(500, lambda sender: None, idle, is_serving=False) == {}
    clock.run(5, beating, idle, is_serving=False)
    assert clock.run(BUSY_SILENT_SECONDS - 5, lambda _: None, idle, is_serving=False) == {}


def test_a_step_without_progress_is_found_at_the_first_stage_that_waits() -> None:
    clock = Clock()
    clock.run(5, beating, idle)
    begin = clock.now
    causes = clock.run(200, lambda sender: (7, clock.now - begin), idle)
    assert list(causes) == [1]
    assert "step 7" in causes[1]
    assert STEP_SECONDS - 1 <= clock.now - begin <= STEP_SECONDS + 2


def test_a_rank_without_progress_is_found_before_those_that_wait_for_it() -> None:
    clock = Clock()
    clock.run(5, beating, idle)
    begin, waiting = clock.now, {1}

    def beat(sender: int) -> tuple[int | None, float]:
        return 7, clock.now - begin

    causes = clock.run(200, beat, idle, waiting=waiting)
    assert list(causes) == [2]
    waiting.add(2)
    # Nobody computes: one of them has to end.
    clock.detector.watch([1, 2])
    assert list(clock.run(200, beat, idle, waiting=waiting)) == [1]


def test_a_long_step_that_computes_is_no_fault() -> None:
    clock = Clock()
    begin = clock.now
    sample = lambda sender: ProcessSample(False, clock.now)  # noqa: E731
    assert clock.run(1000, lambda sender: (7, clock.now - begin), sample) == {}


def test_earlier_long_steps_extend_the_limit() -> None:
    clock = Clock()
    busy = lambda sender: ProcessSample(False, clock.now)  # noqa: E731
    clock.run(1, beating, busy)
    begin = clock.now
    clock.run(20, lambda sender: (7, clock.now - begin), busy)
    begin = clock.now
    # Step 7 took about 19 seconds.
    causes = clock.run(1000, lambda sender: (8, clock.now - begin), idle)
    assert "step 8" in causes[1]
    assert clock.now - begin > 17 * STEP_FACTOR + STEP_SECONDS


@settings(max_examples=num_examples(30, 500), deadline=None)
@given(gap=st.floats(6, 1e6), begin=st.integers(1, 9))
def test_a_suspended_head_blames_nobody(gap: float, begin: int) -> None:
    clock = Clock()
    clock.run(begin, lambda sender: (3, 1.0), idle)
    clock.now += gap
    assert clock.run(5, lambda sender: None, idle) == {}


def test_workers_of_earlier_epochs_are_not_watched() -> None:
    clock = Clock()
    clock.detector.watch([2])
    causes = clock.run(100, lambda sender: (1, 50.0) if sender == 1 else (None, 0.0), idle)
    assert causes == {}


HEALTH_SECONDS = 30.0


def computing(clock: Clock, seconds: float, is_busy: bool, predicted: float = 0.0) -> float:
    """Let worker 1 compute one step; return the seconds after which the engine is unhealthy."""
    begin = clock.now

    def beats(sender: int) -> tuple[int | None, float]:
        return (7, clock.now - begin) if sender == 1 else (None, 0.0)

    def sample(sender: int) -> ProcessSample:
        return ProcessSample(False, clock.now if is_busy and sender == 1 else 5.0)

    while clock.now < begin + seconds:
        clock.run(1, beats, sample, is_serving=False)
        if not clock.detector.has_living_step(clock.now, HEALTH_SECONDS, predicted):
            break
    return clock.now - begin


def test_a_long_step_that_uses_its_cores_is_healthy_for_long() -> None:
    limit = BUSY_STEP_TIMES * HEALTH_SECONDS
    assert computing(Clock(), 3 * limit, is_busy=True) == limit


def test_a_step_without_progress_is_healthy_for_the_timeout() -> None:
    # The first samples count as progress.
    seconds = computing(Clock(), 1000, is_busy=False)
    assert HEALTH_SECONDS <= seconds <= HEALTH_SECONDS + FREEZE_SECONDS


def test_a_step_of_a_device_is_healthy_as_long_as_predicted() -> None:
    """The host waits: its process uses no core."""
    predicted = 9.0
    seconds = computing(Clock(), 1000, is_busy=False, predicted=predicted)
    assert seconds == STEP_FACTOR * predicted + HEALTH_SECONDS


def test_no_step_and_a_stopped_or_silent_worker_are_no_progress() -> None:
    clock = Clock()
    assert not clock.detector.has_living_step(clock.now, HEALTH_SECONDS)
    clock.run(3, beating, idle)
    assert not clock.detector.has_living_step(clock.now, HEALTH_SECONDS)
    clock.run(3, lambda _: (7, 0.5), lambda _: ProcessSample(False, clock.now))
    assert clock.detector.has_living_step(clock.now, HEALTH_SECONDS)
    stopped = lambda _: ProcessSample(True, 5.0)  # noqa: E731
    clock.run(3, lambda _: None, stopped)
    assert not clock.detector.has_living_step(clock.now, HEALTH_SECONDS)
    clock = Clock()
    clock.run(3, lambda _: (7, 0.5), lambda _: ProcessSample(False, clock.now))
    clock.run(BUSY_SILENT_SECONDS + 1, lambda _: None, lambda _: ProcessSample(False, clock.now))
    assert not clock.detector.has_living_step(clock.now, HEALTH_SECONDS)
