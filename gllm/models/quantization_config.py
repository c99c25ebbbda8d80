"""Reader of quantization_config in config.json: the format of a checkpoint's quantized weights.

8-bit floating point (e4m3) with scales is supported; anything else is an error that names the key.
"""

from typing import Any

from gllm.models.config_reader import ConfigReader
from gllm.models.errors import ModelError
from gllm.models.spec import QuantizationSpec

NAME = "quantization_config"


def read_quantization(config: ConfigReader) -> QuantizationSpec | None:
    """Return the format of quantized weights; None if there are none. Raises ModelError.

    Modules that are not quantized need no list: the dtype of their tensors shows it.
    """
    given = config.get(NAME)
    if given is None:
        return None
    inside = _inside(NAME, given)
    read = inside.choice(
        f"{NAME}.quant_method", {"fp8": _fp8, "compressed-tensors": _compressed}, default=""
    )
    quantization = read(inside)
    inside.check_all_read()
    return quantization


def _inside(name: str, given: Any) -> ConfigReader:
    """Return a reader of a nested object; keys have their full names."""
    if not isinstance(given, dict):
        raise ModelError(f"config.json: {name} is {given!r:.80}, but has to be an object")
    return ConfigReader({f"{name}.{key}": value for key, value in given.items()})


def _fp8(config: ConfigReader) -> QuantizationSpec:
    """Read the format that DeepSeek, Qwen and transformers write."""
    config.require_value(f"{NAME}.fmt", "e4m3", "float8_e4m3fn")
    config.require_value(f"{NAME}.scale_fmt", "float", "ue8m0")
    config.require_value(f"{NAME}.expert_dtype", "fp8")
    # Quantization of activations, which is not applied.
    config.ignore(f"{NAME}.activation_scheme")
    # Instructions to transformers; the tensors' dtypes show which are quantized.
    config.ignore(f"{NAME}.dequantize", f"{NAME}.modules_to_convert")
    config.ignore(f"{NAME}.modules_to_not_convert", f"{NAME}.ignored_layers")
    config.require_value(f"{NAME}.kv_cache_scheme")
    return QuantizationSpec("fp8", _block(config, f"{NAME}.weight_block_size"))


def _compressed(config: ConfigReader) -> QuantizationSpec:
    """Read the format of llm-compressor: groups of modules, all in 8-bit floating point."""
    config.require_value(f"{NAME}.format", "float-quantized", "naive-quantized")
    config.require_value(f"{NAME}.quantization_status", "compressed")
    config.require_value(f"{NAME}.kv_cache_scheme")
    config.require_value(f"{NAME}.sparsity_config", {}, {"format": "dense"})
    config.require_value(f"{NAME}.transform_config", {})
    config.ignore(f"{NAME}.ignore", f"{NAME}.global_compression_ratio", f"{NAME}.version")
    name = f"{NAME}.config_groups"
    given = config.get(name)
    groups = _inside(name, given)
    formats = {_group(f"{name}.{group}", groups.get(f"{name}.{group}")) for group in given}
    groups.check_all_read()
    if len(formats) != 1:
        raise ModelError(f"config.json: {name} has {len(formats)} kinds of weights, only 1 is read")
    return formats.pop()


def _group(name: str, given: Any) -> QuantizationSpec:
    group = _inside(name, given)
    group.ignore(f"{name}.targets", f"{name}.input_activations")
    group.require_value(f"{name}.output_activations")
    group.require_value(f"{name}.format", "float-quantized", "naive-quantized")
    path = f"{name}.weights"
    weights = _inside(path, group.get(path, default={}))
    group.check_all_read()
    if (weights.get(f"{path}.type"), weights.get(f"{path}.num_bits")) != ("float", 8):
        raise weights.error((path,), "of type float with num_bits 8", group.get(path))
    weights.require_value(f"{path}.strategy", "tensor", "channel", "block")
    weights.require_value(f"{path}.symmetric", True)
    weights.require_value(f"{path}.dynamic", False)
    weights.require_value(f"{path}.actorder")
    weights.require_value(f"{path}.group_size")
    weights.ignore(f"{path}.observer", f"{path}.observer_kwargs")
    weights.ignore(f"{path}.scale_dtype", f"{path}.zp_dtype")
    block = _block(weights, f"{path}.block_structure")
    weights.check_all_read()
    return QuantizationSpec("fp8", block)


def _block(config: ConfigReader, name: str) -> tuple[int, int] | None:
    """Return the outputs and inputs per block, or None without blocks."""
    given = config.get(name)
    if given is None:
        return None
    good = isinstance(given, list) and len(given) == 2
    if not good or not all(type(size) is int and size > 0 for size in given):
        raise config.error((name,), "a list of two positive integers", given)
    return given[0], given[1]
