"""Raw errors at the client: a right prediction has none, and misses are named."""

import msgspec
import pytest

from experiments.logged_servers import WAKE_UP, ServedLoad
from experiments.prediction_client import client_claims, client_section, predict_client
from gllm.commands.bench.real_server import ClientRequest, pair_requests
from gllm.observability.latency import RequestTimeline
from gllm.observability.step_log import AddEvent, StepLogEvent
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.costs.profile import CostProfile, build_profile
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.workloads.requests import make_workload


def serve(step_seconds: float) -> tuple[ServedLoad, CostProfile]:
    """Return a load that was served with equal steps, and the profile of such an engine."""
    jobs = [WAKE_UP, *make_workload("uniform:8,40,2,20", 40, 2.0, seed=3)]
    jobs[1:] = [job._replace(arrival_seconds=job.arrival_seconds + 1.0) for job in jobs[1:]]
    config = SchedulerConfig(prefix_cache=False, async_scheduling=False).resolve(1, 500, 128)
    events: list[StepLogEvent] = []
    deployment = Deployment("made up", [1], ConstantCostModel(step_seconds), config)
    run = simulate(deployment, jobs, events.append)
    requests = [
        ClientRequest([index], job, run.requests[index].line) for index, job in enumerate(jobs)
    ]
    return ServedLoad(events, requests[::-1]), build_profile([build_run_record(events)], {})


def test_a_right_prediction_has_no_error_and_a_slow_profile_is_named() -> None:
    load, profile = serve(0.02)
    right = predict_client(load, profile)
    assert len(right.real) == len(load.requests) - 1  # without the request that wakes it up
    for metric in ("ttft", "tpot", "e2el"):
        assert right.error(metric) == pytest.approx(0.0, abs=0.02)
    assert "None is above." in client_section({"a load": right})
    assert all(claim.verdict.is_met for claim in client_claims({"a load": right}))

    _, slow = serve(0.025)
    wrong = predict_client(load, slow)
    assert wrong.error("tpot") == pytest.approx(0.25, abs=0.03)
    assert "a load: TPOT +2" in client_section({"a load": wrong})
    assert [claim.verdict.is_met for claim in client_claims({"a load": wrong})] == [False] * 3


def test_requests_of_client_and_log_are_paired_by_prompt() -> None:
    load, _ = serve(0.02)
    prompts = {0: [7], 1: [7], 2: [8, 9]}
    events = [
        msgspec.structs.replace(event, prompt=prompts.get(event.seq, [event.seq]))
        if isinstance(event, AddEvent)
        else event
        for event in load.events
    ]
    run, job = build_run_record(events), WAKE_UP
    sent = {"late": 0.2, "early": 0.1, "other": 0.0, "lost": 0.3}
    lines = {name: RequestTimeline(time) for name, time in sent.items()}
    asked = {"late": [7], "other": [8, 9], "lost": [8, 9, 10], "early": [7]}
    requests = [ClientRequest(asked[name], job, lines[name]) for name in asked]
    pairs = pair_requests(requests, events, run)
    expected = [
        (lines[name], run.requests[seq]) for name, seq in (("other", 2), ("early", 0), ("late", 1))
    ]
    assert len(pairs) == 3
    for pair, each in zip(pairs, expected, strict=True):
        assert pair[0] is each[0]
        assert pair[1] is each[1]
