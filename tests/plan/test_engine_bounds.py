"""Closed forms of one engine against simulations: bounds hold, estimates are near."""

from dataclasses import replace
from functools import cache
from math import ceil
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.linear_costs import LinearCostModel
from gllm.observability.latency import meets_slo, percentile
from gllm.options.slo import NO_SLO, parse_slo
from gllm.plan.capacity import PLAN_RULES, measure_capacity
from gllm.plan.engine_bounds import EngineBounds, OperatingPoint, measure_workload
from gllm.plan.layout import Parallelism
from gllm.plan.search.designs import EngineDesign
from gllm.routing.placement import LatencyModel
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.metrics.delays import measure_rate_trial
from gllm.sim.options import SimulationConfig, build_deployment, build_workload
from gllm.sim.workloads.requests import WorkloadRequest
from tests.support.examples import num_examples

RULE = replace(PLAN_RULES["vidur"], min_seconds=2.0, rate_step=1.1, max_p99_delay_seconds=0.5)

workloads = st.builds(
    lambda low, spread, output: f"uniform:{low},{low + spread},{output},{2 * output}",
    st.sampled_from((64, 512, 2000)),
    st.sampled_from((0, 400)),
    st.sampled_from((1, 4, 12)),
)
designs = st.builds(
    EngineDesign,
    st.just("H200"),
    st.builds(Parallelism, st.sampled_from((1, 2)), st.sampled_from((1, 2, 4))),
    st.sampled_from(("sarathi", "vllm", "throttle")),
    st.sampled_from((None, 512)),
    st.sampled_from((8, 64)),
)


def build(design: EngineDesign, workload: str) -> tuple[SimulationConfig, EngineBounds]:
    base = SimulationConfig(model="qwen2.5-32b", workload=workload, requests=60, link="nvlink")
    base = replace(base, device="H200", scheduler=base.scheduler)
    config = replace(design.configure(base), max_model_len=8192)
    moments = measure_workload(build_workload(replace(config, requests=2000)))
    return config, EngineBounds(build_deployment(config, 8192), moments)


def test_moments_of_a_workload() -> None:
    moments = measure_workload([WorkloadRequest(0.0, 10, 1), WorkloadRequest(1.0, 20, 4)])
    assert moments.prompt_tokens == 15
    assert moments.square_prompt_tokens == 250
    assert moments.decode_steps == 1.5
    # Three decode steps after a prompt of 20 attend to 21, 22 and 23 tokens.
    assert moments.context_tokens == (21 + 22 + 23) / 2
    assert moments.mean_context_tokens == 22
    assert (moments.longest_tokens, moments.prompts) == (24, (10, 20))
    assert moments.steps == (0, 3)


@settings(max_examples=num_examples(3, 150), deadline=None)
@given(designs, workloads)
def test_no_simulated_capacity_is_above_the_bound(design: EngineDesign, workload: str) -> None:
    config, bounds = build(design, workload)
    highest = bounds.max_rate_of_run(config.requests, RULE.min_seconds, RULE.max_p99_delay_seconds)
    capacity = measure_capacity(config, 0.7 * bounds.max_rate(), RULE)
    assert 0 < capacity.rate <= highest


LONG_SECONDS, DELAY_SECONDS = 30.0, 0.5
"""Arrivals of a run that is long beside its requests, so that the bound is not loose; limit of the
scheduling delay."""
ROW_COSTS = LatencyModel(k1=2e-4, c1=0.02, k2=1e-6, c2=2e-3, c3=0.02)
"""Costs of a stage on which each sequence of a micro-batch takes its time."""


def build_with_row_costs(
    stages: int, scheduler: SchedulerConfig, workload: str
) -> tuple[Deployment, EngineBounds]:
    cost = LinearCostModel(ROW_COSTS)
    resolved = scheduler.resolve(stages, 2000, 1024)
    deployment = Deployment("", [1] * stages, cost, resolved)
    jobs = build_workload(SimulationConfig(workload=workload, requests=2000))
    return deployment, EngineBounds(deployment, measure_workload(jobs))


@settings(max_examples=num_examples(10, 300), deadline=None)
@given(
    st.sampled_from((1, 2, 4)),
    st.sampled_from(("sarathi", "vllm", "throttle")),
    st.sampled_from((64, 512)),
    st.sampled_from((4, 16, 32)),
    st.sampled_from(("fixed:500,20", "uniform:20,400,4,40", "fixed:50,60")),
    st.sampled_from(("tpot", "tpot:p50", "tbt:p99", "tbt:p50")),
    st.sampled_from((1.01, 1.1, 1.5, 3.0)),
)
def test_no_rate_above_the_bound_is_within_limits_of_the_time_between_tokens(
    stages: int, policy: str, tokens: int, seqs: int, workload: str, metric: str, slack: float
) -> None:
    scheduler = SchedulerConfig(policy=policy, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    deployment, bounds = build_with_row_costs(stages, scheduler, workload)
    limits = parse_slo(f"{metric}={slack * bounds.min_token_seconds():.6g}")
    highest = bounds.max_rate_of_run(1, LONG_SECONDS, DELAY_SECONDS, limits)
    assert 0 < highest <= bounds.max_rate_of_run(1, LONG_SECONDS, DELAY_SECONDS)
    rate = 1.01 * highest
    config = SimulationConfig(workload=workload, rate=rate, requests=ceil(LONG_SECONDS * rate))
    served = simulate(deployment, build_workload(config)).requests.values()
    trial = measure_rate_trial(served)
    is_bounded = trial.p99_delay_seconds <= DELAY_SECONDS
    assert not (is_bounded and meets_slo([each.line for each in served], limits))


def test_a_tight_limit_of_the_time_between_tokens_lowers_the_bound_several_times() -> None:
    """Two sequences on the four stages in a row miss it, so each micro-batch has one."""
    scheduler = SchedulerConfig(policy="sarathi", max_num_batched_tokens=512, max_num_seqs=64)
    _, bounds = build_with_row_costs(4, scheduler, "fixed:50,100")
    loose = bounds.max_rate_of_run(1, 3600.0, DELAY_SECONDS)
    rates = []
    for slack in (1.01, 1.5, 5.0):
        limits = parse_slo(f"tbt:p99={slack * bounds.min_token_seconds()}")
        rates.append(bounds.max_rate_of_run(1, 3600.0, DELAY_SECONDS, limits))
    assert rates == sorted(rates)
    assert rates[0] < loose / 5
    assert rates[-1] == loose
    assert bounds.max_decode_rate(0.99 * bounds.min_token_seconds()) == 0


measured_designs = st.builds(
    EngineDesign,
    st.sampled_from(("H100", "A100-80G")),
    st.builds(Parallelism, st.sampled_from((1, 2)), st.sampled_from((1, 2, 4))),
    st.sampled_from(("sarathi", "vllm", "throttle", "orca+")),
    st.sampled_from((256, 512, 2048)),
    st.sampled_from((4, 16, 64, 256)),
)
output_workloads = st.builds(
    lambda low, output: f"uniform:{low},{3 * low},{output},{2 * output}",
    st.sampled_from((20, 200, 1000)),
    st.sampled_from((1, 4, 30)),
)


TILED = EngineDesign("H100", Parallelism(2, 2), "sarathi", 512, 256)
"""Engine whose largest micro-batch is not the fastest: 512 tokens take 39 ms, 549 take 57 ms."""
TILED_WORKLOAD = "uniform:400,900,100,300"


@cache
def saturate(
    design: EngineDesign, workload: str, model: str, requests: int
) -> tuple[list[float], EngineBounds]:
    """Return the ends in seconds of requests that arrive at once, rising, and the closed forms."""
    base = SimulationConfig(
        profile=f"vidur:{model}", workload=workload, requests=requests, arrivals="static"
    )
    config = replace(design.configure(base), max_model_len=4096)
    jobs = build_workload(config)
    deployment = build_deployment(config, 4096)
    served = simulate(deployment, jobs).requests.values()
    ends = sorted(each.line.times[-1] for each in served)
    return ends, EngineBounds(deployment, measure_workload(jobs))


@settings(max_examples=num_examples(5, 150), deadline=None)
@given(measured_designs, output_workloads, st.sampled_from((40, 80)))
def test_no_saturated_throughput_is_above_the_bound(
    design: EngineDesign, workload: str, requests: int
) -> None:
    ends, bounds = saturate(design, workload, "llama-2-7b", requests)
    assert 0 < requests / ends[-1] <= bounds.max_rate()


@pytest.mark.full
def test_no_saturated_throughput_is_above_the_bound_where_a_smaller_micro_batch_is_faster() -> None:
    ends, bounds = saturate(TILED, TILED_WORKLOAD, "llama-2-70b", 800)
    assert 0 < 800 / ends[-1] <= bounds.max_rate()


@pytest.mark.full
def test_the_estimate_is_the_capacity_of_the_best_micro_batch() -> None:
    ends, bounds = saturate(TILED, TILED_WORKLOAD, "llama-2-70b", 800)
    throughput = 400 / (ends[600] - ends[200])
    point = bounds.best_point(NO_SLO)
    assert point is not None
    assert point.rate == pytest.approx(throughput, rel=0.1)


@settings(max_examples=num_examples(6, 150), deadline=None)
@given(designs, workloads)
def test_no_latency_is_below_its_bound(design: EngineDesign, workload: str) -> None:
    config, bounds = build(design, workload)
    jobs = build_workload(replace(config, rate=0.5 * bounds.max_rate()))
    lines = [each.line for each in simulate(build_deployment(config, 8192), jobs).requests.values()]
    least = bounds.min_first_token_seconds(1)
    assert min(line.ttft for line in lines if line.ttft is not None) >= 0.99 * least
    gaps = [gap for line in lines for gap in line.itl]
    assert not gaps or fmean(gaps) >= bounds.min_token_seconds() > 0


def test_estimates_of_latencies_rise_with_the_rate() -> None:
    design = EngineDesign("H200", Parallelism(1, 2), "sarathi", 512, 64)
    _, bounds = build(design, "uniform:64,464,4,8")
    top = bounds.max_rate()
    points = [point for share in (0.2, 0.5, 0.8) if (point := bounds.point_at(share * top))]
    assert len(points) == 3
    assert sorted(points, key=lambda point: point.rate) == points
    for figure in (lambda p: p.ttft(90), lambda p: p.step_seconds, lambda p: p.wait(99)):
        values = [figure(point) for point in points]
        assert values == sorted(values)
    assert bounds.point_at(2 * top) is None or bounds.point_at(2 * top).rate <= 2 * top  # type: ignore[union-attr]


class SlowReturn(LinearCostModel):
    """Results that return to the driver after 10 ms, while the next step runs."""

    def return_seconds(self, work: StageWork) -> float:
        return 0.01


def test_a_returning_result_of_a_single_stage_delays_no_token() -> None:
    scheduler = SchedulerConfig(policy="sarathi", max_num_seqs=4).resolve(1, 2000, 1024)
    deployment = Deployment("", [1], SlowReturn(ROW_COSTS), scheduler)
    jobs = build_workload(SimulationConfig(workload="fixed:50,60", rate=0.1, requests=3))
    bounds = EngineBounds(deployment, measure_workload(jobs))
    lines = [each.line for each in simulate(deployment, jobs).requests.values()]
    gaps = [gap for line in lines for gap in line.itl]
    assert fmean(gaps) == pytest.approx(bounds.min_token_seconds(), rel=0.02)
    assert fmean(gaps) >= bounds.min_token_seconds()


def test_the_duration_of_a_long_request_is_that_of_the_simulation() -> None:
    config, bounds = build(
        EngineDesign("H200", Parallelism(1, 1), "sarathi", 512, 64), "uniform:64,464,100,300"
    )
    expected = bounds.request_seconds()
    point = bounds.best_point(NO_SLO)
    assert point is not None
    jobs = build_workload(replace(config, rate=0.9 * point.rate, requests=400))
    served = simulate(build_deployment(config, 8192), jobs).requests.values()
    seconds = [each.line.times[-1] - each.line.times[0] for each in served]
    assert expected == pytest.approx(percentile(seconds, 90), rel=0.25)


def test_longer_outputs_need_longer_runs() -> None:
    design = EngineDesign("H200", Parallelism(1, 1), "sarathi", 512, 64)
    durations = [
        build(design, f"fixed:500,{tokens}")[1].request_seconds() for tokens in (2, 20, 200)
    ]
    assert durations == sorted(durations)
    assert durations[2] > 5 * durations[1]


def test_tighter_limits_lower_the_estimated_capacity() -> None:
    _, bounds = build(
        EngineDesign("H200", Parallelism(1, 2), "sarathi", 512, 64), "uniform:64,464,4,8"
    )
    rates = []
    for text in ("", "ttft:p90=0.4", "ttft:p90=0.2"):
        point = bounds.best_point(parse_slo(text) if text else NO_SLO)
        assert point is not None
        rates.append(point.rate)
        assert point.keeps(parse_slo(text))
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]
    assert bounds.best_point(parse_slo("tpot=0.0001")) is None


def test_decodes_of_a_pipeline_wait_for_prompts_on_the_stage_before_them() -> None:
    def make_point(chunk_stage_seconds: float) -> OperatingPoint:
        return OperatingPoint(
            rate=4.0,
            slowest_seconds=0.05,
            prefill_seconds=0.1,
            step_seconds=0.1,
            chunk_seconds=0.12,
            chunk_stage_seconds=chunk_stage_seconds,
            chunks_per_request=0.5,
        )

    point = make_point(0.03)
    # A fifth of all gaps has a prompt in its step, and finds a busy stage in a fifth of the cases.
    assert point.itl(96) == pytest.approx(0.12)
    assert point.itl(98) == pytest.approx(0.12 + 0.03 / 2)
    assert point.itl(100) == pytest.approx(0.15)
    assert not point.keeps(parse_slo("tbt:p99=0.14"))
    assert point.keeps(parse_slo("tbt:p96=0.121"))
    assert make_point(0.0).itl(99) == 0.12


@pytest.mark.parametrize("requests", [10, 1000])
def test_the_bound_of_a_run_is_above_that_of_a_steady_state(requests: int) -> None:
    _, bounds = build(
        EngineDesign("H200", Parallelism(1, 1), "vllm", None, 8), "uniform:64,464,4,8"
    )
    steady = bounds.max_rate()
    for min_seconds in (0.0, 60.0):
        assert bounds.max_rate_of_run(requests, min_seconds, 5.0) > steady
