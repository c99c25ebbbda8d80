"""Two lanes in simulated time, and step logs with and without lanes."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.observability.logged_scheduler import LoggedScheduler
from gllm.observability.step_log import (
    ScheduleEvent,
    StartEvent,
    StepLogEvent,
    StepLogWriter,
    read_step_log,
)
from gllm.pacing.policy_registry import LINK_POLICIES
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import ScheduledRow, StepOutput, StepPlan
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import ConstantCostModel, TransferCost
from gllm.sim.event_loop import EventLoop
from gllm.sim.metrics.run_record import build_run_record, measure_step_costs
from gllm.sim.observer import PipelineObserver
from gllm.sim.pipeline import SimulatedPipeline, make_pipeline_links
from gllm.sim.replay import replay_calls
from gllm.sim.workloads.requests import WorkloadRequest
from tests.scheduler.test_properties import drive
from tests.sim.test_run import add, chunk, commit, decode, start, times
from tests.support.examples import num_examples
from tests.support.scheduler.lane_pipeline import LanePipeline
from tests.support.scheduler.pipeline import Pipeline
from tests.support.sim.observers import CommitTimes, RecordedStages, TokenCounts
from tests.support.sim.requests import to_scheduler_requests

RATE = 12.5e6
"""100 Mbit/s in bytes per second."""
TOKEN_BYTES = 14_336


class WeakLinkCost(ConstantCostModel):
    """Stages of 10 ms between links of 100 Mbit/s and 30 ms."""

    def __init__(self) -> None:
        super().__init__(0.01)

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of the activations."""
        size = TOKEN_BYTES * work.num_tokens
        return TransferCost(size / RATE, 0.03, size)


class LaneLog(PipelineObserver):
    """Lane and turn of each commit."""

    def __init__(self) -> None:
        self.commits: list[tuple[int, int, int]] = []
        """(step, lane, turn) in the order of commits."""

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Keep the plan's place."""
        self.commits.append((plan.step, plan.lane, plan.turn))


class LaneRun(NamedTuple):
    """Observers of a run."""

    lanes: LaneLog
    stages: RecordedStages
    tokens: TokenCounts
    times: CommitTimes
    log: list[StepLogEvent]


def run_lanes(jobs: list[WorkloadRequest], lanes: str, policy: str, **options: int) -> LaneRun:
    """Serve requests on three stages."""
    loop = EventLoop()
    links = make_pipeline_links(loop, 3, policy)
    config = SchedulerConfig(
        policy="sarathi",
        lanes=lanes,
        prefix_cache=False,
        **options,  # type: ignore[arg-type]
    ).resolve(3, 4000, 4096)
    run = LaneRun(LaneLog(), RecordedStages(), TokenCounts(), CommitTimes(), [])
    pipeline = SimulatedPipeline(
        config, WeakLinkCost(), run[:4], run.log.append, loop=loop, links=links
    )
    pipeline.submit_each(to_scheduler_requests(jobs))
    loop.run()
    assert not pipeline.scheduler.stats().unfinished
    return run


def longest_gap(run: LaneRun) -> float:
    """Return the longest time between two commits of decodes."""
    commits = zip(run.times.times, run.lanes.commits, strict=True)
    times = [time for time, (_, lane, _) in commits if lane == 0]
    return max(after - before for before, after in pairwise(times))


def test_a_decode_overtakes_a_prefill_on_the_way() -> None:
    """A prompt of 2,000 tokens takes 2.3 s on each of two links."""
    jobs = [WorkloadRequest(0.0, 1, 200), WorkloadRequest(1.0, 2000, 1)]
    two = run_lanes(jobs, "2", "molink", max_in_flight=4)
    one = run_lanes(jobs, "1", "molink", max_in_flight=4)
    fifo = run_lanes(jobs, "2", "serial", max_in_flight=4)
    assert longest_gap(two) < 0.11
    assert max(after - before for before, after in pairwise(one.times.times)) > 2.2
    assert longest_gap(fifo) > 2.2
    # The prefill is the only step of its lane, and many later steps have committed before it.
    (prefill,) = (index for index, each in enumerate(two.lanes.commits) if each[1:] == (1, 1))
    assert two.lanes.commits[prefill][0] < prefill - 20


@settings(max_examples=num_examples(25, 600), deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.floats(0, 1), st.integers(1, 900), st.integers(1, 12)), min_size=1, max_size=8
    ),
    policy=st.sampled_from(sorted(LINK_POLICIES)),
    depth=st.integers(1, 8),
)
def test_order_holds_within_each_lane(
    jobs: list[tuple[float, int, int]], policy: str, depth: int
) -> None:
    """Whatever the link sends first: nothing is lost, and no lane's steps pass each other."""
    requests = [WorkloadRequest(*job) for job in sorted(jobs)]
    run = run_lanes(requests, "2", policy, max_in_flight=depth, max_num_batched_tokens=256)
    assert [run.tokens.counts[seq] for seq in range(len(requests))] == [
        request.num_output_tokens for request in requests
    ]
    lane_of = {step: (lane, turn) for step, lane, turn in run.lanes.commits}
    for lane in range(2):
        turns = [turn for _, each, turn in run.lanes.commits if each == lane]
        assert turns == list(range(len(turns)))
        for stage in range(3):
            ends = sorted(
                (end, lane_of[step][1])
                for (each, step), (_, end) in run.stages.times.items()
                if each == stage and lane_of[step][0] == lane
            )
            assert [turn for _, turn in ends] == list(range(len(ends)))


def test_two_lanes_give_the_same_run_twice() -> None:
    jobs = [WorkloadRequest(0.1 * number, 300, 20) for number in range(8)]
    first, second = (run_lanes(jobs, "2", "molink", max_in_flight=6) for _ in range(2))
    assert first.log == second.log
    assert first.times.times == pytest.approx(second.times.times, abs=0)


def record(path: Path, config: SchedulerConfig, seed: int) -> None:
    """Write the step log of a random load."""
    rng = Random(seed)
    pipeline = LanePipeline(config, rng) if config.num_lanes == 2 else Pipeline(config)
    log = StepLogWriter(path)
    log.write(StartEvent(0.0, "m", [1] * config.stages, config, "driver"))
    scheduler = LoggedScheduler(config, log.write, lambda: pipeline.now)
    pipeline.scheduler = scheduler
    drive(pipeline, rng, 600)
    pipeline.drain()
    log.close()


def resolved(lanes: str) -> SchedulerConfig:
    config = SchedulerConfig(
        policy="throttle",
        lanes=lanes,
        max_prefill_tokens=16,
        min_prefill_tokens=4,
        max_in_flight=4,
        block_size=4,
        expected_output_tokens=0,
    )
    return config.resolve(3, 24, 60)


def test_the_calls_of_both_lanes_replay(tmp_path: Path) -> None:
    for seed in range(2):
        record(tmp_path / "log", resolved("2"), seed)
        agreement = replay_calls(list(read_step_log(tmp_path / "log")))
        assert agreement.num_equal == agreement.num_plans > 50


def test_a_log_from_before_lanes_replays_with_one_lane(tmp_path: Path) -> None:
    """Its plans have three fields and its configuration no lanes."""
    record(tmp_path / "new", resolved("1"), 4)
    lines = []
    for line in (tmp_path / "new").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            del event["scheduler"]["lanes"]
        if event.get("plan"):
            assert event["plan"][3:] == [0, 0, [], 0]
            del event["plan"][3:]
        lines.append(json.dumps(event, separators=(",", ":")))
    (tmp_path / "old").write_text("\n".join(lines) + "\n")
    agreement = replay_calls(list(read_step_log(tmp_path / "old")))
    assert agreement.num_equal == agreement.num_plans > 50


def lane_plan(time: float, step: int, lane: int, others: int, *rows: ScheduledRow) -> ScheduleEvent:
    return ScheduleEvent(time, StepPlan(step, list(rows), [], lane, others), 2)


def test_a_step_that_was_overtaken_counts_from_the_end_of_the_later_one() -> None:
    log: list[StepLogEvent] = [
        start(stages=2),
        add(9.0, 0, prompt=1, output=5),
        lane_plan(9.0, 0, 1, 0, chunk(0, 0, 1)),
        times(0, 0, 9.0, 9.5),
        times(1, 0, 9.5, 9.75),
        commit(10.0, 0, 0),
        add(10.0, 1, prompt=40, output=1),
        lane_plan(10.0, 1, 1, 0, chunk(1, 0, 40)),
        lane_plan(10.0, 2, 0, 2, decode(0, 1)),
        times(0, 1, 10.0, 11.0),
        times(0, 2, 11.0, 12.0),
        times(1, 2, 13.0, 14.0),
        commit(14.0, 2, 0),
        times(1, 1, 14.0, 18.0),
        commit(18.0, 1, 1),
    ]
    costs = {cost.step.work.step: cost for cost in measure_step_costs(build_run_record(log))}
    assert costs[1].stage_seconds == [1.0, 4.0]
    assert costs[2].stage_seconds == [1.0, 1.0]
    # The overtaken step's link did not keep the stage waiting: it computed the other one.
    assert costs[1].link_seconds == [None]
    assert costs[2].link_seconds == [1.0]


def test_requests_of_a_log_are_those_of_the_load(tmp_path: Path) -> None:
    record(tmp_path / "log", resolved("2"), 1)
    run = build_run_record(list(read_step_log(tmp_path / "log")))
    assert run.micro_batches
    assert all(step.committed_time is not None for step in run.micro_batches)
