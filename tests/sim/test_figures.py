"""Figures of micro-batches, delays, classes and clusters, by hand where possible."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

import pytest

from gllm.observability.latency import RequestTimeline
from gllm.options.slo import Slo, parse_class_slos
from gllm.scheduler.plan import StepTime
from gllm.scheduler.stage_work import StageWork
from gllm.sim.cluster.cluster import simulate_cluster
from gllm.sim.cluster.router import PolicyRouter, make_router
from gllm.sim.costs.base import CostModel
from gllm.sim.deployment import Deployment, roofline_deployment, simulate
from gllm.sim.description import describe_below_range, describe_load
from gllm.sim.metrics.batch_statistics import (
    measure_micro_batches,
    operator_shares,
    summarize_batches,
)
from gllm.sim.metrics.delays import (
    RunLoad,
    measure_load,
    measure_rate_trial,
    scheduling_delays,
    steady_throughput,
)
from gllm.sim.metrics.micro_batch_table import MicroBatch
from gllm.sim.metrics.report import (
    class_attainment,
    format_engine_table,
    format_metrics_table,
    summarize_cluster,
    summarize_run,
)
from gllm.sim.metrics.run_record import RunRecord, ServedRequest
from gllm.sim.workloads.requests import make_workload


def batch(
    step: int, chunks: tuple[int, ...], num_decodes: int, seconds: float, kv_usage: float | None
) -> MicroBatch:
    """Return a micro-batch that takes two stages the same time each."""
    work = StageWork(
        step,
        sum(chunks) + num_decodes,
        tuple((0, tokens) for tokens in chunks),
        num_decodes,
        10 * num_decodes,
        num_decodes,
    )
    times: list[StepTime | None] = [StepTime(step, begin, begin + seconds) for begin in (0.0, 9.0)]
    return MicroBatch(0.0, work, sum(chunks), num_decodes, times, kv_usage=kv_usage)


BATCHES = [
    batch(0, (100, 28), 0, 1.0, 0.25),
    batch(1, (), 3, 0.5, 0.75),
    batch(2, (60,), 4, 1.5, 0.5),
    batch(3, (), 1, 0.5, None),
]


def test_figures_of_micro_batches() -> None:
    figures = summarize_batches(measure_micro_batches(BATCHES))
    assert figures["kv_usage"] == {"mean": 0.5, "max": 0.75}
    assert figures["requests_per_step"]["mean"] == (2 + 3 + 5 + 1) / 4
    assert figures["tokens_per_step"]["mean"] == (128 + 3 + 64 + 1) / 4
    # 64 tokens and 128 tokens are their own upper bounds, 3 are rounded up to 4.
    assert figures["seconds_by_tokens"] == {"1": 1.0, "4": 1.0, "64": 3.0, "128": 2.0}
    # Half of the 7 s have passed within the micro-batch of 64 tokens, 90 % in that of 128.
    assert (figures["tokens_by_time_p50"], figures["tokens_by_time_p90"]) == (64, 128)
    # The stages take 2, 1, 3 and 1 s together.
    assert figures["seconds_per_step_variation"] == pytest.approx(0.6875**0.5 / 1.75)
    nothing = summarize_batches(measure_micro_batches([]))
    assert "kv_usage" not in nothing
    assert nothing["seconds_per_step_variation"] == 0
    assert nothing["tokens_by_time_p50"] is None


def test_arithmetic_counts_every_token_once() -> None:
    """A prompt in chunks costs what it costs in one."""
    hardware = roofline_deployment("llama-3.1-8b", "A100-80G", 1, 4096).hardware
    assert hardware is not None
    whole = replace(BATCHES[0], work=StageWork(0, 200, ((0, 200),), 0, 0, 1))
    parts = [
        replace(BATCHES[0], work=StageWork(0, 80, ((0, 80),), 0, 0, 0)),
        replace(BATCHES[0], work=StageWork(1, 120, ((80, 120),), 0, 0, 1)),
    ]
    in_one = measure_micro_batches([whole], hardware.model).flops
    assert measure_micro_batches(parts, hardware.model).flops == pytest.approx(in_one)
    # Two FLOP for each weight of the layers and token, the head once; attention is small.
    weights = hardware.model.layers * hardware.model.layer_weights
    least = 2 * (200 * weights + hardware.model.head_weights)
    assert least < in_one < 1.02 * least


class HalvesCostModel(CostModel):
    """Cost of which attention is a quarter on stage 0 and three quarters on stage 1."""

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return one second."""
        return 1.0

    def operator_seconds(self, stage: int, work: StageWork) -> Mapping[str, float]:
        """Return both parts of the second."""
        attention = 0.75 if stage else 0.25
        return {"attention": attention, "linear": 1 - attention}


class SecondCostModel(CostModel):
    """Cost that does not know operators."""

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return one second."""
        return 1.0


def test_time_by_operator() -> None:
    shares = operator_shares(BATCHES, 2, HalvesCostModel())
    assert shares == {"attention": 0.5, "linear": 0.5}
    assert operator_shares(BATCHES, 1, HalvesCostModel())["attention"] == 0.25
    assert operator_shares(BATCHES, 2, SecondCostModel()) == {}
    table = format_metrics_table({"run": {"time_by_operator": shares}})
    assert "time of attention, %" in table


def served(arrival: float, first_scheduled: float | None, *times: float) -> ServedRequest:
    line = RequestTimeline(arrival, list(times), len(times))
    return ServedRequest(10, len(times), line, first_scheduled_time=first_scheduled)


def test_delays_are_in_order_of_arrival() -> None:
    requests = [served(5.0, 7.0), served(1.0, 1.5), served(9.0, None)]
    assert scheduling_delays(requests) == [0.5, 2.0, None]


def test_load_of_a_run() -> None:
    assert measure_load([served(1.0, 1.0)], 1.0) is None
    steady = measure_load([served(time, time) for time in (0.0, 1.0, 2.0, 4.0)], 0.5)
    assert steady is not None
    assert (steady.offered_rate, steady.overload, steady.is_overloaded) == (0.75, 0.5, False)
    growing = measure_load([served(float(time), 4.0 * time) for time in range(40)], 2.0)
    assert growing is not None
    assert growing.is_overloaded
    assert growing.overload == 0.0
    assert describe_load(growing)[1].startswith("overloaded, delays grow by ")
    worse = describe_load(
        RunLoad(growing.offered_rate, 0.5, growing.trial._replace(is_growing=True))
    )
    assert worse[1].startswith("overloaded by 100 %: scheduling delay")
    assert len(describe_load(steady)) == 1
    at_once = measure_load([served(0.0, 1.0), served(0.0, 2.0)], 2.0)
    assert at_once is not None
    assert (at_once.offered_rate, at_once.overload) == (None, None)


def queue_of_one_second(arrivals: Sequence[float]) -> list[ServedRequest]:
    """Return requests that one server takes in turn, for 1 s each."""
    free, requests = 0.0, []
    for arrival in arrivals:
        start = max(arrival, free)
        free = start + 1
        requests.append(served(arrival, start, free))
    return requests


@pytest.mark.parametrize("count", [100, 400, 2000])
def test_stable_queues_with_long_delays_are_not_overloaded(count: int) -> None:
    rng = Random(3)
    # M/D/1 at 0.8 of the capacity, and bursts of 100 requests every 200 s.
    poisson = list(accumulate(rng.expovariate(0.8) for _ in range(count)))
    bursts = sorted(200.0 * (i // 100) + 1e-3 * (i % 100) for i in range(max(200, count)))
    for arrivals in (poisson, bursts):
        load = measure_load(queue_of_one_second(arrivals), 1.0)
        assert load is not None
        assert not load.is_overloaded
        assert not any("overloaded" in line for line in describe_load(load))
    # Above the capacity it is.
    rapid = list(accumulate(rng.expovariate(1.5) for _ in range(count)))
    load = measure_load(queue_of_one_second(rapid), 1.0)
    assert load is not None
    assert load.is_overloaded


def test_an_overloaded_simulation_sustains_less_than_it_is_offered() -> None:
    deployment = roofline_deployment("qwen2.5-14b", "L20", 1, 1024)
    for rate, is_overloaded in ((0.5, False), (20.0, True)):
        run = simulate(deployment, make_workload("fixed:900,10", 100, rate))
        load = measure_load(list(run.requests.values()), steady_throughput(run)[1])
        assert load is not None
        assert load.trial == measure_rate_trial(run.requests.values())
        assert load.is_overloaded == is_overloaded
        assert load.overload is not None
        assert (load.overload > 1) == is_overloaded


def test_work_below_the_measured_range_is_told() -> None:
    assert describe_below_range({}) == describe_below_range({"chunk": 0}) == []
    (line,) = describe_below_range({"chunk": 0, "batch": 3})
    assert line.endswith("batch 3 times")


def test_attainment_by_class() -> None:
    requests = {
        0: served(0.0, 0.0, 1.0, 1.1),
        1: served(0.0, 0.0, 3.0, 3.5),
        2: served(0.0, 0.0, 3.0, 3.1),
        3: served(0.0, 0.0, 9.0),
    }
    classes = {0: "chat", 1: "chat", 2: "batch", 3: ""}
    limits = {"chat": Slo(2.0, None)}
    assert {
        name: (figures["requests"], figures["slo_attainment"])
        for name, figures in class_attainment(requests, classes, limits).items()
    } == {"batch": (1, 1.0), "chat": (2, 0.5)}
    stricter = class_attainment(requests, classes, limits, Slo(0.5, 0.3))
    assert stricter["chat"] == {
        "requests": 2, "slo_ttft": 2.0, "slo_tpot": 0.3, "slo_attainment": 0.5
    }  # fmt: skip
    assert stricter["batch"]["slo_attainment"] == 0.0


def test_limits_of_classes() -> None:
    limits = {"a": Slo(0.5, None), "b": Slo(None, 0.1)}
    assert parse_class_slos("a:0.5:, b::0.1") == limits
    for text in ("a", "a:1", "a:1:1:1", ":1:1", "a:0:1", "a:nan:1", "a:x:1", "a:1:,a:1:"):
        with pytest.raises(ValueError, match="has to be NAME:TTFT:TPOT"):
            parse_class_slos(text)


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    return roofline_deployment("qwen2.5-14b", "L20", 2, 2048)


def test_utilization_and_cache_of_a_simulation(deployment: Deployment) -> None:
    run = simulate(deployment, make_workload("fixed:1000,20", 40, 50.0))
    figures = summarize_run(run, deployment=deployment)
    assert deployment.hardware is not None
    tokens = 40 * 1019
    flops = 2 * deployment.hardware.model.layers * deployment.hardware.model.layer_weights * tokens
    peak = 2 * 119.5e12 * figures["seconds"]
    assert figures["model_flops_utilization"] == pytest.approx(flops / peak, rel=0.03)
    assert 0 < figures["kv_usage"]["mean"] < figures["kv_usage"]["max"] <= 1
    # At most all 40 sequences hold their 64 blocks at the same time; many have finished before.
    held = 40 * 64 / deployment.scheduler.num_blocks
    assert 0.4 * held < figures["kv_usage"]["max"] <= held
    assert figures["scheduling_delay"]["p50"] > 0


def test_totals_of_a_cluster(deployment: Deployment) -> None:
    """Two engines behind round robin serve as two runs of every other request."""
    jobs = make_workload("uniform:50,900,5,40", 60, 6.0)
    deployments = {"a": deployment, "b": deployment}
    run = simulate_cluster(deployments, jobs, make_router("round-robin", 0))
    total, engines, load = summarize_cluster(run, deployments, Slo(0.5))
    parts = [simulate(deployment, jobs[index::2]) for index in range(2)]
    summaries = [summarize_run(part, Slo(0.5), deployment) for part in parts]
    for figures, part in zip(engines.values(), summaries, strict=True):
        assert figures["ttft"] == pytest.approx(part["ttft"])
        assert figures["kv_usage"] == pytest.approx(part["kv_usage"])
    assert total["requests"] == total["finished"] == 60
    assert total["steps"] == sum(len(part.micro_batches) for part in parts)
    assert total["kv_usage"]["max"] == max(part["kv_usage"]["max"] for part in summaries)
    expected = (summaries[0]["slo_attainment"] + summaries[1]["slo_attainment"]) / 2
    assert total["slo_attainment"] == pytest.approx(expected)
    rates = [steady_throughput(part)[1] for part in parts]
    assert load is not None
    assert load.sustained_rate == pytest.approx(sum(rates))
    flops = sum(measure_flops(part, deployment) for part in parts)
    peak = 2 * (deployment.peak_flops or 0) * total["seconds"]
    assert total["model_flops_utilization"] == pytest.approx(flops / peak)
    rows = format_engine_table(engines).splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["a", "b"]


def measure_flops(run: RunRecord, deployment: Deployment) -> float:
    """Return the arithmetic of a run."""
    assert deployment.hardware is not None
    return sum(deployment.hardware.model.step_flops(step.work) for step in run.micro_batches)


def test_routers_by_name() -> None:
    assert isinstance(make_router("least-tokens", 0), PolicyRouter)
    with pytest.raises(ValueError, match="routing policy 'x' is none of"):
        make_router("x", 0)
