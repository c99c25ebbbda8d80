"""Interval of a step: its longest stage time, or its share of the round trip of a full pipeline."""

from collections.abc import Sequence
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.scheduler.plan import ScheduledRow, StepPlan, StepTime
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_intervals import StepIntervalCollector
from tests.support.examples import num_examples


def make_plan(step: int) -> StepPlan:
    return StepPlan(step, [ScheduledRow(step, 0, 0, 8, [], [], True)], [])


class Ring:
    """Pipeline with a number of micro-batches in flight; each hop and each return takes time."""

    def __init__(self, stages: int, depth: int, hop: float = 0.0, back: float = 0.0) -> None:
        self.intervals: dict[int, float] = {}
        self.committed: list[float] = []
        """Times at which the driver has the results, by step."""
        self.times: list[list[StepTime]] = [[] for _ in range(stages)]
        self.depth, self.hop, self.back = depth, hop, back
        self.collector = StepIntervalCollector(self.observe, stages)

    def observe(self, work: StageWork, seconds: float) -> None:
        self.intervals[work.step] = seconds

    def run(self, steps: Sequence[Sequence[float]]) -> None:
        """Compute steps, each with a time per stage; stages report after the last step."""
        for step, seconds in enumerate(steps):
            now = self.committed[step - self.depth] if step >= self.depth else 0.0
            if step >= self.depth:
                self.collector.on_committed(step - self.depth)
            self.collector.on_time(now)
            self.collector.on_scheduled(make_plan(step), now, self.depth)
            ready = now
            for stage, duration in enumerate(seconds):
                start = ready + self.hop * bool(stage)
                if self.times[stage]:
                    start = max(start, self.times[stage][-1].end)
                ready = start + duration
                self.times[stage].append(StepTime(step, start, ready))
            self.committed.append(ready + self.back)
        for stage, times in enumerate(self.times):
            self.collector.on_stage_times(stage, times)


@settings(max_examples=num_examples(30, 300), deadline=None)
@given(
    stages=st.integers(1, 5),
    seconds=st.lists(st.lists(st.floats(1e-3, 1), min_size=5, max_size=5), min_size=8, max_size=20),
)
def test_without_overhead_it_is_the_longest_stage_time(
    stages: int, seconds: list[list[float]]
) -> None:
    """Also with bubbles, in which a stage waits for a longer micro-batch on another one."""
    ring = Ring(stages, depth=stages)
    ring.run([each[:stages] for each in seconds])
    assert len(ring.intervals) == len(seconds) - stages
    for step, interval in ring.intervals.items():
        assert interval == pytest.approx(max(seconds[step][:stages]), rel=1e-9)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(("hop", "back"), [(0.0, 0.02), (0.01, 0.0), (0.003, 0.005)])
def test_it_is_the_time_between_results_of_a_full_pipeline(
    stages: int, hop: float, back: float
) -> None:
    ring = Ring(stages, stages, hop, back)
    rng = Random(4)
    ring.run([[rng.uniform(0.008, 0.012)] * stages for _ in range(400)])
    period = (ring.committed[-1] - ring.committed[100]) / (len(ring.committed) - 101)
    mean = fmean(ring.intervals[step] for step in range(100, 390))
    # A wait for another step during a transfer counts as a wait.
    assert 0.4 * (period - 0.01) < mean - 0.01 < 1.1 * (period - 0.01)


def test_more_steps_in_flight_hide_the_overhead() -> None:
    ring = Ring(2, depth=8, hop=0.03, back=0.03)
    ring.run([[0.01, 0.01]] * 40)
    assert ring.intervals[30] == pytest.approx(0.01)


def test_time_between_steps_of_the_first_stage_counts() -> None:
    """A stage that samples before it begins the next step, which is ready."""
    collector = StepIntervalCollector(
        lambda work, seconds: intervals.append((work.step, seconds)), stages=1
    )
    intervals: list[tuple[int, float]] = []
    for step, now in ((0, 0.0), (1, 0.5), (2, 9.0)):
        collector.on_time(now)
        collector.on_scheduled(make_plan(step), now, depth=2)
    for step, start, end in ((0, 0.0, 1.0), (1, 1.2, 2.2), (2, 9.1, 10.0)):
        collector.on_stage_times(0, [StepTime(step, start, end)])
        collector.on_committed(step)
        collector.on_time(end)
    # The last one was not ready when the one before it ended.
    assert [step for step, _ in intervals] == [0, 1, 2]
    assert [seconds for _, seconds in intervals] == pytest.approx([1.0, 1.2, 0.9])


def test_a_step_that_waits_for_the_result_before_it_leaves_a_gap() -> None:
    """Not one that begins with a new request, and not on several stages."""
    for stages in (1, 2):
        gaps: list[float] = []
        collector = StepIntervalCollector(lambda work, seconds: None, stages, gaps.append)
        for step, (now, start) in enumerate([(0.0, 0.1), (1.3, 1.5), (9.0, 9.1), (10.2, 10.25)]):
            collector.on_time(now)
            collector.on_scheduled(make_plan(step), now, depth=2)
            for stage in range(stages):
                collector.on_stage_times(stage, [StepTime(step, start, start + 1)])
            collector.on_committed(step)
            if step == 1:
                collector.on_time(2.7)
        assert gaps == (pytest.approx([0.4, 0.15]) if stages == 1 else [])


def test_the_order_of_reports_makes_no_difference() -> None:
    rng = Random(3)
    steps = [[rng.uniform(0.01, 0.03) for _ in range(3)] for _ in range(30)]
    together, alone = Ring(3, 3, 0.002, 0.01), Ring(3, 3, 0.002, 0.01)
    together.run(steps)
    alone.collector.on_stage_times = lambda stage, times: None  # type: ignore[method-assign]
    alone.run(steps)
    del alone.collector.on_stage_times
    reports = [(stage, time) for stage, times in enumerate(alone.times) for time in times]
    for stage, time in sorted(reports, key=lambda report: (report[1].step, -report[0])):
        alone.collector.on_stage_times(stage, [time])
    assert alone.intervals == pytest.approx(together.intervals)
    assert len(alone.intervals) == 27


def test_nobody_listens_and_nothing_is_kept() -> None:
    collector = StepIntervalCollector(None, stages=1)
    collector.on_scheduled(make_plan(0), 0.0, 1)
    collector.on_committed(0)
    collector.on_time(1.0)
    collector.on_stage_times(0, [StepTime(0, 0.0, 1.0)])
    assert not collector.num_pending


def test_steps_without_reports_are_dropped() -> None:
    """A stage that fails a step reports no time of it."""
    collector = StepIntervalCollector(lambda work, seconds: None, stages=1)
    for step in range(5000):
        collector.on_scheduled(make_plan(step), float(step), 1)
    assert collector.num_pending <= 4096
