"""The pipeline in simulated time: nothing is lost or overlaps, and its times are exact."""

from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from statistics import fmean
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.observability.step_log import CommitEvent, ScheduleEvent, StageTimesEvent, StartEvent
from gllm.observability.step_log import StepLogEvent as Logged
from gllm.pacing.policy_registry import LINK_POLICIES
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import FinishedSequence, StepOutput, StepPlan, StepResult, StepTime
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import NO_TRANSFER, ConstantCostModel, TransferCost
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.event_loop import EventLoop
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.pipeline import PipelineLinks, SimulatedPipeline, make_pipeline_links
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from tests.support.examples import num_examples
from tests.support.scheduler.pipeline import EVERY_POLICY, RESERVING_POLICIES
from tests.support.sim.pipeline_parts import (
    LINK,
    LONGEST,
    STAGE,
    HostCost,
    WiredCost,
    config,
    only,
    served,
)
from tests.support.sim.requests import to_scheduler_requests

ROUNDING = 2e-9
"""Seconds: events happen at whole nanoseconds."""


@dataclass
class Played:
    """A run with everything that was said in it."""

    config: SchedulerConfig
    pipeline: SimulatedPipeline
    log: list[Logged]
    plans: dict[int, tuple[float, StepPlan]] = field(default_factory=dict)
    times: list[list[StepTime]] = field(default_factory=list)
    """By stage, in the order in which they came up."""
    commits: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """The sequence of each token that the scheduler let out."""
    ends: list[FinishedSequence] = field(default_factory=list)


def play(
    resolved: SchedulerConfig,
    cost: ConstantCostModel,
    jobs: list[WorkloadRequest],
    aborts: list[tuple[float, int]],
    link_policy: str = "serial",
    is_card_shared: bool = False,
) -> Played:
    loop = EventLoop()
    links = make_pipeline_links(loop, resolved.stages, link_policy)
    if is_card_shared:
        card = links.results
        links = PipelineLinks([card] * len(links.activations), [card] * len(links.plans), card)
    log: list[Logged] = [StartEvent(0.0, "made up", [1] * resolved.stages, resolved, "simulator")]
    pipeline = SimulatedPipeline(resolved, cost, log=log.append, loop=loop, links=links)
    played = Played(resolved, pipeline, log, times=[[] for _ in range(resolved.stages)])
    commit = pipeline.scheduler.commit

    def listened(result: StepResult) -> StepOutput:
        outcome = commit(result)
        played.tokens += outcome.seqs
        played.ends += outcome.finished
        return outcome

    monitored: Any = pipeline.scheduler
    monitored.commit = listened
    pipeline.submit_each(sorted(to_scheduler_requests(jobs), key=itemgetter(0)))
    for time, seq in aborts:
        pipeline.abort_at(time, [seq])
    pipeline.loop.run()
    for event in log:
        match event:
            case ScheduleEvent(time=time, plan=StepPlan() as plan):
                played.plans[plan.step] = time, plan
            case StageTimesEvent(stage=stage, steps=steps):
                played.times[stage] += steps
            case CommitEvent(time=time, result=result):
                played.commits.append((time, result.step))
    return played


def check_requests(
    played: Played, jobs: list[WorkloadRequest], aborts: list[tuple[float, int]]
) -> None:
    """Every request that was not aborted finished once, with the trace's tokens."""
    aborted = {
        seq
        for time, seq in aborts
        if seq < len(jobs) and time >= jobs[seq].arrival_seconds - ROUNDING
    }
    told = build_run_record(played.log).requests
    ended = [end.seq for end in played.ends]
    assert len(set(ended)) == len(ended)
    assert {end.finish_reason for end in played.ends} <= {"length"}
    for seq, job in enumerate(jobs):
        emitted = played.tokens.count(seq)
        assert told[seq].line.num_tokens == emitted
        assert (seq in ended) == (emitted == job.num_output_tokens)
        assert emitted == job.num_output_tokens or (
            seq in aborted and emitted < job.num_output_tokens
        )


def check_order(played: Played, link: float, back: float = 0.0) -> None:
    """Plans reach and leave every stage in order, one at a time, and their commits as well."""
    steps = list(range(len(played.plans)))
    assert list(played.plans) == steps
    assert [step for _, step in played.commits] == steps
    for times in played.times:
        assert [time.step for time in times] == steps
        assert all(before.end <= after.start for before, after in pairwise(times))
    for (planned, _), time in zip(played.plans.values(), played.times[0], strict=True):
        assert planned <= time.start
    for before, after in pairwise(played.times):
        for left, came in zip(before, after, strict=True):
            assert left.end + link <= came.start + ROUNDING
    for (committed, _), time in zip(played.commits, played.times[-1], strict=True):
        assert time.end + back <= committed + ROUNDING
    limit = played.config.max_in_flight
    late = zip(list(played.plans.values())[limit:], played.commits, strict=False)
    assert all(commit <= planned for (planned, _), (commit, _) in late)


JOBS = st.lists(
    st.builds(
        WorkloadRequest,
        st.floats(0, 8),
        st.integers(1, 48),
        st.integers(1, LONGEST - 48),
        st.just(()),
        st.just(""),
    ),
    min_size=1,
    max_size=14,
)
ABORTS = st.lists(st.tuples(st.floats(0, 20), st.integers(0, 15)), max_size=4)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    """Any policy; caches that hold from one full-length sequence up to all that come."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    blocks = -(-LONGEST // block_size) * draw(st.sampled_from([4, 5, 8, 64])) // 4
    return SchedulerConfig(
        policy=draw(st.sampled_from(EVERY_POLICY)),
        max_prefill_tokens=draw(st.sampled_from([8, 40, 2048])),
        min_prefill_tokens=draw(st.sampled_from([1, 8])),
        max_num_seqs=draw(st.sampled_from([1, 3, 256])),
        max_in_flight=draw(st.sampled_from([None, 1, 2, 5])),
        phase_pure=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        block_size=block_size,
        prefix_cache=draw(st.booleans()),
    ).resolve(draw(st.integers(1, 4)), blocks, LONGEST)


@settings(
    max_examples=num_examples(40, 300),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(
    resolved=configs(),
    jobs=JOBS,
    aborts=ABORTS,
    stage=st.sampled_from([0.0, 0.05, 0.7]),
    link=st.sampled_from([0.0, 0.03, 1.1]),
    delay=st.sampled_from([0.0, 0.4]),
    others=st.sampled_from([NO_TRANSFER, TransferCost(0.01, 0.02), TransferCost(0.2, 0.0)]),
    policy=st.sampled_from(sorted(LINK_POLICIES)),
    is_card_shared=st.booleans(),
)
def test_nothing_is_lost_and_nothing_overlaps(
    resolved: SchedulerConfig,
    jobs: list[WorkloadRequest],
    aborts: list[tuple[float, int]],
    stage: float,
    link: float,
    delay: float,
    others: TransferCost,
    policy: str,
    is_card_shared: bool,
) -> None:
    cost = WiredCost(stage, TransferCost(link, delay), others)
    played = play(resolved, cost, jobs, aborts, policy, is_card_shared)
    check_requests(played, jobs, aborts)
    check_order(played, link + delay, others.occupancy_seconds + others.propagation_seconds)
    scheduler = played.pipeline.scheduler
    assert not scheduler.stats().unfinished
    assert not scheduler.kv_cache.running
    assert scheduler.kv_cache.block_pool.num_free_blocks == resolved.num_blocks


@pytest.mark.parametrize("policy", EVERY_POLICY)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_cache_too_small_for_all_preempts_and_loses_nothing(policy: str, stages: int) -> None:
    jobs = [WorkloadRequest(0.0, 20, 40)] * 8
    options = {"policy": policy, "block_size": 4, "kv_threshold": 0.0}
    options["expected_output_tokens"] = 0
    played = play(config(stages, 24, **options), ConstantCostModel(0.1, 0.01), jobs, [(3.0, 2)])
    check_requests(played, jobs, [(3.0, 2)])
    check_order(played, 0.01)
    has_preempted = played.pipeline.scheduler.stats().preemptions > 0
    assert has_preempted == (policy not in RESERVING_POLICIES)
    assert played.pipeline.scheduler.kv_cache.block_pool.num_free_blocks == 24


def test_commits_keep_their_order_though_results_overtake() -> None:
    class Uneven(ConstantCostModel):
        def return_seconds(self, work: StageWork) -> float:
            return 1.0 if work.step == 0 else 0.0

        def plan_seconds(self, work: StageWork) -> float:
            return 1.0 if work.step == 0 else 0.0

    jobs = [WorkloadRequest(time, 10, 2) for time in (0.0, 0.125, 0.25)]
    played = play(config(3), Uneven(STAGE, LINK), jobs, [])
    starts = [time.start for time in played.times[0]]
    assert starts[:3] == [1.0, 1.25, 1.5]
    assert [time for time, _ in played.commits][:3] == [1 + 3 * STAGE + 2 * LINK + 1] * 3
    check_order(played, LINK)


# Theory.


@pytest.mark.parametrize(
    ("count", "tolerance"), [(4000, 0.1), pytest.param(100_000, 0.05, marks=pytest.mark.long)]
)
def test_waits_are_those_of_a_queue_with_constant_service(count: int, tolerance: float) -> None:
    """M/D/1 at load 0.7, first come first served (V9)."""
    load, seconds = 0.7, 0.5
    resolved = config(max_num_seqs=1, prefix_cache=False, async_scheduling=False)
    jobs = make_workload("fixed:1,1", count, load / seconds, seed=1)
    run_events = served(ConstantCostModel(seconds), resolved, jobs)
    ttfts = [request.line.ttft for request in run_events.requests.values()]
    waits = [ttft - seconds for ttft in ttfts if ttft is not None]
    assert len(waits) == len(ttfts)
    assert fmean(waits) == pytest.approx(load * seconds / (2 * (1 - load)), rel=tolerance)
    # Lindley's recursion: each waits for what is left of the one before it.
    wait = 0.0
    for (before, after), simulated in zip(pairwise(jobs), waits[1:], strict=True):
        wait = max(0.0, wait + seconds - (after.arrival_seconds - before.arrival_seconds))
        assert simulated == pytest.approx(wait, abs=1e-6)
    assert run_events.stage_usages()[0].busy_share == pytest.approx(load, rel=tolerance / 2)


# Timing by hand. All times are sums of powers of two, so they are exact.


def test_a_request_alone_crosses_the_pipeline_once_for_each_token() -> None:
    request = only(served(ConstantCostModel(STAGE, LINK), config(2), [WorkloadRequest(1.0, 10, 5)]))
    crossing = 2 * STAGE + LINK
    assert request.line.ttft == request.line.tpot == crossing
    assert request.line.itl == [crossing] * 4
    assert request.line.times[0] == 1.0 + crossing


@pytest.mark.parametrize(
    ("in_flight", "seconds"),
    [
        # One after another.
        (1, 3 * (2 * STAGE + LINK)),
        # The third is planned when the first has left, and crosses alone.
        (2, 2 * (2 * STAGE + LINK)),
        # The first stage takes one after another, the last crosses after its three.
        (3, 3 * STAGE + LINK + STAGE),
    ],
)
def test_chunks_of_a_prompt_follow_each_other(in_flight: int, seconds: float) -> None:
    resolved = config(2, policy="sarathi", max_num_batched_tokens=16, max_in_flight=in_flight)
    run_events = served(ConstantCostModel(STAGE, LINK), resolved, [WorkloadRequest(0.0, 40, 1)])
    assert [step.work.num_tokens for step in run_events.micro_batches] == [16, 16, 8]
    assert only(run_events).line.ttft == seconds


class BusyDriverCost(ConstantCostModel):
    """Constant stages; each arriving request prolongs the running step of the first one."""

    def arrival_seconds(self, stage: int) -> float:
        """A quarter of a second on the first stage."""
        return 0.25 if stage == 0 else 0.0


def test_arrivals_prolong_the_step_that_they_meet() -> None:
    """The second one arrives in the first step, the third in what the second added to it."""
    jobs = [WorkloadRequest(time, 4, 1) for time in (0.0, 0.5, 1.125, 5.0)]
    run = simulate(Deployment("m", [1, 1], BusyDriverCost(1.0), config(2)), jobs)
    first, second, *_ = (step.stage_times for step in run.micro_batches)
    assert [(each.start, each.end) for each in first if each] == [(0.0, 1.5), (1.5, 2.5)]
    assert second[0] is not None
    assert second[0].start == 1.5
    last = run.micro_batches[-1].stage_times
    assert [(each.start, each.end) for each in last if each] == [(5.0, 6.0), (6.0, 7.0)]


def test_stages_report_several_steps_at_a_time() -> None:
    """As workers do: half a second after the first plan, and as long as there are steps."""
    reported: list[tuple[float, int, list[float]]] = []

    def on_event(event: Logged) -> None:
        if isinstance(event, StageTimesEvent):
            reported.append((event.time, event.stage, [step.end for step in event.steps]))

    deployment = Deployment("m", [1, 1], ConstantCostModel(0.1875), config(2))
    simulate(deployment, [WorkloadRequest(1.0, 4, 2), WorkloadRequest(9.0, 4, 1)], log=on_event)
    assert reported == [
        (1.5, 0, [1.1875]),
        (1.5, 1, [1.375]),
        (2.0, 0, [1.5625]),
        (2.0, 1, [1.75]),
        (9.5, 0, [9.1875]),
        (9.5, 1, [9.375]),
    ]


def test_a_link_carries_one_at_a_time() -> None:
    resolved = config(2, policy="sarathi", max_num_batched_tokens=16, max_in_flight=9)
    run_events = served(
        ConstantCostModel(STAGE, 4 * STAGE), resolved, [WorkloadRequest(0.0, 48, 1)]
    )
    assert only(run_events).line.ttft == STAGE + 3 * 4 * STAGE + STAGE
    assert [time.start for step in run_events.micro_batches if (time := step.stage_times[1])] == [
        1.25,
        2.25,
        3.25,
    ]


def test_the_host_is_part_of_every_token_without_async_scheduling() -> None:
    cost = HostCost(STAGE, plan=1 / 32, sample=1 / 64, back=1 / 16)
    request = only(served(cost, config(async_scheduling=False), [WorkloadRequest(0.0, 10, 5)]))
    assert request.line.ttft == request.line.tpot == STAGE + 1 / 32 + 1 / 16


def gaps(run_events: RunRecord) -> list[float]:
    """Seconds between steps on the first stage."""
    times = [time for step in run_events.micro_batches if (time := step.stage_times[0]) is not None]
    assert len(times) == len(run_events.micro_batches)
    return [after.start - before.end for before, after in pairwise(times)]


def test_async_scheduling_keeps_a_stage_busy() -> None:
    """The host works beside the stage; without async scheduling the stage waits for it."""
    cost = HostCost(STAGE, plan=1 / 32, sample=0.0, back=1 / 16)
    jobs = [WorkloadRequest(0.0, 10, 9), WorkloadRequest(0.0, 10, 5)]
    ahead = served(cost, config(async_scheduling=True), jobs)
    assert gaps(ahead) == [0.0] * 8
    assert ahead.requests[0].line.tpot == STAGE
    behind = served(cost, config(async_scheduling=False), jobs)
    assert gaps(behind) == [1 / 32 + 1 / 16] * 8


def test_async_scheduling_waits_for_the_token_that_it_feeds() -> None:
    cost = HostCost(STAGE, plan=1 / 32, sample=1 / 64, back=1 / 16)
    run_events = served(cost, config(), [WorkloadRequest(0.0, 10, 9)])
    assert gaps(run_events) == [1 / 64] * 8
    assert only(run_events).line.tpot == STAGE + 1 / 64


def test_the_driver_hears_all_of_one_moment_before_it_schedules() -> None:
    """Two requests at once share a micro-batch, and so do a decode and a request that comes with
    the result before it."""
    turn = STAGE + 1 / 16
    cost = HostCost(STAGE, plan=0.0, sample=0.0, back=1 / 16)
    jobs = [WorkloadRequest(0.0, 10, 3), WorkloadRequest(0.0, 5, 1), WorkloadRequest(turn, 12, 1)]
    run_events = served(cost, config(async_scheduling=False), jobs)
    assert [step.work.num_tokens for step in run_events.micro_batches] == [15, 13, 1]
    assert [request.line.ttft for request in run_events.requests.values()] == [turn] * 3


def test_a_job_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="65 tokens, but max_model_len is 64: raise it"):
        served(ConstantCostModel(STAGE), config(), [WorkloadRequest(0.0, 60, 5)])
