"""Deployments of emulated engines: those of the simulator, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.engine.preflight import plan_model
from gllm.models.config import read_config
from gllm.models.hub import DEMO
from gllm.options.field_types import FieldError
from gllm.runtime.emulation.deployment import build_emulated_deployment
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.profile import write_profile
from gllm.sim.deployment import roofline_deployment
from tests.sim.test_fitted import profile
from tests.support.models.published import PUBLISHED

DECODES = StageWork(0, 8, (), 8, 8000, 8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of this test for model folders."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def emulated(model: str = "qwen2.5-32b", **options: Any) -> EngineConfig:
    options = {"device": "emulated:L20", "pipeline_parallel_size": 4, **options}
    return EngineConfig.from_options(model, **options)


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"device": "emulated:B9"}, "device", "'B9' is none of L20"),
        ({"device": "emulated:L20,L40"}, "device", "one name, or 4 separated by commas"),
        ({"pipeline_parallel_size": 1}, "device", "does not fit 1 x L20.*raise --pp or --tp"),
        (
            {"pipeline_parallel_size": 2, "gpu_memory_utilization": 0.71},
            "device",
            "one sequence of max_model_len 32768 needs.*lower --max-model-len",
        ),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size", "use 1, 2, 4 or 8"),
        ({"emulated_link": "rope"}, "emulated_link", "'rope' is none of pcie"),
        ({"emulated_link": "pcie,pcie"}, "device", "one name, or 3 separated by commas"),
        ({"emulated_rank_link": "rope"}, "emulated_rank_link", "'rope' is none of pcie"),
        ({"quantization": "int8"}, "quantization", "choose none, or device cpu"),
        ({"attention_backend": "torch"}, "attention_backend", "choose auto, or device cpu"),
        ({"emulated_text": "/nowhere"}, "emulated_text", "choose a file of text"),
        ({"emulated_output": "trace:nothing"}, "emulated_output", "is none of azure-conv"),
    ],
)
def test_what_cannot_be_emulated_is_refused(
    options: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(FieldError, match=words) as caught:
        plan_model(emulated(**options))
    assert caught.value.param == field


PROFILE: dict[str, Any] = {
    "model": "opt-13b",
    "pipeline_parallel_size": 1,
    "device": "emulated",
    "emulated_profile": "distserve:opt-13b",
    "max_model_len": 2048,
    "max_num_seqs": 16,
}


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"max_model_len": 2050}, "emulated_profile", "lower --max-model-len"),
        ({"emulated_profile": "/nowhere"}, "emulated_profile", "/nowhere: cannot be read"),
        ({"emulated_profile": "distserve:opt-1b"}, "emulated_profile", "opt-1b"),
        ({"model": "opt-30b"}, "emulated_profile", "is of opt-13b: choose this model"),
        ({"device": "emulated:L20"}, "device", "has its own device: choose device emulated"),
        ({"emulated_bytes_per_weight": 1}, "emulated_bytes_per_weight", "leave it"),
        ({"emulated_rank_link": "pcie"}, "emulated_rank_link", "leave it"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(
    options: dict[str, Any], field: str, words: str
) -> None:
    plan_model(emulated(**PROFILE))
    with pytest.raises(FieldError, match=words) as caught:
        plan_model(emulated(**{**PROFILE, **options}))
    assert caught.value.param == field


def test_a_profile_has_to_cover_the_largest_batches(tmp_path: Path) -> None:
    """Measured with fewer rows and shorter sequences than the engine may have."""
    path = tmp_path / "profile.json"
    write_profile(profile([6]), path)
    options: dict[str, Any] = {
        "model": "demo",
        "pipeline_parallel_size": 1,
        "device": "emulated",
        "emulated_profile": str(path),
    }
    with pytest.raises(FieldError, match=r"lower max_num_batched_tokens \(now \d+\)") as caught:
        plan_model(emulated(**options))
    assert caught.value.param == "emulated_profile"
    plan_model(emulated(**options, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64))


def test_times_and_memory_are_those_of_the_simulator() -> None:
    config = emulated(tensor_parallel_size=2, emulated_link="network", max_model_len=4096)
    plan = plan_model(config)
    layers = [len(part) for part in plan.layers]
    actual = build_emulated_deployment(config, plan.config.model, 4096, layers=layers)
    expected = roofline_deployment(
        "qwen2.5-32b", "L20", 4, 4096, "network", config.scheduler, degrees=(2,), layers=layers
    )
    assert actual.hardware == expected.hardware
    for stage in range(4):
        seconds = expected.cost.stage_seconds(stage, DECODES)
        assert actual.cost.stage_seconds(stage, DECODES) == seconds


@pytest.mark.parametrize("name", ["mamba-codestral-7b-v0.1", "mamba-2.8b-hf"])
def test_models_without_attention_have_the_weights_of_their_blocks(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = emulated(str(tmp_path), device="emulated:A100-80G", tensor_parallel_size=2)
    deployment = build_emulated_deployment(config, read_config(tmp_path).model, 4096)
    hardware = deployment.hardware
    assert hardware is not None
    billions = {"mamba-codestral-7b-v0.1": 7.3, "mamba-2.8b-hf": 2.8}[name]
    assert hardware.model.parameters == pytest.approx(billions * 1e9, rel=0.05)
    assert hardware.rank_block_bytes(0, 16) == 0
    assert deployment.scheduler.num_blocks >= 256
    assert deployment.scheduler.num_state_slots >= 2


def test_states_of_recurrent_layers_take_memory_of_the_device(tmp_path: Path) -> None:
    name = "qwen3-next-80b-a3b"
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    options = {"device": "emulated:A100-80G", "max_num_seqs": 64, "pipeline_parallel_size": 4}
    config = emulated(str(tmp_path), **options)
    model = read_config(tmp_path).model
    deployment = build_emulated_deployment(config, model, 4096)
    scheduler, hardware = deployment.scheduler, deployment.hardware
    assert hardware is not None
    # Twelve of 48 layers have a KV cache, of 2 heads of 256 elements; 36 have 2 MB of states.
    assert hardware.rank_block_bytes(0, 16) == 16 * 3 * 2 * 2 * 256 * 2
    assert 4 <= scheduler.num_state_slots <= 4 * 64
    memory = hardware.stage_kv_memories(16, config.gpu_memory_utilization)[0]
    assert 9 * 2**21 < memory.state_bytes < 9 * 2**21 * 1.1
    block_bytes = scheduler.num_blocks * memory.block_bytes
    state_bytes = scheduler.num_state_slots * memory.state_bytes
    assert block_bytes + state_bytes <= memory.num_bytes


def test_a_folder_has_the_sizes_of_its_config() -> None:
    """A model that is not in the table; fewer bytes per weight make it faster."""
    plan = plan_model(emulated(str(DEMO), pipeline_parallel_size=2))
    seconds = []
    for options in ({}, {"emulated_bytes_per_weight": 0.5}):
        config = emulated(str(DEMO), pipeline_parallel_size=2, **options)
        deployment = build_emulated_deployment(config, plan.config.model, plan.max_model_len)
        assert deployment.hardware is not None
        assert deployment.hardware.model.hidden == plan.config.model.hidden_size
        assert deployment.layers == [3, 3]
        seconds.append(deployment.hardware.rank_weight_bytes(0))
    assert seconds[0] == 4 * seconds[1]
