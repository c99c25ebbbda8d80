"""Check a configuration against its model's config.json, before any worker process starts.

Runs in the parent process, without torch: resolves the model's folder, splits its layers into
stages, and checks the context length, the size of the KV cache and that ranks can share the model.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import msgspec

from gllm.config.emulation import EMULATED
from gllm.config.engine import QUANTIZATION_DEVICES, EngineConfig
from gllm.config.kv_backends import NIXL, NIXL_MISSING
from gllm.messages.nodes import PROTOCOL
from gllm.models.config import ModelConfig, read_config
from gllm.models.identity import hash_model
from gllm.models.shard import shard, unsupported_shard_reason
from gllm.models.spec import ModelSpec
from gllm.models.split import split_layers
from gllm.options.field_types import FieldError
from gllm.options.flags import output_file
from gllm.options.version import __version__
from gllm.recovery.join_check import JoinFacts
from gllm.runtime.emulation.deployment import build_emulated_deployment, check_covered
from gllm.runtime.emulation.layer_division import divide_by_predictions
from gllm.runtime.emulation.model_folder import resolve_served_model
from gllm.runtime.emulation.output import check_output
from gllm.text.tokenizer import Tokenizer

MIN_MODEL_LEN = 2
"""Tokens of the shortest sequence: one of the prompt, and one of output."""
KV_ITEM_BYTES = {"fp8": 1, "fp8_e4m3": 1}
"""Bytes of one element of the KV cache by `kv_cache_dtype`; other values have at least 2."""


BACKEND_DEVICES = {
    "flash-attn": ("cuda",),
    "native": ("cpu",),
    "torch": ("cpu", "cuda"),
    "triton": ("cuda",),
}
"""Devices that each attention backend computes on."""


@dataclass(frozen=True)
class ModelPlan:
    """Model folder, model configuration and the division of its layers into pipeline stages."""

    folder: Path
    config: ModelConfig
    layers: list[range]
    """Layers of each stage."""
    max_model_len: int
    """Maximum number of tokens of a sequence."""


def plan_model(config: EngineConfig) -> ModelPlan:
    """Read the model's configuration, and divide its layers into pipeline stages.

    The model is downloaded if necessary: its weights only if all else of it can be served.

    Args:
        config: configuration of the engine.

    Raises:
        ModelError: The model cannot be served.
        ValueError: The configuration does not fit the model; the message says what to change.
        FileNotFoundError: A model on the hub has no tokenizer.json.
    """
    if config.step_log is not None:
        try:
            output_file(config.step_log)
        except ValueError as error:
            raise ValueError(f"step_log {config.step_log}: {error}") from None
    _check_device(config)
    if config.kv_transfer == NIXL and find_spec("nixl") is None:
        raise ValueError(NIXL_MISSING)

    def check(folder: Path) -> None:
        _plan(config, folder)
        Tokenizer.load(folder, config.chat_template)

    plan = _plan(config, resolve_served_model(config.model, config.device, check))
    return _plan_emulated(config, plan) if config.is_emulated else plan


def _plan_emulated(config: EngineConfig, plan: ModelPlan) -> ModelPlan:
    """Return a plan with the layers of unlike emulated devices divided by predicted times.

    Raises:
        FieldError: the devices cannot serve the model, or their options are invalid.
    """
    divided = divide_by_predictions(config, plan.config.model, plan.max_model_len)
    if divided is not None:
        plan = replace(plan, layers=divided)
    layers = [len(part) for part in plan.layers]
    deployment = build_emulated_deployment(
        config, plan.config.model, plan.max_model_len, layers=layers
    )
    check_covered(deployment)
    check_output(config.emulation)
    return plan


def _plan(config: EngineConfig, folder: Path) -> ModelPlan:
    """Return the plan of a model whose files are in a folder. Raises ModelError and ValueError."""
    read = read_config(folder, config.hf_overrides)
    for num_ranks in config.stage_degrees:
        if (reason := unsupported_shard_reason(read.model, num_ranks)) is not None:
            raise FieldError("tensor_parallel_size", reason)
    layers = split_layers(read.model, config.pipeline_parallel_size, config.layer_counts)
    length = config.max_model_len or read.model.context_length
    if length > read.model.context_length:
        raise ValueError(
            f"max_model_len is {length}, but the model's context is {read.model.context_length} "
            "tokens"
        )
    if length < MIN_MODEL_LEN:
        raise ValueError(
            f"max_model_len is {length}, but a sequence has a token of a prompt and a token of "
            f"output at least: set --max-model-len to {MIN_MODEL_LEN} or more"
        )
    _check_kv_cache(config, read.model, length)
    return ModelPlan(folder, read, layers, length)


def _check_device(config: EngineConfig) -> None:
    """Raise ValueError if the device lacks a requested backend or quantization.

    With device `auto`, the worker checks it on the device it selects.
    """
    for field, devices_of in (
        ("attention_backend", BACKEND_DEVICES),
        ("quantization", QUANTIZATION_DEVICES),
    ):
        value, device = getattr(config, field), EMULATED if config.is_emulated else config.device
        if "auto" in (value, device) or device in devices_of[value]:
            continue
        is_emulated_format = field == "quantization" and config.is_emulated
        hint = "; emulated_bytes_per_weight 1 predicts it" if is_emulated_format else ""
        usable = [other for other, devices in devices_of.items() if device in devices] or ["auto"]
        raise FieldError(
            field,
            f"{field} {value} does not compute on device {device}: choose {', '.join(usable)}, or "
            f"device {devices_of[value][0]}{hint}",
        )


def _check_kv_cache(config: EngineConfig, model: ModelSpec, length: int) -> None:
    """Raise ValueError if `kv_cache_memory` is certainly too small for one sequence."""
    if config.kv_cache_memory is None:
        return
    # Of the shards, because several ranks may hold the same KV head.
    elements = min(
        sum(
            layer.attention.kv_entry.num_elements
            for rank in range(num_ranks)
            for layer in shard(model, rank, num_ranks).layers
        )
        for num_ranks in set(config.stage_degrees)
    )
    size = config.scheduler.block_size
    block_bytes = size * elements * KV_ITEM_BYTES.get(config.kv_cache_dtype, 2)
    needed = -(-length // size)
    if config.kv_cache_memory // block_bytes < needed:
        raise ValueError(
            f"kv_cache_memory is {config.kv_cache_memory} bytes, but one sequence of max_model_len "
            f"{length} needs {needed * block_bytes} at least: raise --kv-cache-memory or lower "
            "--max-model-len"
        )


def make_join_facts(config: EngineConfig, folder: Path, max_model_len: int) -> JoinFacts:
    """Return the version, model and configuration that must be equal on all machines of an engine.

    Args:
        config: configuration of the engine.
        folder: folder of the model.
        max_model_len: most tokens of a sequence, which `config` may leave to the model.

    Raises:
        ModelError: the model's files cannot be read.
    """
    resolved = replace(config, max_model_len=max_model_len)
    return JoinFacts(
        PROTOCOL, __version__, config.model, hash_model(folder), msgspec.json.encode(resolved)
    )
