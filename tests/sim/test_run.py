"""A run read off its log: by hand where it counts, and from files that are not whole."""

from pathlib import Path

import pytest

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
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import (
    ON_DEVICE,
    SampledToken,
    ScheduledRow,
    StepPlan,
    StepResult,
    StepTime,
)
from gllm.sim.metrics.intervals import bubble_intervals
from gllm.sim.metrics.report import format_metrics_table, summarize_run
from gllm.sim.metrics.run_record import RunRecord, build_run_record

STOP = 9


def start(stages: int = 2, warm_ups: int = 0) -> StartEvent:
    config = SchedulerConfig().resolve(stages, 100, 100)
    return StartEvent(0.0, "m", [1] * stages, config, "driver", warm_ups)


def add(time: float, seq: int, prompt: int, output: int, n: int = 1) -> AddEvent:
    return AddEvent(time, seq, [5] * prompt, output, stop_ids=[STOP], n=n)


def chunk(seq: int, begin: int, tokens: int, samples: bool = True, epoch: int = 0) -> ScheduledRow:
    return ScheduledRow(seq, epoch, begin, tokens, [], [], samples)


def decode(seq: int, position: int, epoch: int = 0, token: int = 5) -> ScheduledRow:
    return ScheduledRow(seq, epoch, position, 1, [], [token], True)


def plan(time: float, parallelism: int, step: int, *rows: ScheduledRow) -> ScheduleEvent:
    return ScheduleEvent(time, StepPlan(step, list(rows), []), parallelism)


def times(stage: int, step: int, begin: float, end: float) -> StageTimesEvent:
    return StageTimesEvent(end, stage, [StepTime(step, begin, end)])


def commit(time: float, step: int, *seqs: int, token: int = 5, epoch: int = 0) -> CommitEvent:
    return CommitEvent(time, StepResult(step, [SampledToken(seq, epoch, token) for seq in seqs]))


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
    assert (run.begin, run.end) == (10, 25)


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
    assert [each.end for each in intervals[:-1]] == [each.begin for each in intervals[1:]]
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
    summary = summarize_run(run, slo_ttft=6.0)
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
        plan(2.0, 1, 2, chunk(0, 0, 4, samples=False, epoch=1)),
        commit(3.0, 2),
        plan(3.0, 1, 3, chunk(0, 4, 1, epoch=1)),
        commit(4.0, 3, 0, epoch=1),
        plan(4.0, 1, 4, decode(0, 5, epoch=1)),
        commit(5.0, 4, 0, epoch=1),
        plan(5.0, 1, 5, chunk(0, 0, 7, epoch=2)),
        commit(6.0, 5, 0, epoch=2),
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
    assert (run.begin, run.end) == (10, 12)
    assert [(use.busy, use.bubble) for use in run.stage_usages()] == [(1, 0), (1, 0)]


def test_a_run_cut_off_is_read_as_far_as_it_goes() -> None:
    for length in range(1, len(LOG)):
        run = build_run_record(LOG[:length])
        assert run.end >= run.begin
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
