"""Predicted times of experts that the host computes, and a throttle that learns them."""

from pathlib import Path
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.engine.preflight import plan_model
from gllm.options.field_types import FieldError
from gllm.runtime.emulation.deployment import build_emulated_deployment
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.throttle_policy import ThrottlePolicy
from gllm.sim.costs.roofline import DeviceEfficiency
from gllm.sim.deployment import Deployment, roofline_deployment
from gllm.sim.hardware.devices import parse_host
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.workloads.requests import iterate_scheduler_requests, make_workload

MODEL = "deepseek-v2-lite"
SHAPE = MODELS[MODEL]


def deploy(stages: int = 1, **options: Any) -> Deployment:
    return roofline_deployment(MODEL, "L20", stages, 8192, **options)


def prefill(num_tokens: int) -> StageWork:
    return StageWork(0, num_tokens, ((0, num_tokens),), 0, 0, 1)


def device_bytes(deployment: Deployment, stage: int) -> float:
    assert deployment.hardware is not None
    return deployment.hardware.rank_weight_bytes(stage)


def test_experts_on_the_host_leave_the_memory_of_the_device() -> None:
    """Layer 0 is dense: of two stages of 14 and 13 layers the first has 13 layers with experts."""
    whole, moved = deploy(2), deploy(2, cpu_experts="15")
    layer = 2 * 64 * SHAPE.expert_weights
    assert device_bytes(whole, 0) - device_bytes(moved, 0) == 13 * layer
    assert device_bytes(whole, 1) - device_bytes(moved, 1) == 2 * layer
    assert moved.scheduler.num_blocks > whole.scheduler.num_blocks
    cached = deploy(2, cpu_experts="15", expert_cache=13 * 10 * 2 * SHAPE.expert_weights)
    assert device_bytes(cached, 0) - device_bytes(moved, 0) == 13 * layer * 10 / 64


def test_a_step_of_one_token_reads_its_experts_at_the_speed_of_the_host() -> None:
    work = prefill(1)
    # So slow that the device never waits for its kernels to be launched.
    slow, slower = (
        deploy(cpu_experts="all", host=host).cost.stage_seconds(0, work)
        for host in ("10:1000", "5:1000")
    )
    read = 26 * 6 * 2 * SHAPE.expert_weights
    assert slower - slow == pytest.approx(read / 5e9 - read / 10e9, rel=1e-3)


@pytest.mark.parametrize("num_tokens", [1, 16, 512, 4096])
def test_a_cache_saves_time_up_to_that_of_the_device(num_tokens: int) -> None:
    work, whole = prefill(num_tokens), 26 * 64 * 2 * SHAPE.expert_weights
    on_device = deploy().cost.stage_seconds(0, work)
    times = [
        deploy(cpu_experts="all", expert_cache=int(share * whole) or None).cost.stage_seconds(
            0, work
        )
        for share in (0, 0.25, 0.5, 1)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.2 * times[-1]
    # Besides hidden states on the link: sums of times instead of their roofline.
    assert times[-1] < 1.5 * on_device + 26 * DeviceEfficiency().launch_seconds


def run_throttle(rate: float, **options: Any) -> tuple[ThrottlePolicy, Deployment]:
    """Serve a workload; return the policy with what it has learned."""
    deployment = deploy(**options)
    pipeline = SimulatedPipeline(deployment.scheduler, deployment.cost)
    jobs = make_workload("azure-conv", 60, rate, "poisson", 1)
    pipeline.submit_each(iterate_scheduler_requests(jobs))
    pipeline.loop.run()
    policy = pipeline.scheduler._policy
    assert isinstance(policy, ThrottlePolicy)
    return policy, deployment


def test_the_throttle_learns_both_costs() -> None:
    """It knows nothing of experts: the curve of step times follows the measured steps, and with it
    the size of chunks. Those of a cache with all experts are nearly those of the device."""
    chunks = []
    for options in ({}, {"cpu_experts": "all"}, {"cpu_experts": "all", "expert_cache": 2**35}):
        policy, deployment = run_throttle(0.3, **options)
        curve = policy.curve_fit.curve
        for num_tokens in (256, 512):
            work = prefill(num_tokens)
            learned = curve.seconds(num_tokens, work.num_query_key_pairs)
            actual = deployment.cost.stage_seconds(0, work)
            assert actual / 1.3 < learned < actual * 1.3
        chunks.append(policy._chunk_tokens)
    on_device, on_host, cached = chunks
    assert on_host > 1.5 * on_device
    assert abs(cached / on_device - 1) < 0.1


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("cache")
def test_an_emulated_engine_takes_these_times() -> None:
    options: dict[str, Any] = {"cpu_experts": "20", "expert_cache": 2**30}
    config = EngineConfig.from_options(
        MODEL, device="emulated:L20", max_model_len=8192, emulated_host="50:1", **options
    )
    plan = plan_model(config)
    actual = build_emulated_deployment(config, plan.config.model, 8192)
    expected = deploy(scheduler=config.scheduler, host="50:1", **options)
    assert actual.hardware == expected.hardware
    assert actual.cost.stage_seconds(0, prefill(99)) == expected.cost.stage_seconds(0, prefill(99))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("model", "options", "field", "words"),
    [
        (MODEL, {"emulated_host": "fast"}, "emulated_host", "above 0, such as 200:4"),
        (MODEL, {"cpu_experts": "27"}, "cpu_experts", "has 26 layers with experts"),
        ("qwen2.5-0.5b", {"cpu_experts": "all"}, "cpu_experts", "has no experts"),
        (
            MODEL,
            {"cpu_experts": "all", "emulated_profile": "vidur"},
            "cpu_experts",
            "leave it or emulated_profile out",
        ),
    ],
)
def test_what_cannot_be_emulated_is_refused(
    model: str, options: dict[str, Any], field: str, words: str
) -> None:
    config = EngineConfig.from_options(
        model, device="emulated", **{"max_model_len": 4096, **options}
    )
    with pytest.raises(FieldError, match=words) as caught:
        plan_model(config)
    assert caught.value.param == field


@pytest.mark.parametrize("text", ["", "200", "0:1", "1:-1", "1:inf", "1:nan", "a:b", "1:2:3"])
def test_invalid_hosts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 200:4"):
        parse_host(text)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("qwen2.5-0.5b", {"cpu_experts": "all"}, "leave it out"),
        (MODEL, {"cpu_experts": "27"}, "has 26 layers"),
        (MODEL, {"cpu_experts": "all", "degrees": (2,)}, "use --pp instead of --tp"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    model: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        roofline_deployment(model, "L20", 1, 4096, **options)
