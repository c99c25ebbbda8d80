"""Layers of unlike emulated devices: divided by predicted times, within their memory."""

from pathlib import Path
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.engine.preflight import plan_model
from gllm.options.field_types import FieldError
from gllm.runtime.emulation.deployment import build_emulated_deployment
from gllm.runtime.emulation.layer_division import TYPICAL_WORKS


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def make_config(
    device: str, stages: int = 2, model: str = "qwen2.5-32b", **options: Any
) -> EngineConfig:
    return EngineConfig.from_options(
        model, pipeline_parallel_size=stages, device=f"emulated:{device}", **options
    )


def slowest_seconds(config: EngineConfig, layers: list[int]) -> float:
    """Predicted time of the typical micro-batches on the slowest stage."""
    plan = plan_model(config)
    cost = build_emulated_deployment(config, plan.config.model, 4096, layers=layers).cost
    return max(
        sum(number * cost.stage_seconds(stage, work) for work, number in TYPICAL_WORKS)
        for stage in range(len(layers))
    )


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("L20,A100-80G", {}),
        ("A100-80G,L20,H100", {"stages": 3}),
        ("L20", {"tensor_parallel_size": (2, 1)}),
        ("L40,A100-80G", {"model": "deepseek-v2-lite"}),
    ],
)
def test_no_layer_moved_makes_the_slowest_stage_faster(
    device: str, options: dict[str, Any]
) -> None:
    config = make_config(device, max_model_len=4096, **options)
    layers = [len(part) for part in plan_model(config).layers]
    assert len(set(layers)) > 1
    best = slowest_seconds(config, layers)
    for a in range(len(layers)):
        for b in range(len(layers)):
            moved = list(layers)
            moved[a] -= 1
            moved[b] += 1
            assert slowest_seconds(config, moved) >= best


def test_memory_limits_the_faster_device() -> None:
    """By times alone, an H100 would have more layers than its memory has space for."""
    free = plan_model(make_config("L20,H100", max_model_len=4096))
    full = plan_model(make_config("L20,H100", max_model_len=4096, gpu_memory_utilization=0.6))
    counts = [[len(part) for part in plan.layers] for plan in (free, full)]
    assert counts[0][1] > counts[1][1]
    assert counts[1][1] * 0.97e9 < 0.6 * 80e9


def test_other_divisions_are_those_of_any_device(tmp_path: Path) -> None:
    """Like devices, and configured numbers."""
    alike = plan_model(make_config("L20", 4, max_model_len=4096))
    assert [len(part) for part in alike.layers] == [16, 16, 17, 15]
    even = plan_model(make_config("L20,A100-80G", layers="even", max_model_len=4096))
    own = plan_model(make_config("L20,A100-80G", layers=(20, 44), max_model_len=4096))
    assert [len(part) for part in even.layers] == [33, 31]
    assert [len(part) for part in own.layers] == [20, 44]


@pytest.mark.parametrize(
    ("device", "options", "field", "words"),
    [
        ("L20,H100,L40", {}, "device", "has to be one name, or 2 separated by commas"),
        ("L20,H100,L40", {"layers": (20, 44)}, "device", "has to be one name, or 2"),
        ("L20,RTX4090", {}, "device", "no cut of 64 layers into 2 stages that fits .*raise --pp"),
        ("B200", {}, "device", "device 'B200' is none of L20"),
        ("L20", {"emulated_link": "rope"}, "emulated_link", "emulated_link 'rope' is none of"),
        ("L20", {"emulated_rank_link": "x"}, "emulated_rank_link", "'x' is none of pcie"),
    ],
)
def test_what_cannot_be_is_refused(
    device: str, options: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(FieldError, match=words) as caught:
        plan_model(make_config(device, **options))
    assert caught.value.param == field


def test_names_stay_for_the_stages_that_are_left() -> None:
    """After a loss of machines there are fewer stages than names, after an arrival more."""
    config = make_config("L20,A100-80G,H100", 3, emulated_link="pcie,25gbit", max_model_len=4096)
    model = plan_model(config).config.model
    fewer = build_emulated_deployment(config, model, 4096, [1, 1], [24, 40]).hardware
    more = build_emulated_deployment(config, model, 4096, [1] * 4, [16] * 4).hardware
    assert fewer is not None
    assert more is not None
    assert [stage.device.memory for stage in fewer.stages] == [48e9, 80e9]
    assert [stage.device.flops for stage in more.stages[2:]] == [989.4e12] * 2
    assert [link.latency for link in more.links] == [10e-6, 0, 0]
