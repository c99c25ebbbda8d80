"""A model folder's configuration: config.json and generation_config.json, checked.

It reads what all families share; a family's own keys are read by its module in families/. The
frontend imports it without torch.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gllm.config.sampling import SamplingParams
from gllm.models.config_reader import ConfigReader
from gllm.models.eos_token import find_eos_id
from gllm.models.errors import ModelError
from gllm.models.registry import select_architecture, spec_builder
from gllm.models.spec import ModelSpec, QuantizationSpec
from gllm.models.weight_files import is_lfs_pointer, lfs_error, missing_weights_reason
from gllm.options.field_types import FieldError
from gllm.options.options import INT32_MAX

NAME = "quantization_config"


def read_quantization(config: ConfigReader) -> QuantizationSpec | None:
    """Return the format of the checkpoint's quantized weights; None if there are none.

    Raises ModelError for an unsupported format. Modules that are not quantized are recognized by
    the dtype of their tensors.
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


DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of checkpoints."""
GENERATION_CONFIG = "generation_config.json"
"""File with end-of-sequence ids and sampling defaults."""
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters whose defaults that file may set."""


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a model folder: architecture, layers, dtype and sampling defaults."""

    architecture: str
    model: ModelSpec
    dtype: str
    """Dtype of the checkpoint: float32, bfloat16 or float16."""
    eos_ids: tuple[int, ...]
    """End-of-sequence token ids of config.json, generation_config.json and the tokenizer."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling defaults of generation_config.json, by the names of SAMPLING_KEYS."""


def read_config(folder: Path, overrides: str | None = None) -> ModelConfig:
    """Read config.json and generation_config.json of a model folder.

    Args:
        folder: the model folder.
        overrides: JSON object whose values replace keys of config.json; None for none.

    Raises:
        ModelError: a file is missing or invalid, or a key is not supported; the message names the
            key.
    """
    raw = _read_json(folder / "config.json")
    if raw is None and any(folder.glob("*.gguf")):
        raise ModelError(f"{folder} has no config.json, and {missing_weights_reason(['.gguf'])}")
    if raw is None:
        raise ModelError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    raw |= json.loads(overrides or "{}")
    generation = _read_json(folder / GENERATION_CONFIG) or {}
    architecture = select_architecture(raw.get("architectures"))
    config = ConfigReader(raw)
    model = replace(spec_builder(architecture)(config), quantization=read_quantization(config))
    config.check_all_read()
    eos_ids = _ids("config.json", raw) | _ids(GENERATION_CONFIG, generation)
    if (eos_id := find_eos_id(folder)) is not None:
        eos_ids.add(eos_id)
    sampling = _sampling_defaults(generation)
    return ModelConfig(architecture, model, _dtype(raw), tuple(sorted(eos_ids)), sampling)


def model_notes(model: ModelSpec, max_model_len: int, has_eos: bool = True) -> list[str]:
    """Return notes for the log: differences from transformers, and a missing end of texts.

    Args:
        model: the model.
        max_model_len: longest sequence served, in tokens.
        has_eos: False if the model has no token that ends a text.
    """
    notes = list(model.notes)
    if not has_eos:
        notes.append(
            "the model has no end-of-sequence token, so texts end at max_tokens or a stop string: "
            f"if it has one, set eos_token_id in {GENERATION_CONFIG} or eos_token in "
            "tokenizer_config.json"
        )
    ropes = {layer.attention.rope for layer in model.layers if layer.attention.rope is not None}
    for rope in ropes:
        if "attn_factor" in rope.parameters:
            notes.append(
                f"yarn: attn_factor {rope.parameters['attn_factor']} scales the rotary embedding, "
                "as in vLLM; transformers ignores it"
            )
        if rope.kind == "longrope":
            original = rope.parameters["original_max_position_embeddings"]
            kind = "long" if max_model_len > original else "short"
            notes.append(
                f"longrope: the {kind} factors apply to all texts, because max_model_len is "
                f"{max_model_len} and the original context {original}; transformers selects "
                "them by the length of each text"
            )
    return notes


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if is_lfs_pointer(path):
            raise ModelError(lfs_error(path)) from error
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def _dtype(raw: dict[str, Any]) -> str:
    names = (raw[key] for key in ("dtype", "torch_dtype") if raw.get(key) is not None)
    name = next(names, "float32")
    if name not in DTYPES:
        raise ModelError(
            f"config.json: dtype {name!r:.80} is not implemented, only {', '.join(DTYPES)} are"
        )
    return str(name)


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling defaults that generation_config.json sets.

    An integer written as 50.0 is converted.

    Raises:
        ModelError: a value is invalid in requests.
    """
    defaults = {}
    for key in SAMPLING_KEYS:
        value = generation.get(key)
        if value is None:
            continue
        try:
            fields: dict[str, Any] = {key: _as_integer(value) if key == "top_k" else value}
            defaults[key] = getattr(SamplingParams(**fields), key)
        except FieldError as error:
            raise ModelError(f"{GENERATION_CONFIG}: {error}; correct or remove it") from error
    return defaults


def _as_integer(value: object) -> object:
    """Return the integer that equals a float, or the value itself."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= INT32_MAX:
        return int(value)
    return value


def _ids(file: str, raw: dict[str, Any]) -> set[int]:
    """Return the end-of-sequence ids of a file, where they are an integer, a list or null."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [value] if value is not None else []
    ids = [_as_integer(token) for token in ids]
    if not all(type(token) is int and 0 <= token <= INT32_MAX for token in ids):
        raise ModelError(
            f"{file}: eos_token_id is {value!r:.80}, but has to be a token id or a list of them"
        )
    return set(ids)
