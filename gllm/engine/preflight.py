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
from gllm.models.draft_plan import find_draft_obstacle, missing_head_reason
from gllm.models.errors import ModelError
from gllm.models.expert_placement import host_share, place_experts
from gllm.models.hub import resolve_model, resolve_tokenizer
from gllm.models.identity import hash_model
from gllm.models.shard import shard, unsupported_shard_reason
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.split import split_layers
from gllm.options.field_types import FieldError
from gllm.options.flags import output_file
from gllm.options.version import __version__
from gllm.recovery.join_check import JoinFacts
from gllm.runtime.emulation.deployment import build_emulated_deployment, check_covered
from gllm.runtime.emulation.layer_division import divide_by_predictions
from gllm.runtime.emulation.model_folder import resolve_served_model
from gllm.runtime.emulation.output import check_output
from gllm.runtime.worker.device import available_memory_bytes, find_gpu_models
from gllm.scheduler.config import SPECULATION_WITH_STATES, STATE_SLOTS_PER_SEQ
from gllm.text.tokenizer import Tokenizer

WHOLE_PROMPT_POLICY = "vllm"
"""Policy for models that embed whole texts: a prompt is in one micro-batch."""
MIN_MODEL_LEN = 2
"""Tokens of the shortest sequence: one of the prompt, and one of output."""
KV_ITEM_BYTES = {"fp8": 1, "fp8_e4m3": 1, "int8": 1, "int8_per_token_head": 1}
"""Bytes of one element of the KV cache by `kv_cache_dtype`; other values have at least 2."""
KV_SCALE_BYTES = {"int8": 4, "int8_per_token_head": 4}
"""Bytes behind each key and value of a token and head by `kv_cache_dtype`; other values have 0."""


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


def plan_model(config: EngineConfig, num_machines: int = 1) -> ModelPlan:
    """Read the model's configuration, and divide its layers into pipeline stages.

    The model is downloaded if necessary: its weights only if all else of it can be served.

    Args:
        config: configuration of the engine.
        num_machines: machines of the engine, which hold equal parts of the weights.

    Raises:
        ModelError: The model cannot be served.
        ValueError: The configuration does not fit the model; the message says what to change.
        FileNotFoundError: A model on the hub has no tokenizer.
    """
    if config.step_log is not None:
        try:
            output_file(config.step_log)
        except ValueError as error:
            raise ValueError(f"step_log {config.step_log}: {error}") from None
    _check_device(config)
    if config.kv_transfer == NIXL and find_spec("nixl") is None:
        raise ValueError(NIXL_MISSING)

    is_multimodal, share_on_host = False, 0.0

    def check(folder: Path) -> None:
        nonlocal is_multimodal, share_on_host
        model = plan_local_model(config, folder).config.model
        is_multimodal = model.multimodal_class is not None
        share_on_host = host_share(place_experts(model, config.cpu_experts))
        Tokenizer.load(resolve_tokenizer(config.tokenizer, folder), config.chat_template)

    def check_size(num_bytes: int) -> None:
        if share_on_host and not config.is_emulated:
            own = int(num_bytes * share_on_host) // num_machines // (2 if is_multimodal else 1)
            reason = memory_reason(own, config, available_memory_bytes())
            if reason is not None:
                raise FieldError("cpu_experts", f"cpu_experts {config.cpu_experts}: {reason}")
        if config.device == "cpu" or (config.device == "auto" and not find_gpu_models()):
            # Towers for images and audio, which are not read, are smaller than the language model.
            own = num_bytes // num_machines // (2 if is_multimodal else 1)
            reason = memory_reason(own, config, available_memory_bytes())
            if reason is not None:
                raise ModelError(f"model {config.model!r}: {reason}")

    folder = resolve_served_model(config.model, config.device, check, check_size)
    plan = plan_local_model(config, folder)
    _check_draft_model(config, plan)
    return _plan_emulated(config, plan) if config.is_emulated else plan


def _check_draft_model(config: EngineConfig, plan: ModelPlan) -> None:
    """Download the draft model of speculation if necessary, and check it.

    Raises:
        ModelError: it is not supported.
        FieldError: it cannot draft for the served model.
    """
    speculation = config.scheduler.speculative_config
    if speculation is None or speculation.model is None:
        return
    name = speculation.model
    folder = resolve_model(name, check=read_config)
    reason = find_draft_obstacle(read_config(folder).model, plan.max_model_len)
    if reason is None:
        served = Tokenizer.load(resolve_tokenizer(config.tokenizer, plan.folder))
        if not Tokenizer.load(folder).has_same_tokens(served):
            reason = (
                "its tokenizer has other tokens or ids than that of the served model: choose a "
                "draft model of the same family"
            )
    if reason is not None:
        raise FieldError(
            "speculative_config", f"speculative_config: {name} cannot be the draft model: {reason}"
        )


def memory_reason(num_bytes: int, config: EngineConfig, available_bytes: int) -> str | None:
    """Return why weights certainly do not fit into the memory of a CPU; None if they may fit.

    Args:
        num_bytes: bytes of this machine's part of the weights, as they are stored.
        config: configuration of the engine.
        available_bytes: memory that is free.
    """
    # The files may have 32 bits per weight.
    share = {"none": 1.0 if config.dtype == "auto" else 0.5, "int8": 0.25}
    needed = int(num_bytes * share.get(config.quantization, 0.125))
    if needed <= available_bytes:
        return None
    return (
        f"the weights take {needed / 1e9:.1f} GB of memory at least, but "
        f"{available_bytes / 1e9:.1f} GB are free: free memory, set --quantization, use more "
        "machines or a smaller model"
    )


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


def plan_local_model(config: EngineConfig, folder: Path) -> ModelPlan:
    """Check a configuration against the model's config.json, and divide its layers into stages.

    Args:
        config: configuration of the engine.
        folder: files of the model; the weights may be missing.

    Raises:
        ModelError: The model cannot be served.
        ValueError: The configuration does not fit the model; the message says what to change.
    """
    read = read_config(folder, config.hf_overrides)
    if read.model.multimodal_class is not None and not config.language_model_only:
        raise FieldError(
            "language_model_only",
            f"language_model_only is off, but of {read.model.multimodal_class} only the language "
            "model is implemented: leave it on",
        )
    for num_ranks in config.stage_degrees:
        if (reason := unsupported_shard_reason(read.model, num_ranks)) is not None:
            raise FieldError("tensor_parallel_size", reason)
    place_experts(read.model, config.cpu_experts)
    if read.model.is_bidirectional:
        _check_bidirectional(config)
    if read.model.has_state and config.scheduler.speculative_config is not None:
        raise FieldError("speculative_config", SPECULATION_WITH_STATES)
    speculation = config.scheduler.speculative_config
    has_head = read.model.prediction_head is not None
    if speculation is not None and speculation.method == "mtp" and not has_head:
        raise FieldError("speculative_config", missing_head_reason(read.architecture))
    if read.model.has_state and config.kv_transfer is not None:
        raise FieldError(
            "kv_transfer",
            "kv_transfer moves the KV blocks of attention, but this model has recurrent layers, "
            "whose states stay in their engine: leave kv_transfer out, or choose a model without "
            "recurrent layers",
        )
    if read.model.has_state and config.kv_cache_disk is not None:
        raise FieldError(
            "kv_cache_disk",
            "kv_cache_disk keeps the KV blocks of attention, but this model has recurrent layers, "
            "whose states are not kept on disk: leave kv_cache_disk out, or choose a model without "
            "recurrent layers",
        )
    length = config.max_model_len or read.model.context_length
    read = replace(read, model=read.model.limit_length(length))
    layers = split_layers(read.model, config.pipeline_parallel_size, config.layer_counts)
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


def resolve_config(config: EngineConfig, plan: ModelPlan) -> EngineConfig:
    """Return a configuration with what depends on the model, so that all machines agree on it.

    `max_model_len` is resolved. The texts of a model with bidirectional attention are computed in
    one piece each, and nothing of them is reused.

    Args:
        config: configuration of the engine, which `plan_local_model` has checked.
        plan: the model.
    """
    length, scheduler = plan.max_model_len, config.scheduler
    if plan.config.model.is_bidirectional:
        scheduler = replace(
            scheduler,
            policy=WHOLE_PROMPT_POLICY,
            max_prefill_tokens=max(scheduler.max_prefill_tokens, length),
            max_num_batched_tokens=max(scheduler.max_num_batched_tokens or 0, length),
            prefix_cache=False,
        )
    return replace(config, max_model_len=length, scheduler=scheduler)


def _check_bidirectional(config: EngineConfig) -> None:
    """Raise FieldError for options that a model with bidirectional attention cannot have."""
    has = "this model has bidirectional attention, so that"
    if config.scheduler.policy not in ("auto", WHOLE_PROMPT_POLICY):
        raise FieldError(
            "policy",
            f"policy {config.scheduler.policy} may divide prompts, but {has} a text is computed in "
            f"one piece: leave policy out, or choose {WHOLE_PROMPT_POLICY}",
        )
    for name in ("kv_transfer", "kv_cache_disk"):
        if getattr(config, name) is not None:
            raise FieldError(
                name,
                f"{name} reuses keys and values of the beginning of a text, but {has} these depend "
                f"on its end: leave {name} out",
            )


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
    """Raise ValueError if the KV cache cannot be as configured.

    It is checked whether the model's entries can have the dtype, and whether `kv_cache_memory` is
    certainly too small for one sequence.
    """
    item_bytes = KV_ITEM_BYTES.get(config.kv_cache_dtype, 2)
    scale_bytes = KV_SCALE_BYTES.get(config.kv_cache_dtype, 0)
    if scale_bytes and any(layer.attention.kv_entry.is_shared for layer in model.layers):
        raise FieldError(
            "kv_cache_dtype",
            f"--kv-cache-dtype {config.kv_cache_dtype} is not implemented for latent attention "
            "(MLA), which this model has: choose fp8 or auto",
        )
    if config.kv_cache_memory is None:
        return
    size = config.scheduler.block_size
    num_tokens = -(-length // size) * size

    def count_bytes(layer: LayerSpec) -> int:
        entry = layer.attention.state_entry
        states = 0 if entry is None else STATE_SLOTS_PER_SEQ * entry.num_bytes
        cached = layer.attention.kv_entry
        token_bytes = cached.num_elements * item_bytes + cached.num_vectors * scale_bytes
        return num_tokens * token_bytes + states

    # Of the shards, because several ranks may hold the same KV head.
    needed = min(
        sum(
            count_bytes(layer)
            for rank in range(num_ranks)
            for layer in shard(model, rank, num_ranks).layers
        )
        for num_ranks in set(config.stage_degrees)
    )
    if config.kv_cache_memory < needed:
        raise ValueError(
            f"kv_cache_memory is {config.kv_cache_memory} bytes, but one sequence of max_model_len "
            f"{length} needs {needed} at least: raise --kv-cache-memory or lower --max-model-len"
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
