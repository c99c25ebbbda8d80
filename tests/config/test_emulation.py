"""Options of emulated devices: names of devices, and lengths of outputs."""

import pytest

from gllm.config.emulation import (
    DEVICES,
    EmulationConfig,
    emulated_name,
    fixed_output,
    is_emulated,
)
from gllm.config.engine import EngineConfig
from gllm.options.field_types import FieldError


def test_the_name_of_a_device_may_follow_emulated() -> None:
    assert list(DEVICES) == ["auto", "cpu", "cuda", "emulated"]
    for device in (*DEVICES, "emulated:L20", "emulated:L20,H100"):
        assert EngineConfig(device=device).device == device


@pytest.mark.parametrize(
    "device", ["emulated:", "emulate", "emulatedL20", "cuda:0", "", "Emulated"]
)
def test_other_values_of_device_are_refused(device: str) -> None:
    with pytest.raises(FieldError, match="auto, cpu, cuda, emulated") as caught:
        EngineConfig(device=device)
    assert caught.value.param == "device"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("auto", None),
        ("cpu", None),
        ("cuda", None),
        ("emulated", ""),
        ("emulated:L20", "L20"),
        ("emulated:L20,L20", "L20,L20"),
    ],
)
def test_emulated_devices_and_their_names(device: str, name: str | None) -> None:
    assert is_emulated(device) == EngineConfig(device=device).is_emulated == (name is not None)
    if name is not None:
        assert emulated_name(device) == name


def test_nested_options_are_keywords_of_an_engine() -> None:
    config = EngineConfig.from_options(
        "demo", emulated_output="fixed:7", emulated_speed=2, max_num_seqs=3, max_model_len=64
    )
    assert (config.emulation.emulated_output, config.emulation.emulated_speed) == ("fixed:7", 2.0)
    assert (config.scheduler.max_num_seqs, config.max_model_len) == (3, 64)
    with pytest.raises(TypeError, match="emulated_words"):
        EngineConfig.from_options("demo", emulated_words=1)


@pytest.mark.parametrize("value", ["limit", "fixed:1", "fixed:4096", "trace:sharegpt"])
def test_lengths_of_outputs(value: str) -> None:
    assert EmulationConfig(emulated_output=value).emulated_output == value


@pytest.mark.parametrize(
    "value", ["fixed:0", "fixed:", "fixed:-1", "fixed:x", "fixed:²", "trace:", "trace", "7", ""]
)
def test_other_lengths_are_refused(value: str) -> None:
    assert fixed_output(value) is None
    with pytest.raises(FieldError, match="limit, fixed:N with a number from 1 on, or trace:NAME"):
        EmulationConfig(emulated_output=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("emulated_speed", 0),
        ("emulated_speed", -1),
        ("emulated_speed", float("nan")),
        ("emulated_bytes_per_weight", 0),
        ("emulated_bytes_per_weight", 5),
        ("emulated_bytes", "maybe"),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(FieldError) as caught:
        EmulationConfig(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
