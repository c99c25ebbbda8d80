"""Counters of a server over the epochs of its engine."""

from typing import get_type_hints

from hypothesis import given
from hypothesis import strategies as st

from gllm.messages.reports import BubbleReport, StageUtilization
from gllm.runtime.head.client import ReportTotals
from gllm.scheduler.plan import SchedulerStats

GAUGES = (
    "running",
    "waiting",
    "kv_usage",
    "in_flight",
    "waiting_tokens",
    "decode_context_tokens",
    "decoding",
    "depth",
    "fetching",
    "held_blocks",
    "in_flight_prefill_tokens",
    "state_slots",
    "used_state_slots",
    "prefill_batch_tokens",
    "kv_push_threshold",
)
COUNTERS = [
    name
    for name, kind in get_type_hints(SchedulerStats).items()
    if name not in GAUGES and kind is int
]

increments = st.lists(st.integers(0, 5), min_size=len(COUNTERS), max_size=len(COUNTERS))
turns = st.lists(st.one_of(st.none(), st.tuples(increments, st.integers(0, 3))), max_size=30)
"""None: the next epoch begins. Else increments of the counters, and the stage that reports."""


@given(turns)
def test_counters_are_sums_over_all_epochs(
    turns: list[tuple[list[int], int] | None],
) -> None:
    totals = ReportTotals()
    stats, expected = SchedulerStats(), dict.fromkeys(COUNTERS, 0)
    steps: dict[int, int] = {}
    all_steps: dict[int, int] = {}
    seconds: list[float] = []
    work_seconds = past_work = 0.0
    for turn in turns:
        if turn is None:
            totals.next_epoch()
            stats, steps, seconds = SchedulerStats(), {}, []
            past_work, work_seconds = past_work + work_seconds, 0.0
            assert [getattr(totals.stats, name) for name in GAUGES] == [0] * len(GAUGES)
            continue
        numbers, stage = turn
        counters = {name: getattr(stats, name) for name in COUNTERS}
        sums = {n: counters[n] + k for n, k in zip(COUNTERS, numbers, strict=True)}
        stats = SchedulerStats(**sums, running=stage)
        for name, number in zip(COUNTERS, numbers, strict=True):
            expected[name] += number
        steps[stage] = steps.get(stage, 0) + numbers[0]
        all_steps[stage] = all_steps.get(stage, 0) + numbers[0]
        work_seconds += numbers[1]
        seconds = [float(work_seconds)] * (stage + 1)
        totals.latest_stats = stats
        totals.on_report(StageUtilization(stage, steps[stage], float(steps[stage]), 1.0, 2))
        totals.on_report(BubbleReport(seconds, work_seconds))
        assert totals.stats.running == stage
    assert {name: getattr(totals.stats, name) for name in COUNTERS} == expected
    loads = totals.stage_loads
    assert {stage: load.num_steps for stage, load in loads.items()} == all_steps
    assert {stage: load.busy_seconds for stage, load in loads.items()} == all_steps
    assert totals.bubbles.work_seconds == past_work + work_seconds


def test_a_stage_that_no_longer_exists_keeps_its_counters() -> None:
    totals = ReportTotals()
    totals.on_report(StageUtilization(0, 4, 1.0, late_seconds=0.25))
    totals.on_report(StageUtilization(1, 5, 2.0, 0.5, 3))
    totals.on_report(BubbleReport([1.0, 2.0], 3.0))
    totals.next_epoch()
    totals.on_report(StageUtilization(0, 2, 0.5, late_seconds=0.5))
    totals.on_report(BubbleReport([0.25], 1.0))
    assert totals.stage_loads == {
        0: StageUtilization(0, 6, 1.5, late_seconds=0.75),
        1: StageUtilization(1, 5, 2.0, 0.5, 3),
    }
    assert totals.bubbles == BubbleReport([1.25, 2.0], 4.0)


def test_ranks_of_a_stage_count_apart() -> None:
    totals = ReportTotals()
    totals.on_report(StageUtilization(0, 4, 1.0))
    totals.on_report(StageUtilization(0, 4, 0.5, rank=1))
    totals.next_epoch()
    totals.on_report(StageUtilization(0, 2, 0.25, rank=1))
    assert totals.rank_loads == {
        (0, 0): StageUtilization(0, 4, 1.0),
        (0, 1): StageUtilization(0, 6, 0.75, rank=1),
    }
    assert totals.stage_loads == {0: StageUtilization(0, 4, 1.0)}


def test_right_guesses_are_counted_by_position_over_epochs() -> None:
    totals = ReportTotals()
    totals.latest_stats = SchedulerStats(accepted_per_position=(3, 1))
    totals.next_epoch()
    assert totals.stats.accepted_per_position == (3, 1)
    totals.latest_stats = SchedulerStats(accepted_per_position=(2, 0))
    assert totals.stats.accepted_per_position == (5, 1)
