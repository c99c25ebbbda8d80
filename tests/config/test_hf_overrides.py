"""Replaced keys of config.json: flags, Python values, and where they count."""

import json
from pathlib import Path
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.router import RouterConfig
from gllm.engine.preflight import plan_model
from gllm.models.config import read_config
from gllm.models.config_overrides import apply_overrides
from gllm.models.hub import DEMO
from gllm.options.field_types import FieldError
from gllm.router.fleet_engine import FleetEngine
from gllm.runtime.worker.cpu.executor import CpuExecutor

LONGER: Any = {"max_position_embeddings": 8192}


@pytest.mark.parametrize("config", [EngineConfig, RouterConfig])
def test_a_mapping_and_its_json_are_the_same(config: Any) -> None:
    values = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "a": None}
    text = json.dumps(values, indent=2)
    assert config(hf_overrides=values).hf_overrides == config(hf_overrides=text).hf_overrides
    assert json.loads(config(hf_overrides=values).hf_overrides or "") == values
    empty: Any
    for empty in ({}, "", "{}", None):
        assert config(hf_overrides=empty).hf_overrides is None


@pytest.mark.parametrize("config", [EngineConfig, RouterConfig])
@pytest.mark.parametrize("wrong", ["x", "[1]", "3", {"a": object()}, 7, [1]])
def test_anything_else_is_refused(config: Any, wrong: Any) -> None:
    with pytest.raises((ValueError, FieldError), match="hf_overrides"):
        config(hf_overrides=wrong)


def test_values_replace_keys_and_null_removes_them(tmp_path: Path) -> None:
    raw = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"unknown": 3, "eos_token_id": 1}))
    overrides = json.dumps({**LONGER, "unknown": None, "eos_token_id": [5]})
    config = read_config(tmp_path, overrides)
    assert config.model.context_length == 8192
    assert config.eos_ids == (5,)


YARN = {"rope_type": "yarn", "factor": 4.0}
THETA = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("raw", "overrides", "expected"),
    [
        ({"a": 1}, {"a": None, "b": 2}, {"a": None, "b": 2}),
        # The configuration of a part is merged, an object that is a value is replaced.
        (
            {"text_config": {"a": 1, "b": {"x": 1}}, "c": {"x": 1}},
            {"text_config": {"b": {"y": 2}}, "c": {"y": 2}},
            {"text_config": {"a": 1, "b": {"y": 2}}, "c": {"y": 2}},
        ),
        ({"text_config": None}, {"text_config": {"a": 1}}, {"text_config": {"a": 1}}),
        (
            {"quantization_config": {"bits": 4, "x": 1}},
            {"quantization_config": {"bits": 8}},
            {"quantization_config": {"bits": 8}},
        ),
        # The base frequency stays, under either name.
        ({"rope_theta": 5e5}, {"rope_scaling": YARN}, {"rope_theta": 5e5, "rope_scaling": YARN}),
        (
            {"rope_parameters": THETA},
            {"rope_scaling": YARN},
            {"rope_scaling": {**YARN, "rope_theta": 5e5}},
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_parameters": {**YARN, "rope_theta": 7.0}},
            {"rope_parameters": {**YARN, "rope_theta": 7.0}},
        ),
        (
            {"rope_parameters": THETA},
            {"rope_scaling": None},
            {"rope_parameters": {"rope_theta": 5e5}},
        ),
        (
            {"rope_parameters": THETA},
            {"rope_theta": 7.0},
            {"rope_parameters": {**THETA, "rope_theta": 7.0}, "rope_theta": 7.0},
        ),
        (
            {"text_config": {"rope_parameters": THETA, "a": 1}},
            {"text_config": {"rope_scaling": YARN}},
            {"text_config": {"rope_scaling": {**YARN, "rope_theta": 5e5}, "a": 1}},
        ),
    ],
)
def test_nested_overrides(raw: Any, overrides: Any, expected: Any) -> None:
    before = json.dumps(raw)
    assert apply_overrides(raw, overrides) == expected
    assert json.dumps(raw) == before


def test_a_replaced_scaling_keeps_the_base_frequency(tmp_path: Path) -> None:
    raw = json.loads((DEMO / "config.json").read_text())
    raw.pop("rope_theta", None)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_parameters": THETA}))
    config = read_config(tmp_path, json.dumps({"rope_scaling": YARN}))
    rope = config.model.layers[0].attention.rope
    assert rope is not None
    assert (rope.kind, rope.theta) == ("yarn", 5e5)


async def test_engines_and_routers_read_the_replaced_configuration() -> None:
    plan = plan_model(EngineConfig(hf_overrides=LONGER))
    assert plan.max_model_len == 8192
    router = FleetEngine(RouterConfig(hub="0", hf_overrides=LONGER))
    assert router.model.max_model_len == 8192
    await router.stop()


def test_other_overrides_are_other_numerics() -> None:
    """Requests of one engine do not go on in the other."""
    configs: list[Any] = [{}, LONGER, {"rope_theta": 5.0}]
    numerics = {
        CpuExecutor(read_config(DEMO), EngineConfig(hf_overrides=each), 1, range(1)).numerics
        for each in configs
    }
    assert len(numerics) == 3
