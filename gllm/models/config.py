"""A model folder's configuration: config.json and generation_config.json, checked.

It reads what all families share; a family's own keys are read by its module in families/. The
frontend imports it without torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gllm.config.sampling import SamplingParams
from gllm.models.config_overrides import apply_overrides
from gllm.models.config_reader import ConfigReader
from gllm.models.eos_token import find_eos_id
from gllm.models.errors import ModelError
from gllm.models.multimodal import MEDIA_TENSORS, LanguageModelConfig, read_language_model
from gllm.models.pooling_config import read_pooling
from gllm.models.quantization_config import read_quantization
from gllm.models.registry import ARCHITECTURES, select_architecture, spec_builder
from gllm.models.spec.model import ModelSpec
from gllm.models.weight_files import is_lfs_pointer, lfs_error, missing_weights_reason
from gllm.options.field_types import FieldError
from gllm.options.options import INT32_MAX

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
    """Class in config.json: a key of ARCHITECTURES or of LANGUAGE_MODELS."""
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
    if raw is None and (files := sorted(path.name for path in folder.glob("*.gguf"))):
        raise ModelError(f"{folder} has no config.json, but {missing_weights_reason(files)}")
    if raw is None:
        raise ModelError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    replaced = json.loads(overrides or "{}")
    raw = apply_overrides(raw, replaced)
    generation = _read_json(folder / GENERATION_CONFIG) or {}
    architecture, content = select_language_model(raw, replaced)
    model = build_model(content)
    model = replace(model, pooling=read_pooling(folder, model))
    eos_ids = _ids("config.json", raw) | _ids("config.json", content.content)
    eos_ids |= _ids(GENERATION_CONFIG, generation)
    if (eos_id := find_eos_id(folder)) is not None:
        eos_ids.add(eos_id)
    sampling = _sampling_defaults(generation)
    dtype = _dtype(content.content)
    return ModelConfig(architecture, model, dtype, tuple(sorted(eos_ids)), sampling)


def select_language_model(
    raw: dict[str, Any], overrides: Mapping[str, Any] = MappingProxyType({})
) -> tuple[str, LanguageModelConfig]:
    """Return the class that config.json names, and the configuration of its language model.

    Args:
        raw: content of config.json.
        overrides: values in it that replace keys of a nested configuration too.

    Raises:
        ModelError: the class is not supported.
    """
    name = select_architecture(raw.get("architectures"))
    if name in ARCHITECTURES:
        return name, LanguageModelConfig(name, raw)
    config = read_language_model(raw, name, overrides)
    select_architecture([config.architecture])
    return name, config


def build_model(config: LanguageModelConfig) -> ModelSpec:
    """Build the specification of a language model; every key of its configuration is read.

    Raises ModelError, which names the key.
    """
    reader = ConfigReader(config.content)
    try:
        model = replace(
            spec_builder(config.architecture)(reader), quantization=read_quantization(reader)
        )
        reader.check_all_read()
    except ModelError as error:
        if config.section:
            raise ModelError(f"{error} (in {config.section})") from error
        raise
    if config.multimodal_class is None:
        return model
    return replace(
        model,
        multimodal_class=config.multimodal_class,
        ignored_tensors=(*model.ignored_tensors, *MEDIA_TENSORS),
        notes=(*model.notes, f"{config.multimodal_class}: only its language model is loaded"),
    )


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
        if (
            rope.kind == "longrope"
            and rope.parameters["short_factor"] != rope.parameters["long_factor"]
        ):
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
