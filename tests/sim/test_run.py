"""Records of runs, from logs and as they run; counted costs of a run, and runs that end early."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.observability.step_log import (
    AbortEvent,
    AddEvent,
    CommitEvent,
    ScheduleEvent,
    StageTimesEvent,
    StartEvent,
    StepLogError,
    StepLogEvent,
    StepLogWriter,
    read_step_log,
)
from gllm.options.slo import NO_SLO, Slo, parse_slo
from gllm.plan.capacity import measure_capacity
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import (
    ON_DEVICE,
    SampledToken,
    ScheduledRow,
    StepPlan,
    StepResult,
    StepTime,
)
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.capacity import CAPACITY_RULES, CapacityRule
from gllm.sim.cluster.cluster import SimulatedCluster, simulate_cluster
from gllm.sim.cluster.epoch import EngineEpoch
from gllm.sim.cluster.router import make_router
from gllm.sim.configured import (
    SimulationAtRate,
    build_simulation,
    simulate_requests,
    simulate_trial,
)
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.costs.roofline import LayerRoofline
from gllm.sim.deployment import Deployment, roofline_deployment, simulate
from gllm.sim.event_loop import EventLoop
from gllm.sim.metrics.delays import MAX_CHECKS, DelayLimitStop, measure_rate_trial
from gllm.sim.metrics.intervals import bubble_intervals
from gllm.sim.metrics.micro_batch_table import MicroBatch
from gllm.sim.metrics.report import format_metrics_table, summarize_run
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.metrics.run_recorder import RunRecorder
from gllm.sim.options import SimulationConfig
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.workloads.requests import WorkloadRequest, iterate_scheduler_requests, make_workload
from tests.support.examples import num_examples
from tests.support.scheduler.pipeline import EVERY_POLICY
from tests.support.work import count_all_calls

CONFIG = SimulationConfig(
    model="qwen2.5-14b",
    device="L20",
    pipeline_parallel_size=1,
    workload="uniform:100,900,1,8",
    requests=200,
    max_model_len=1024,
)
"""Serves about 5 requests per second."""
RULE = CapacityRule(min_requests=100, usual_requests=200, min_seconds=20.0)

MAX_CALLS_PER_ROW = {"throttle-paper": 26.5, "throttle": 28.5}
"""Python functions called per output token, with the events of its share of a micro-batch, by
policy. `throttle` learns from the time of every micro-batch on every stage."""
MAX_EVENTS_PER_BATCH = 15
"""Events per micro-batch on four stages."""
MAX_SNAPSHOTS_PER_ARRIVAL = 2.5
"""Snapshots made per arrival at eight engines: of the one that got the last request, and of those
whose requests have ended."""
MAX_EXTRA_OBJECTS = 10
"""Objects that garbage collection visits, by which records of runs of different lengths differ."""

LONGEST = 96
"""Tokens of a sequence at most."""
BLOCK_SIZE = 4

STOP = 9


def start(stages: int = 2, warm_ups: int = 0) -> StartEvent:
    config = SchedulerConfig().resolve(stages, 100, 100)
    return StartEvent(0.0, "m", [1] * stages, config, "driver", warm_ups)


def add(time: float, seq: int, prompt: int, output: int, n: int = 1) -> AddEvent:
    return AddEvent(time, seq, [5] * prompt, output, stop_ids=[STOP], n=n)


def chunk(
    seq: int, begin: int, tokens: int, samples: bool = True, num_preemptions: int = 0
) -> ScheduledRow:
    return ScheduledRow(seq, num_preemptions, begin, tokens, [], [], samples)


def decode(seq: int, position: int, num_preemptions: int = 0, token: int = 5) -> ScheduledRow:
    return ScheduledRow(seq, num_preemptions, position, 1, [], [token], True)


def plan(time: float, parallelism: int, step: int, *rows: ScheduledRow) -> ScheduleEvent:
    return ScheduleEvent(time, StepPlan(step, list(rows), []), parallelism)


def times(stage: int, step: int, begin: float, end: float) -> StageTimesEvent:
    return StageTimesEvent(end, stage, [StepTime(step, begin, end)])


def commit(
    time: float, step: int, *seqs: int, token: int = 5, num_preemptions: int = 0
) -> CommitEvent:
    return CommitEvent(
        time, StepResult(step, [SampledToken(seq, num_preemptions, token) for seq in seqs])
    )


LOG: list[StepLogEvent] = [
    start(),
    add(10.0, 0, prompt=4, output=3),
    plan(10.0, 1, 0, chunk(0, 0, 4)),
    add(11.0, 1, prompt=6, output=2),
    plan(11.0, 2, 1, chunk(1, 0, 3, samples=False)),
    times(0, 0, 10.0, 12.0),
    times(0, 1, 12.0, 13.0),
    times(1, 0, 13.0, 14.0),
    commit(15.0, 0, 0),
    plan(15.0, 2, 2, decode(0, 4), chunk(1, 3, 3)),
    times(1, 1, 15.0, 16.0),
    commit(17.0, 1),
    ScheduleEvent(17.0, None, 1),
    times(0, 2, 16.0, 18.0),
    times(1, 2, 18.0, 20.0),
    commit(21.0, 2, 0, 1),
    plan(21.0, 1, 3, decode(0, 5), decode(1, 6)),
    times(0, 3, 21.0, 22.0),
    times(1, 3, 23.0, 24.0),
    commit(25.0, 3, 0, 1),
    ScheduleEvent(25.0, None, 0),
]


@pytest.fixture
def run() -> RunRecord:
    return build_run_record(LOG)


def test_timelines_of_requests(run: RunRecord) -> None:
    first, second = run.requests[0].line, run.requests[1].line
    assert (first.arrival, first.times, first.num_tokens) == (10, [15, 21, 25], 3)
    assert (first.ttft, first.tpot, first.itl, first.e2el) == (5, 5, [6, 4], 15)
    assert (second.ttft, second.tpot, second.itl, second.e2el) == (10, 4, [4], 14)
    assert [served.num_prompt_tokens for served in run.requests.values()] == [4, 6]
    assert (run.begin_time(), run.end_time()) == (10, 25)


def test_micro_batches_with_their_tokens_and_times(run: RunRecord) -> None:
    tokens = [(step.num_prefill_tokens, step.num_decode_tokens) for step in run.micro_batches]
    assert tokens == [(4, 0), (3, 0), (3, 1), (0, 2)]
    assert [step.work.num_sampled_rows for step in run.micro_batches] == [1, 0, 2, 2]
    assert [step.planned_time for step in run.micro_batches] == [10, 11, 15, 21]
    assert [step.committed_time for step in run.micro_batches] == [15, 17, 21, 25]
    assert run.micro_batches[1].stage_times == [StepTime(1, 12, 13), StepTime(1, 15, 16)]


def test_bubbles_by_hand(run: RunRecord) -> None:
    """The work is enough for one stage until 11, for two until 17, for one from then on."""
    first, second = run.stage_usages()
    assert (first.span, first.busy, second.busy) == (15, 2 + 1 + 2 + 1, 1 + 1 + 2 + 1)
    # Idle alone 13-14 and 15-16, with the other 14-15; half of 20-21, 22-23 and 24-25.
    assert first.bubble == 1 + 1 + 1 + 1.5
    # Idle alone 11-13 and 16-17, with the other 14-15; half of the same.
    assert second.bubble == 2 + 1 + 1 + 1.5
    assert first.busy_share == 6 / 15
    assert second.bubble_share == 5.5 / 15
    by_stage = [
        sum(b.seconds for b in bubble_intervals(run) if b.stage == stage) for stage in (0, 1)
    ]
    assert by_stage == [first.bubble, second.bubble]


def test_intervals_have_no_gaps_and_end_at_the_limits(run: RunRecord) -> None:
    intervals = list(run.iterate_intervals())
    assert (intervals[0].begin, intervals[-1].end) == (10, 25)
    assert [interval.end for interval in intervals[:-1]] == [
        interval.begin for interval in intervals[1:]
    ]
    assert [
        (s.begin, s.end, s.busy, s.parallelism, s.bubble_share)
        for s in run.iterate_intervals(12.5, 14.5)
    ] == [
        (12.5, 13, (0,), 2, 1),
        (13, 14, (1,), 2, 1),
        (14, 14.5, (), 2, 1),
    ]
    assert list(run.iterate_intervals(30.0)) == list(run.iterate_intervals(end=5.0)) == []


def test_a_summary_in_numbers(run: RunRecord) -> None:
    summary = summarize_run(run, Slo(6.0))
    assert summary["requests"] == summary["finished"] == 2
    assert summary["output_tokens_per_second"] == 5 / 15
    assert summary["total_tokens_per_second"] == (5 + 10) / 15
    assert summary["ttft"]["mean"] == 7.5
    assert summary["tokens_per_step"]["mean"] == (4 + 3 + 4 + 2) / 4
    assert summary["bubble_share"] == [4.5 / 15, 5.5 / 15]
    assert summary["slo_attainment"] == 0.5
    rows = [row.split() for row in format_metrics_table({"ours": summary}).splitlines()]
    assert ["|", "bubbles,", "%", "|", "30", "36.67", "|"] in rows


def test_a_step_that_takes_no_time_does_not_keep_its_stage_busy() -> None:
    run = build_run_record([
        start(1),
        add(0.0, 0, prompt=1, output=2),
        plan(0.0, 1, 0, chunk(0, 0, 1)),
        times(0, 0, 1.0, 1.0),
        commit(1.0, 0, 0),
        plan(1.0, 1, 1, decode(0, 1)),
        times(0, 1, 3.0, 4.0),
        commit(6.0, 1, 0),
    ])  # fmt: skip
    (use,) = run.stage_usages()
    assert use.busy == 1
    assert use.bubble == 1 + 2  # 4-6 is not known of: nobody asked for a plan after it


@pytest.mark.parametrize("first_end", [1.0, 1.25])
def test_steps_that_touch_or_overlap_keep_their_stage_busy(first_end: float) -> None:
    """Clocks may be off a little."""
    steps = [times(0, 1, 1.0, 2.0), times(0, 0, 0.0, first_end)]
    plans = [plan(0.0, 1, 0, chunk(0, 0, 1)), plan(0.0, 1, 1, decode(0, 1, token=ON_DEVICE))]
    commits = [commit(1.0, 0, 0), commit(2.0, 1, 0)]
    for order in (steps, steps[::-1]):
        run = build_run_record([start(1), add(0.0, 0, 1, 2), *plans, *order, *commits])
        (use,) = run.stage_usages()
        assert (use.busy, use.bubble) == (2, 0)
        # The second was planned before the first one's token was known, but is a decode.
        assert [step.num_decode_tokens for step in run.micro_batches] == [0, 1]


def test_preempted_sequences_prefill_again() -> None:
    run = build_run_record([
        start(1),
        add(0.0, 0, prompt=3, output=5),
        plan(0.0, 1, 0, chunk(0, 0, 3)),
        commit(1.0, 0, 0),
        plan(1.0, 1, 1, decode(0, 3)),
        commit(2.0, 1, 0),
        plan(2.0, 1, 2, chunk(0, 0, 4, samples=False, num_preemptions=1)),
        commit(3.0, 2),
        plan(3.0, 1, 3, chunk(0, 4, 1, num_preemptions=1)),
        commit(4.0, 3, 0, num_preemptions=1),
        plan(4.0, 1, 4, decode(0, 5, num_preemptions=1)),
        commit(5.0, 4, 0, num_preemptions=1),
        plan(5.0, 1, 5, chunk(0, 0, 7, num_preemptions=2)),
        commit(6.0, 5, 0, num_preemptions=2),
    ])  # fmt: skip
    assert run.requests[0].num_preemptions == 2
    assert run.requests[0].line.num_tokens == 5
    assert summarize_run(run)["preemptions"] == 2
    tokens = [(step.num_prefill_tokens, step.num_decode_tokens) for step in run.micro_batches]
    assert tokens == [(3, 0), (0, 1), (4, 0), (1, 0), (0, 1), (7, 0)]


@pytest.mark.parametrize(
    ("end", "outputs"),
    [
        ([AbortEvent(1.0, [0]), commit(2.0, 1, 0)], [1]),
        ([commit(2.0, 1, 0, token=STOP)], [1, 2]),
        ([CommitEvent(2.0, StepResult(1, [SampledToken(0, 0, -1, "no memory")]))], [1]),
        ([CommitEvent(2.0, StepResult(1, [], "no memory"))], [1]),
    ],
    ids=["abort", "stop", "failed row", "failed step"],
)
def test_what_is_in_flight_of_an_ended_sequence_is_no_output(
    end: list[StepLogEvent], outputs: list[float]
) -> None:
    run = build_run_record([
        start(1),
        add(0.0, 0, prompt=3, output=9),
        plan(0.0, 1, 0, chunk(0, 0, 3)),
        plan(0.0, 1, 1, decode(0, 3, token=ON_DEVICE)),
        commit(1.0, 0, 0),
        plan(1.0, 1, 2, decode(0, 4, token=ON_DEVICE)),
        *end,
        commit(3.0, 2, 0),
    ])  # fmt: skip
    assert run.requests[0].line.times == outputs


def test_choices_are_requests_of_one_arrival() -> None:
    run = build_run_record([start(1), add(4.0, 3, prompt=2, output=1, n=2)])
    assert [(seq, s.line.arrival) for seq, s in run.requests.items()] == [(3, 4.0), (4, 4.0)]


def test_warm_ups_are_left_out() -> None:
    warm: list[StepLogEvent] = [
        start(warm_ups=2),
        add(1.0, 0, prompt=4, output=1),
        add(1.0, 1, prompt=4, output=1),
        plan(1.0, 2, 0, chunk(0, 0, 4), chunk(1, 0, 4)),
        times(0, 0, 1.0, 4.0),
        times(1, 0, 4.0, 9.0),
        commit(9.0, 0, 0, 1),
        ScheduleEvent(9.0, None, 0),
        add(10.0, 2, prompt=4, output=1),
        plan(10.0, 1, 1, chunk(2, 0, 4)),
        times(0, 1, 10.0, 11.0),
        times(1, 1, 11.0, 12.0),
        commit(12.0, 1, 2),
    ]
    run = build_run_record(warm)
    assert list(run.requests) == [2]
    assert [step.work.step for step in run.micro_batches] == [1]
    assert (run.begin_time(), run.end_time()) == (10, 12)
    assert [(use.busy, use.bubble) for use in run.stage_usages()] == [(1, 0), (1, 0)]


def test_a_run_cut_off_is_read_as_far_as_it_goes() -> None:
    for length in range(1, len(LOG)):
        run = build_run_record(LOG[:length])
        assert run.end_time() >= run.begin_time()
        assert all(0 <= use.busy + use.bubble <= use.span for use in run.stage_usages())
    run = build_run_record(LOG[:8])
    assert [step.committed_time for step in run.micro_batches] == [None, None]
    assert run.micro_batches[1].stage_times == [StepTime(1, 12, 13), None]
    assert run.requests[0].line.ttft is None
    assert [use.busy_share for use in run.stage_usages()] == [0, 0]


def test_a_log_has_to_begin_with_its_start() -> None:
    for events in ([], LOG[1:]):
        with pytest.raises(ValueError, match="has to begin with its start"):
            build_run_record(events)


# Files.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    log = StepLogWriter(tmp_path / "steps.jsonl")
    for event in LOG:
        log.write(event)
    log.close()
    return tmp_path / "steps.jsonl"


def test_a_file_holds_what_was_written(path: Path) -> None:
    assert list(read_step_log(path)) == LOG
    assert build_run_record(read_step_log(path)) == build_run_record(LOG)


def test_what_was_flushed_can_be_read_meanwhile(tmp_path: Path) -> None:
    log = StepLogWriter(tmp_path / "steps.jsonl")
    for event in LOG[:3]:
        log.write(event)
    log.flush()
    assert list(read_step_log(tmp_path / "steps.jsonl")) == LOG[:3]
    log.close()


def test_a_last_line_cut_off_anywhere_is_left_out(path: Path) -> None:
    whole = path.read_bytes()
    last = len(whole) - whole[:-1].rindex(b"\n") - 1
    assert last > 20
    for missing in range(2, last + 1):
        path.write_bytes(whole[:-missing])
        assert list(read_step_log(path)) == LOG[:-1]
    path.write_bytes(whole[:-1])
    assert list(read_step_log(path)) == LOG


@pytest.mark.parametrize(
    "broken",
    [
        b'{"event": "add", "time": 1.0',
        b"hello",
        b'{"event":"dance","time":1}',
        b"[1]",
        b'{"a":"\xff',
    ],
)
def test_a_broken_line_in_the_middle_is_named(path: Path, broken: bytes) -> None:
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:6], broken, *lines[6:]]))
    events = read_step_log(path)
    assert [next(events) for _ in range(6)] == LOG[:6]
    with pytest.raises(StepLogError, match=r"steps\.jsonl, line 7: not a step log's line"):
        next(events)


def test_a_file_without_its_start_or_with_two_is_named(path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[1:]))
    with pytest.raises(StepLogError, match="line 1: a step log has one start, as line 1"):
        list(read_step_log(path))
    path.write_bytes(b"\n".join([*lines[:3], *lines]))
    with pytest.raises(StepLogError, match="line 4: a step log has one start, as line 1"):
        list(read_step_log(path))
    path.write_bytes(b"")
    assert list(read_step_log(path)) == []
    with pytest.raises(FileNotFoundError):
        list(read_step_log(path.with_name("none")))


def start_of(config: SchedulerConfig) -> StartEvent:
    return StartEvent(0.0, "made up", [1] * config.stages, config, "simulator")


def without_kv_usage(batches: Any) -> list[MicroBatch]:
    return [replace(batch, kv_usage=None) for batch in batches]


def assert_equal(recorded: RunRecord, read: RunRecord) -> None:
    """Assert that two records of one run have the same figures."""
    assert recorded.requests == read.requests
    assert without_kv_usage(recorded.micro_batches) == read.micro_batches
    assert recorded.parallelism == read.parallelism
    assert (recorded.begin_time(), recorded.end_time()) == (read.begin_time(), read.end_time())
    assert list(recorded.iterate_intervals()) == list(read.iterate_intervals())
    assert recorded.stage_usages() == read.stage_usages()
    if read.end_time() > read.begin_time():  # Otherwise rates are not numbers.
        figures = summarize_run(recorded, Slo(1.0, 0.5))
        assert figures.pop("kv_usage")["max"] > 0, "a log does not have it"
        assert figures == summarize_run(read, Slo(1.0, 0.5))


requests = st.lists(
    st.tuples(
        st.floats(0, 20).map(lambda time: round(time, 3)),
        st.integers(1, 60),
        st.integers(1, 36),
        st.sampled_from([1, 1, 1, 3]),
        st.sampled_from([0, 0, 1]),
        st.booleans(),
    ),
    min_size=1,
    max_size=20,
)
"""(arrival, prompt, output, choices, priority, shares the prompt with others)."""


@settings(max_examples=num_examples(15, 1000), deadline=None)
@given(
    requests,
    st.sampled_from([name for name in EVERY_POLICY if name != "auto"]),
    st.integers(1, 4),
    st.integers(LONGEST // BLOCK_SIZE, 60),
    st.booleans(),
    st.lists(st.tuples(st.floats(0, 40), st.integers(0, 30)), max_size=4),
)
def test_a_record_is_that_of_the_log(
    requests: list[tuple[float, int, int, int, int, bool]],
    policy: str,
    stages: int,
    blocks: int,
    runs_ahead: bool,
    aborts: list[tuple[float, int]],
) -> None:
    options = SchedulerConfig(
        policy=policy, block_size=BLOCK_SIZE, async_scheduling=runs_ahead and stages == 1
    )
    config = options.resolve(stages, blocks, LONGEST)
    start = start_of(config)
    recorder, events = RunRecorder(start), list[StepLogEvent]([start])
    pipeline = SimulatedPipeline(config, ConstantCostModel(0.1, 0.02), [recorder], events.append)
    arrivals, seq = [], 0
    for time, prompt, output, n, priority, is_shared in sorted(requests):
        first = 0 if is_shared else 1000 * (seq + 1)
        tokens = range(first, first + prompt)
        arrivals.append((time, SchedulerRequest(seq, tokens, output, priority=priority, n=n)))
        seq += n
    pipeline.submit_each(arrivals)
    for time, aborted in aborts:
        pipeline.abort_at(time, [aborted])
    pipeline.loop.run()
    assert_equal(recorder.record, build_run_record(events))


def test_times_and_cache_of_preempted_sequences() -> None:
    """Two sequences of 8 + 24 tokens do not fit in 12 blocks of 4: the later one waits twice."""
    config = SchedulerConfig(
        policy="sarathi", block_size=4, expected_output_tokens=0, prefix_cache=False
    ).resolve(1, 12, 48)
    recorder = RunRecorder(start_of(config))
    pipeline = SimulatedPipeline(config, ConstantCostModel(1.0), [recorder])
    prompts = (range(8), range(100, 108))
    pipeline.submit_each((0.0, SchedulerRequest(seq, prompts[seq], 25)) for seq in range(2))
    pipeline.loop.run()
    run = recorder.record
    first, second = run.requests[0], run.requests[1]
    assert (first.first_scheduled_time, second.first_scheduled_time) == (0.0, 0.0)
    assert (first.num_preemptions, first.preempted_seconds) == (0, 0.0)
    assert second.num_preemptions == 1
    gaps = second.line.itl
    # The step that prefills it again takes one second itself.
    assert second.preempted_seconds == pytest.approx(max(gaps) - 1)
    usages = [batch.kv_usage for batch in run.micro_batches]
    assert usages[0] == pytest.approx(4 / 12)
    assert max(filter(None, usages)) == pytest.approx(1)
    assert len(run.micro_batches) == len(run.micro_batches[:]) > 0
    assert run.micro_batches[-1] == run.micro_batches[len(run.micro_batches) - 1]
    with pytest.raises(IndexError):
        run.micro_batches[len(run.micro_batches)]


def test_a_resumed_request_has_the_output_of_before() -> None:
    config = SchedulerConfig(block_size=4).resolve(2, 50, LONGEST)
    recorder = RunRecorder(start_of(config))
    pipeline = SimulatedPipeline(config, ConstantCostModel(1.0), [recorder])
    request = SchedulerRequest(3, [1, 2, 3], 6, outputs=[[5, 5]], age_seconds=2.5)
    pipeline.submit_each([(4.0, request)])
    pipeline.loop.run()
    served = recorder.record.requests[3]
    assert served.line.arrival == 1.5
    assert served.line.num_tokens == 6
    assert served.line.times[0] == 4.0
    assert len(served.line.times) == 5


def test_simulate_writes_a_log_only_if_required() -> None:
    config = SchedulerConfig(block_size=4).resolve(2, 50, LONGEST)
    deployment = Deployment("made up", [1, 1], ConstantCostModel(0.1), config)
    jobs = make_workload("uniform:4,40,2,24", 20, 3.0)
    events: list[StepLogEvent] = []
    logged, plain = simulate(deployment, jobs, events.append), simulate(deployment, jobs)
    assert_equal(plain, build_run_record(events))
    assert logged.requests == plain.requests
    assert sum(isinstance(event, AddEvent) for event in events) == len(jobs)


def test_a_preempted_prompt_loses_the_time_since_its_last_chunk() -> None:
    """Chunks of 4 tokens each 1 s; the second request has all blocks from 2 s on."""
    config = SchedulerConfig(policy="sarathi", max_num_batched_tokens=4, block_size=4)
    deployment = Deployment("made up", [1], ConstantCostModel(1.0), config.resolve(1, 5, 20))
    jobs = [WorkloadRequest(0.0, 16, 2, priority=1), WorkloadRequest(1.5, 16, 1)]
    events: list[StepLogEvent] = []
    record = simulate(deployment, jobs, events.append)
    preempted = record.requests[0]
    assert preempted.num_preemptions == 1
    assert preempted.first_scheduled_time == 0.0
    assert preempted.preempted_seconds == 4.0
    assert_equal(record, build_run_record(events))


def deployment(policy: str = "auto") -> Deployment:
    config = SchedulerConfig(policy=policy)
    return roofline_deployment("qwen2.5-32b", "L20", 4, 4096, scheduler=config)


def decodes(count: int) -> list[WorkloadRequest]:
    """Requests that decode together nearly all the time."""
    return make_workload("uniform:20,60,50,60", count, arrivals="static")


@pytest.mark.parametrize("policy", MAX_CALLS_PER_ROW)
def test_calls_per_decode_row_do_not_grow_with_engines(policy: str) -> None:
    calls_per_row = []
    for num_engines in (1, 4):
        engines = {f"engine-{index}": deployment(policy) for index in range(num_engines)}
        # The same arrivals at each engine.
        jobs = [job for job in decodes(64) for _ in range(num_engines)]
        router = make_router("round-robin", 0)
        num_calls = count_all_calls(lambda: simulate_cluster(engines, jobs, router)).total()  # noqa: B023
        calls_per_row.append(num_calls / sum(job.num_output_tokens for job in jobs))
    assert calls_per_row[0] < MAX_CALLS_PER_ROW[policy]
    assert calls_per_row[1] < 1.05 * calls_per_row[0]


def test_engines_that_share_a_cost_model_predict_each_micro_batch_once() -> None:
    """The stages share a prediction, whatever other engines predict in between."""
    shared = roofline_deployment("qwen2.5-14b", "L20", 4, 4096)
    jobs = make_workload("uniform:200,900,20,60", 40, 16.0)
    pool = {f"e{number}": shared for number in range(8)}
    cluster = SimulatedCluster(make_router("least-requests", 0))
    for name, engine in pool.items():
        cluster.add_engine(name, engine)
    cluster.submit_each(jobs)
    num_predictions = count_all_calls(cluster.run)[LayerRoofline.seconds.__code__]
    engines = cluster.run().engines.values()
    num_batches = sum(len(each.record.micro_batches) for each in engines)
    assert num_batches <= num_predictions <= 1.2 * num_batches


@pytest.mark.full
def test_snapshots_of_request_counts_are_made_when_the_count_has_changed() -> None:
    jobs = make_workload("uniform:200,900,20,60", 80, 16.0)
    engines = {f"engine-{index}": deployment() for index in range(8)}
    router = make_router("least-requests", 0)
    counts = count_all_calls(lambda: simulate_cluster(engines, jobs, router))
    num_snapshots = counts[EngineEpoch.snapshot.__code__]
    assert len(jobs) < num_snapshots < MAX_SNAPSHOTS_PER_ARRIVAL * len(jobs)


def test_events_per_micro_batch() -> None:
    runs: list[RunRecord] = []
    counts = count_all_calls(lambda: runs.append(simulate(deployment(), decodes(64))))
    num_events = counts[EventLoop.push.__code__]
    assert 8 < num_events / len(runs[0].micro_batches) < MAX_EVENTS_PER_BATCH


@pytest.mark.full
def test_a_record_has_no_object_per_micro_batch() -> None:
    simulate(deployment(), decodes(2))
    records, counts = [], []
    for output in (50, 100):
        jobs = make_workload(f"fixed:50,{output}", 16, arrivals="static")
        gc.collect()
        before = len(gc.get_objects())
        records.append(simulate(deployment(), jobs))
        gc.collect()
        counts.append(len(gc.get_objects()) - before)
    assert counts[1] < counts[0] + MAX_EXTRA_OBJECTS
    batches = [len(record.micro_batches) for record in records]
    assert batches[1] > batches[0] + 10 * MAX_EXTRA_OBJECTS


def test_prompts_take_no_memory_before_they_arrive() -> None:
    (_, request), *_ = iterate_scheduler_requests([WorkloadRequest(0.0, 1000, 1)])
    assert request.prompt_token_ids == range(1000)


@settings(max_examples=num_examples(6, 200), deadline=None)
@given(
    st.floats(2.0, 12.0),
    st.sampled_from((0.05, 0.5, 2.0)),
    st.integers(0, 1000),
    st.sampled_from(("sarathi", "vllm", "throttle")),
)
def test_the_verdict_is_that_of_the_whole_run(
    rate: float, limit: float, seed: int, policy: str
) -> None:
    config = replace(CONFIG, rate=rate, seed=seed, scheduler=SchedulerConfig(policy=policy))
    rule = replace(RULE, max_p99_delay_seconds=limit)
    deployment, jobs = build_simulation(config)
    whole = measure_rate_trial(simulate(deployment, jobs).requests.values())
    trial, requests = simulate_trial(config, deployment, jobs, rule)
    assert rule.is_bounded(trial) == rule.is_bounded(whole)
    assert rule.is_sustained(trial) == rule.is_sustained(whole)
    assert trial.num_requests == whole.num_requests
    if rule.is_bounded(whole):
        assert trial == whole
        assert len(requests) == len(jobs)


def test_an_overload_takes_fewer_steps() -> None:
    config = replace(CONFIG, rate=20.0, requests=2000)
    deployment, jobs = build_simulation(config)
    stop = DelayLimitStop([job.arrival_seconds for job in jobs], 1.0)
    stopped = simulate(deployment, jobs, stop=stop)
    assert stop.has_stopped
    whole = simulate(deployment, jobs)
    assert len(stopped.micro_batches) < len(whole.micro_batches) / 10
    assert len(stopped.requests) < len(jobs) / 10


def test_a_run_at_a_low_rate_has_few_decisions() -> None:
    stop = DelayLimitStop([0.0, 1e9], 1.0)
    assert stop.interval_seconds == 1e9 / MAX_CHECKS
    assert DelayLimitStop([0.0, 10.0], 1.0).interval_seconds == 1.0


def test_a_bounded_run_is_not_changed() -> None:
    config = replace(CONFIG, rate=4.0)
    deployment, jobs = build_simulation(config)
    stop = DelayLimitStop([job.arrival_seconds for job in jobs], 5.0)
    stopped, whole = simulate(deployment, jobs, stop=stop), simulate(deployment, jobs)
    assert not stop.has_stopped
    assert stopped.requests == whole.requests
    assert list(stopped.micro_batches) == list(whole.micro_batches)


@pytest.mark.parametrize("text", [pytest.param("", marks=pytest.mark.full), "ttft:p90=0.6"])
def test_the_capacity_is_that_of_whole_runs(text: str) -> None:
    limits = parse_slo(text) if text else NO_SLO
    rule = replace(
        CAPACITY_RULES["vidur"], min_seconds=20.0, max_p99_delay_seconds=1.0, rate_step=1.1
    )
    capacity = measure_capacity(CONFIG, 5.0, rule, limits)
    whole = SimulationAtRate(CONFIG, rule, limits, stops_early=False)
    for rate, trial in capacity.trials:
        assert rule.is_sustained(trial) == rule.is_sustained(whole(rate))
    assert capacity.figures == whole(capacity.rate).figures


def test_several_engines_run_to_their_end() -> None:
    config = replace(CONFIG, rate=80.0, engines=2)
    deployment, jobs = build_simulation(config)
    trial, requests = simulate_trial(
        config, deployment, jobs, replace(RULE, max_p99_delay_seconds=0.5)
    )
    assert requests == simulate_requests(config, deployment, jobs)
    assert 0.5 < trial.p99_delay_seconds < 60
