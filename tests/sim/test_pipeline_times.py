"""Times of a pipeline in simulated time: those of a queue, and exact ones by hand."""

from itertools import pairwise
from statistics import fmean

import pytest

from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from tests.support.sim.pipeline_parts import LINK, STAGE, HostCost, config, only, served

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
