"""The simulator's deployment of an engine on emulated devices: step times, and memory for KV."""

from collections.abc import Sequence
from dataclasses import replace

from gllm.config.emulation import EMULATED, emulated_name, fit_names
from gllm.config.engine import EngineConfig
from gllm.models.spec.attention import LatentAttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.options.field_types import FieldError
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostRangeError
from gllm.sim.deployment import Deployment, roofline_deployment
from gllm.sim.hardware.devices import find_link, parse_host
from gllm.sim.hardware.shapes import (
    MODELS,
    ExpertsShape,
    LatentShape,
    ModelShape,
    RecurrentShape,
)
from gllm.sim.hardware.stages import PipelineSpec, build_hardware
from gllm.sim.profiled import VIDUR, VIDUR_MODEL, ProfileOptions, profiled_deployment

DEFAULT_DEVICE = "L20"
"""Device of `--device emulated` without a name, as in `gllm simulate`."""
FP8_BYTES, BFLOAT16_BYTES = 1.0, 2.0
"""Bytes per weight of a checkpoint in 8-bit floats, and of others."""


def build_emulated_deployment(
    config: EngineConfig,
    model: ModelSpec,
    max_model_len: int,
    degrees: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
) -> Deployment:
    """Return the deployment by which the simulator predicts an emulated engine.

    Args:
        config: configuration of an engine with an emulated device.
        model: specification of the model, used for the sizes of models that the simulator lacks.
        max_model_len: longest sequence in tokens.
        degrees: ranks of each stage; None for those of the configuration.
        layers: layers of each stage; None for an equal division or the profile's.

    Raises:
        FieldError: the devices, links or the profile are unknown, or the model does not fit.
    """
    emulation, stages = config.emulation, config.pipeline_parallel_size
    stages = stages if layers is None else len(layers)
    degrees = degrees or config.stage_degrees
    name, devices = config.model, emulated_name(config.device)
    link, rank_link = emulation.emulated_link, emulation.emulated_rank_link
    _check_links(config)
    try:
        parse_host(emulation.emulated_host)
    except ValueError as error:
        raise FieldError("emulated_host", f"emulated_host: {error}") from error
    if stages != config.pipeline_parallel_size:
        devices, link = fit_names(devices, stages), fit_names(link, stages - 1)
        rank_link = rank_link and fit_names(rank_link, stages)
    if emulation.emulated_profile is not None:
        _check_profile_options(config, emulation.emulated_profile)
        try:
            return profiled_deployment(
                emulation.emulated_profile,
                ProfileOptions(
                    config.scheduler,
                    max_model_len,
                    stages,
                    degrees if max(degrees) > 1 else None,
                    None if layers is None else tuple(layers),
                    link,
                    max_model_len,
                    devices or DEFAULT_DEVICE,
                    includes_host=False,  # The host is real.
                ),
            )
        except (OSError, ValueError) as error:
            raise FieldError("emulated_profile", f"emulated_profile: {error}") from error
    try:
        return roofline_deployment(
            name,
            devices or DEFAULT_DEVICE,
            stages,
            max_model_len,
            link,
            config.scheduler,
            degrees=degrees,
            rank_link=rank_link,
            layers=layers,
            bytes_per_weight=emulation.emulated_bytes_per_weight,
            shape=None if name in MODELS else to_shape(model),
            memory_share=config.gpu_memory_utilization,
            cpu_experts=config.cpu_experts,
            expert_cache=config.expert_cache,
            host=emulation.emulated_host,
        )
    except ValueError as error:
        raise FieldError("device", f"device {config.device}: {error}") from error


def build_emulated_hardware(config: EngineConfig, model: ModelSpec) -> PipelineSpec:
    """Return the devices and links of an emulated engine, with an equal division of its layers.

    Raises:
        FieldError: the devices or links are unknown.
    """
    emulation, name = config.emulation, config.model
    _check_links(config)
    try:
        hardware = build_hardware(
            name,
            emulated_name(config.device) or DEFAULT_DEVICE,
            config.pipeline_parallel_size,
            emulation.emulated_link,
            config.stage_degrees,
            emulation.emulated_rank_link,
            shape=None if name in MODELS else to_shape(model),
        )
    except ValueError as error:
        raise FieldError("device", f"device {config.device}: {error}") from error
    if emulation.emulated_bytes_per_weight is None:
        return hardware
    shape = replace(hardware.model, bytes_per_weight=emulation.emulated_bytes_per_weight)
    return replace(hardware, model=shape)


def _check_links(config: EngineConfig) -> None:
    """Raise FieldError if a link is unknown."""
    for field in ("emulated_link", "emulated_rank_link"):
        text = getattr(config.emulation, field)
        for name in text.split(",") if text is not None else ():
            try:
                find_link(field, name.strip())
            except ValueError as error:
                raise FieldError(field, str(error)) from error


def _check_profile_options(config: EngineConfig, profile: str) -> None:
    """Raise FieldError for an option that chooses what a profile contains."""
    if config.has_cpu_experts:
        raise FieldError(
            "cpu_experts",
            "cpu_experts has no effect on a profile: leave it or emulated_profile out",
        )
    model = "llama-2-70b" if profile == VIDUR else profile.partition(":")[2].partition(",")[0]
    if model in MODELS and config.model in MODELS and model != config.model:
        raise FieldError(
            "emulated_profile",
            f"emulated_profile {profile} is of {model}: choose this model instead of "
            f"{config.model}, or another profile",
        )
    if emulated_name(config.device) and not profile.startswith(VIDUR_MODEL):
        raise FieldError(
            "device",
            f"device {config.device}: emulated_profile {profile} has its own device: choose device "
            f"{EMULATED}",
        )
    for field in ("emulated_bytes_per_weight", "emulated_rank_link"):
        if getattr(config.emulation, field) is not None:
            raise FieldError(
                field, f"{field} has no effect on a profile: leave it or emulated_profile out"
            )


def check_covered(deployment: Deployment) -> None:
    """Check that the cost model knows the largest micro-batches of an emulated engine.

    Raises:
        FieldError: a micro-batch may be larger than those that the cost model was made for.
    """
    scheduler = deployment.scheduler
    assert scheduler.max_num_batched_tokens is not None
    assert scheduler.max_model_len is not None
    length, rows = scheduler.max_model_len, scheduler.max_num_seqs
    chunk = min(scheduler.max_num_batched_tokens, length)
    # Of the longest sequence; and decodes of all sequences, with what the KV cache holds.
    context = min(rows * length, scheduler.num_blocks * scheduler.block_size)
    works = [
        StageWork(0, chunk, ((length - chunk, chunk),), 0, 0, 1),
        StageWork(0, rows, (), rows, context, rows),
    ]
    try:
        for work in works:
            # A profile has one range for all stages, and a fit of each one takes time.
            deployment.cost.stage_seconds(0, work)
    except CostRangeError as error:
        raise FieldError(
            "emulated_profile",
            f"emulated_profile: {error}; or lower max_num_batched_tokens (now {chunk}), "
            f"max_num_seqs ({rows}) or max_model_len ({length})",
        ) from error


CHANNEL_HEADS = 64
"""Heads that the channels of a block without heads are counted as."""


def to_shape(model: ModelSpec) -> ModelShape:
    """Return the sizes of a model for cost models.

    All layers are taken to be like the first dense one, and the first one with experts; attention
    in a sliding window is counted as full. Recurrent layers have the weights of attention layers;
    without any, their own.
    """
    first = next((layer for layer in model.layers if is_attention(layer)), model.layers[0])
    entries = [layer.attention.state_entry for layer in model.layers]
    states = [(entry.num_bytes, entry.flops) for entry in entries if entry is not None]
    sparse = next((layer.mlp for layer in model.layers if isinstance(layer.mlp, ExpertsSpec)), None)
    num_dense = sum(isinstance(layer.mlp, MLPSpec) for layer in model.layers)
    dense = next(
        (layer.mlp for layer in model.layers if isinstance(layer.mlp, MLPSpec)),
        None if sparse is None else sparse.expert,
    )
    attention = first.attention
    heads, head_dim = attention.num_heads, attention.kv_entry.key_dim
    if not is_attention(first):
        # As many weights as attention of so many heads has.
        heads = heads if heads > 1 else CHANNEL_HEADS
        weights = attention.weights_per_token(model.hidden_size)
        head_dim = max(1, round(weights / (4 * heads * model.hidden_size)))
    latent = None
    if isinstance(attention, LatentAttentionSpec):
        latent = LatentShape(
            attention.kv_lora_rank,
            attention.rope_head_dim,
            attention.nope_head_dim,
            attention.value_dim,
            0 if attention.q_down_proj is None else attention.q_input_size,
        )
    experts = None
    if sparse is not None:
        shared = sparse.shared_expert
        inner = sparse.expert.intermediate_size
        experts = ExpertsShape(
            sparse.num_experts,
            sparse.top_k,
            inner,
            0 if shared is None else -(-shared.intermediate_size // inner),
            num_dense,
        )
    positions, stored = model.embedding.positions, model.quantization
    num_elements = sum(layer.attention.kv_entry.num_elements for layer in model.layers)
    entry = attention.kv_entry
    # ModelShape takes the values of a head to be as long as its keys, and knows no index keys.
    counted = latent.cached_elements if latent else 2 * entry.num_heads * entry.key_dim
    share = num_elements / (model.num_layers * max(1, counted))
    return ModelShape(
        model.num_layers,
        model.hidden_size,
        heads,
        heads if latent or not entry.num_heads else entry.num_heads,
        0 if dense is None else dense.intermediate_size,
        model.vocab_size,
        head_dim=128 if latent else head_dim,
        tied=model.is_head_tied,
        gated=dense is None or dense.is_gated,
        positions=0 if positions is None else positions.num_rows,
        # Kernels for GPUs multiply by 8-bit floats; other weights become 16 bits at load.
        bytes_per_weight=FP8_BYTES if stored and stored.format == "fp8" else BFLOAT16_BYTES,
        experts=experts,
        latent=latent,
        recurrent=RecurrentShape(len(states), *max(states)) if states else None,
        kv_share=share if states or share != 1 else None,
    )


def is_attention(layer: LayerSpec) -> bool:
    """Return True if a layer has a KV cache."""
    return layer.attention.kv_entry.num_elements > 0
