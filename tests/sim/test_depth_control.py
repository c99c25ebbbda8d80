"""Depth in simulations: fixed, by the controller, and as recorded."""

from dataclasses import replace
from functools import cache
from math import inf

import pytest

from gllm.observability.step_log import CommitEvent, DepthEvent, StepLogEvent
from gllm.pacing.depth import LinkSeconds, PipelineSeconds, StageSeconds
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.roofline import RooflineCostModel
from gllm.sim.deployment import Deployment, simulate, simulate_scheduler_requests
from gllm.sim.depth_control import AUTO_DEPTH, probe_link_times
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.hardware.stages import build_hardware
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.options import SimulationConfig, build_deployment
from gllm.sim.replay import replay_calls, replay_step_times
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from tests.support.scheduler.linear_pipeline import LinearCost
from tests.support.sim.requests import to_scheduler_requests

LATENCY = 0.06
TIMES = PipelineSeconds(
    [StageSeconds(0.02, 0.0005)] * 3,
    [LinkSeconds(LATENCY, 0.0005)] * 2,
    [0.0, LATENCY, LATENCY],
    LATENCY,
)


def deploy(depth: int | str | None, max_in_flight: int = 12) -> Deployment:
    config = SchedulerConfig(max_in_flight=max_in_flight).resolve(3, 4000, 4000)
    return Deployment("linear", [1, 1, 1], LinearCost(TIMES), config, depth=depth)


@cache
def run(depth: int | str | None) -> tuple[RunRecord, list[StepLogEvent]]:
    jobs = make_workload("azure-conv", 30, 8.0)
    shorter = [
        WorkloadRequest(job.arrival_seconds, job.num_prompt_tokens, min(job.num_output_tokens, 50))
        for job in jobs
        if job.num_prompt_tokens < 3000
    ]
    return simulate_scheduler_requests(deploy(depth), to_scheduler_requests(shorter))


def largest_in_flight(record: RunRecord) -> int:
    """Return the largest number of micro-batches between their plan and their commit."""
    changes = [(batch.planned_time, 1) for batch in record.micro_batches]
    changes += [(batch.committed_time or inf, -1) for batch in record.micro_batches]
    most = present = 0
    for _, change in sorted(changes):
        present += change
        most = max(most, present)
    return most


def test_the_controller_makes_a_slow_pipeline_deeper() -> None:
    record, events = run(AUTO_DEPTH)
    depths = [event.depth for event in events if isinstance(event, DepthEvent)]
    assert depths[0] == 3
    assert depths[-1] >= 6
    shallow, _ = run(3)
    seconds, shallow_seconds = (each.end_time() - each.begin_time() for each in (record, shallow))
    assert seconds < 0.8 * shallow_seconds


def test_runs_are_deterministic_and_replayed() -> None:
    record, events = run(AUTO_DEPTH)
    run.cache_clear()
    assert run(AUTO_DEPTH)[1] == events
    calls = replay_calls(events)
    assert calls.num_equal == calls.num_plans > 100
    assert len(record.depth_changes) == sum(isinstance(event, DepthEvent) for event in events)


def test_a_fixed_depth_limits_what_is_in_flight() -> None:
    for depth in (1, 5):
        record, events = run(depth)
        assert largest_in_flight(record) == depth
        assert sum(isinstance(event, DepthEvent) for event in events) == 1
    with pytest.raises(ValueError, match="raise max_in_flight"):
        run(13)


def test_links_are_read_as_a_driver_measures_them() -> None:
    hardware = build_hardware("qwen2.5-32b", "L20", 3)
    slow = NetworkLink(100e6 / 8, 0.030)
    hardware = replace(hardware, links=(slow,) * 2, plan_links=(None, slow, slow), return_link=slow)
    cost = RooflineCostModel(hardware)
    paths = probe_link_times(cost, 3)
    one = StageWork(0, 1, (), 1, 1, 1)
    occupancy = cost.activation_transfer(0, one).occupancy_seconds
    for link in paths.links:
        assert link.seconds_per_token == pytest.approx(occupancy)
        assert link.latency_seconds == pytest.approx(0.030)
    assert paths.plan_latencies == pytest.approx([0.0002, 0.0302, 0.0302], rel=0.01)
    assert paths.return_latency == pytest.approx(0.0303, rel=0.01)


def test_option_of_simulations() -> None:
    config = SimulationConfig(depth="5")
    deployment = build_deployment(config, 2000)
    assert (deployment.depth, deployment.scheduler.max_in_flight) == (5, 5)
    deployment = build_deployment(replace(config, depth="auto"), 2000)
    assert (deployment.depth, deployment.scheduler.max_in_flight) == (AUTO_DEPTH, 16)
    limited = SchedulerConfig(max_in_flight=7)
    deployment = build_deployment(replace(config, depth="auto", scheduler=limited), 2000)
    assert deployment.scheduler.max_in_flight == 7
    for text in ("0", "-1", "deep", "1.5"):
        with pytest.raises(ValueError, match=f"--depth {text}: give a number"):
            build_deployment(replace(config, depth=text), 2000)


def test_recorded_changes_are_repeated() -> None:
    """As the log of a driver has them, whose stages report their own times."""
    _, events = run(AUTO_DEPTH)
    times = replay_step_times(events)
    assert times.share > 0.95
    without: list[StepLogEvent] = [event for event in events if not isinstance(event, DepthEvent)]
    assert any(isinstance(event, CommitEvent) for event in without)
    assert replay_step_times(without).share < 0.9


def test_simulate_and_serve_requests_agree() -> None:
    jobs = [job for job in make_workload("azure-conv", 12, 8.0) if job.num_prompt_tokens < 2000]
    log: list[StepLogEvent] = []
    record = simulate(deploy(AUTO_DEPTH), jobs, log.append)
    assert sum(isinstance(event, DepthEvent) for event in log) > 1
    assert replay_calls(log).share == 1.0
    assert record.end_time() > 0
