"""Client and frontend of a simulated engine: latencies at the client, and their measurement."""

from itertools import pairwise

import msgspec
import pytest

from gllm.observability.latency import RequestTimeline
from gllm.observability.step_log import AddEvent, StepLogEvent
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.base import ConstantCostModel, DelegatingCostModel, TransferCost
from gllm.sim.costs.fitted import FittedCostModel
from gllm.sim.costs.profile import (
    HostSamples,
    RequestTransferSample,
    build_host_samples,
    build_profile,
)
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from tests.support.sources import ROOT
from tests.support.work import count_lines

STEP = 0.05
"""Seconds of every step."""


class ServedCostModel(ConstantCostModel):
    """Steps of 50 ms; requests pass in 1 ms each and 2 ms more, 4 ms more beside a step.

    The client has a token of a step 3 ms after its commit, and 1 ms later for each token of it.
    """

    def request_transfer(self, is_busy: bool) -> TransferCost:
        return TransferCost(0.001, 0.006 if is_busy else 0.002)

    def delivery_seconds(self, num_tokens: int) -> float:
        return 0.003 + 0.001 * num_tokens


def serve(jobs: list[WorkloadRequest]) -> tuple[RunRecord, list[StepLogEvent]]:
    """Return the run of the jobs at the client, and the log of the driver."""
    config = SchedulerConfig(policy="sarathi", block_size=4, prefix_cache=False)
    deployment = Deployment("made up", [1], ServedCostModel(STEP), config.resolve(1, 500, 64))
    events: list[StepLogEvent] = []
    return simulate(deployment, jobs, events.append), events


def test_latencies_contain_the_way_through_the_frontend() -> None:
    run, events = serve([WorkloadRequest(1.0, 8, 3), WorkloadRequest(1.0, 8, 1)])
    first, second = (run.requests[seq].line for seq in (0, 1))
    # The second passes behind the first, whose first step has begun and whose second is planned.
    added = [event.time for event in events if isinstance(event, AddEvent)]
    assert added == pytest.approx([1.003, 1.004])
    assert (first.arrival, second.arrival) == pytest.approx((1.0, 1.0))
    assert first.ttft == pytest.approx(0.003 + STEP + 0.004)
    assert second.ttft == pytest.approx(0.003 + 3 * STEP + 0.005)
    assert first.times == pytest.approx([1.057, 1.107, 1.158])


def test_a_request_beside_a_step_takes_longer_and_none_overtakes_another() -> None:
    jobs = [WorkloadRequest(0.0, 8, 2), WorkloadRequest(0.01, 8, 1), WorkloadRequest(0.1025, 8, 1)]
    _, events = serve([*jobs, WorkloadRequest(0.1035, 8, 1)])
    added = [event.time for event in events if isinstance(event, AddEvent)]
    assert added == pytest.approx([0.003, 0.017, 0.1095, 0.1105])
    run, events = serve(make_workload("uniform:1,20,1,20", 60, 60.0, seed=1))
    seqs = [event.seq for event in events if isinstance(event, AddEvent)]
    assert seqs == sorted(seqs)
    for served in run.requests.values():
        assert all(earlier <= later for earlier, later in pairwise(served.line.times))


def test_what_a_server_shows_is_what_it_takes() -> None:
    """The samples of a simulated server give the times that it was simulated with."""
    jobs = make_workload("uniform:1,20,1,20", 150, 20.0, seed=2)
    run, events = serve(jobs)
    for index, event in enumerate(events):
        if isinstance(event, AddEvent):  # A real log begins at the driver.
            events[index] = msgspec.structs.replace(event, age_seconds=0.0)
    driver = build_run_record(events)
    pairs = [(run.requests[seq].line, driver.requests[seq]) for seq in run.requests]
    host = build_host_samples(driver, pairs)
    assert len(host.requests) == len(jobs)
    assert {request.is_busy for request in host.requests} == {False, True}
    cost = FittedCostModel(msgspec.structs.replace(build_profile([driver], {}), host=host))
    for is_busy in (False, True):
        expected = ServedCostModel(STEP).request_transfer(is_busy)
        found = cost.request_transfer(is_busy)
        assert found.total_seconds == pytest.approx(expected.total_seconds, rel=0.15)
    for num_tokens in (1, 4):
        assert cost.delivery_seconds(num_tokens) == pytest.approx(0.003 + 0.001 * num_tokens, 0.02)


def test_samples_count_requests_ahead_and_micro_batches_in_flight() -> None:
    _, events = serve([WorkloadRequest(0.0, 4, 1), WorkloadRequest(0.5, 4, 1)])
    driver = build_run_record(events)
    received = [served.line.arrival for served in driver.requests.values()]
    sent = [RequestTimeline(received[0] - 0.01), RequestTimeline(received[0] - 0.008)]
    late = driver.requests[1]
    late.line.arrival = received[0] + 0.01
    late.line.times = [received[0] + 0.2, received[0] + 0.3]  # two tokens, of which one was read
    sent[0].times, sent[1].times = [driver.requests[0].line.times[0] + 0.5], [9.0]
    host = build_host_samples(driver, [(sent[1], late), (sent[0], driver.requests[0])])
    assert host.requests == [
        RequestTransferSample(0, False, 0.01),
        RequestTransferSample(1, False, 0.018),
    ]
    assert host.deliveries == [(1, 0.5)]
    sent[1].arrival = received[0] + 0.02
    late.line.arrival = received[0] + 0.03
    host = build_host_samples(driver, [(sent[1], late)])
    assert host.requests == [RequestTransferSample(0, True, 0.01)]


def test_steps_of_other_requests_are_left_out() -> None:
    run, events = serve([WorkloadRequest(float(index), 4, 2 + index) for index in range(3)])
    driver = build_run_record(events)
    hosts = [
        build_host_samples(driver, [(run.requests[seq].line, driver.requests[seq]) for seq in seqs])
        for seqs in ((0, 1, 2), (0, 2), (1,))
    ]
    assert [len(host.steps) for host in hosts] == [9, 6, 3]


@pytest.mark.parametrize("delegates", [False, True])
def test_engines_without_samples_of_a_server_have_the_times_of_the_driver(delegates: bool) -> None:
    plain = ConstantCostModel(STEP)
    cost = DelegatingCostModel(plain) if delegates else plain
    assert cost.request_transfer(is_busy=True).is_free
    assert not cost.delivery_seconds(100)
    served = ServedCostModel(STEP)
    cost = DelegatingCostModel(served)
    assert cost.request_transfer(is_busy=True) == served.request_transfer(is_busy=True)
    assert cost.delivery_seconds(2) == served.delivery_seconds(2)


def test_a_simulated_client_takes_time_in_proportion_to_the_requests() -> None:
    counts = []
    for num_requests in (40, 160):
        jobs = [WorkloadRequest(0.1 * index, 4, 4) for index in range(num_requests)]
        counts.append(count_lines(lambda jobs=jobs: serve(jobs), str(ROOT / "gllm")))  # type: ignore[misc]
    assert counts[1] < 4.2 * counts[0]


def test_a_host_that_shows_nothing_is_refused() -> None:
    empty = HostSamples([], [], [], [], [], [], [])
    with pytest.raises(msgspec.ValidationError, match="length >= 1"):
        msgspec.json.decode(msgspec.json.encode(empty), type=HostSamples)
