"""Two lanes in simulated time: decodes overtake prefill on links and in stages."""

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.observability.step_log import StepLogEvent
from gllm.pacing.policy_registry import LINK_POLICIES
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepOutput, StepPlan
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import ConstantCostModel, TransferCost
from gllm.sim.event_loop import EventLoop
from gllm.sim.observer import PipelineObserver
from gllm.sim.pipeline import SimulatedPipeline, make_pipeline_links
from gllm.sim.workloads.requests import WorkloadRequest
from tests.support.examples import num_examples
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
