"""Checks of a plan's engines that `gllm serve` makes when it starts, before the plan is written.

A model of the simulator's table has no checkpoint, so the table says what is known of it: layers,
heads, context, bytes of weights and of the KV cache. The configurations are those that
`processes.check_configurations` reads; `gllm.engine.preflight` checks a model that has a folder.
"""

from dataclasses import replace
from math import floor
from typing import Any

import msgspec

from gllm.config.engine import EngineConfig
from gllm.plan.processes import check_configurations, find_flag
from gllm.plan.serving_plan import PlanError, RouterPlan, ServingPlan
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.deployment import USABLE_MEMORY_SHARE, Deployment
from gllm.sim.hardware.devices import DEVICES
from gllm.sim.hardware.shapes import BYTES_PER_ELEMENT, BYTES_PER_LOGIT, MODELS, ModelShape
from gllm.sim.hardware.stages import PipelineSpec, build_hardware

LENGTH_FLAG = "max-model-len"
"""Flag of the longest sequence that an engine or a router serves."""


def planned_max_model_len(longest: int, num_held_tokens: int, context: int) -> int:
    """Return the longest sequence, in tokens, that an engine of a plan accepts.

    It is the model's context, or what the KV cache holds if that is less, and the longest request
    of the workload in any case.

    Args:
        longest: Tokens of the longest request of the workload.
        num_held_tokens: Tokens that the KV cache holds.
        context: Tokens of the model's context; 0 if unknown.
    """
    return max(longest, min(num_held_tokens, context or num_held_tokens))


def with_planned_length(engine: Deployment, longest: int) -> Deployment:
    """Return a simulated engine that accepts the sequences of a planned one.

    Args:
        engine: An engine whose KV cache holds the longest request.
        longest: Tokens of that request.
    """
    scheduler = engine.scheduler
    held = scheduler.num_blocks * scheduler.block_size
    if engine.hardware is not None:
        held = min(held, _count_kv_tokens(scheduler, engine.hardware, USABLE_MEMORY_SHARE))
    shape = MODELS.get(engine.model)
    context = 0 if shape is None else shape.max_context
    length = planned_max_model_len(longest, held, context)
    return replace(engine, scheduler=replace(scheduler, max_model_len=length))


def length_flags(model: str, max_model_len: int) -> dict[str, Any]:
    """Return the flag --max-model-len of an engine; empty if it equals the model's context length.

    Args:
        model: Name of the model.
        max_model_len: Longest sequence of the engine in tokens.
    """
    shape = MODELS.get(model)
    is_context = shape is not None and shape.max_context == max_model_len
    return {} if is_context else {LENGTH_FLAG: max_model_len}


def check_engines(plan: ServingPlan) -> ServingPlan:
    """Check the engines of a plan, and set `max-model-len` where the model's context is too long.

    `gllm serve` refuses a context for which the KV cache has no space. Layers, ranks, context and
    memory are checked for a model and devices of the simulator's table.

    Returns:
        The plan, with the flag for engines that lack it and whose memory is below the context, and
        for their router.

    Raises:
        PlanError: `gllm serve` would refuse an engine; the message names it and the fix.
    """
    engines, shape = dict(plan.engines), MODELS.get(plan.model)
    lengths: list[int] = []
    for name, config in check_configurations(plan).items():
        engine = plan.engines[name]
        if shape is None:
            lengths += [config.max_model_len] if config.max_model_len is not None else []
            continue
        _check_shape(plan, name, shape)
        hardware = engine_hardware(plan, name, config)
        length = config.max_model_len or shape.max_context
        if config.max_model_len is None and hardware is not None:
            fitting = count_kv_tokens(config, hardware)
            if 0 < fitting < length:
                length = fitting
                flags = {**engine.flags, LENGTH_FLAG: length}
                engines[name] = msgspec.structs.replace(engine, flags=flags)
        if length > shape.max_context:
            raise PlanError(
                f"engines.{name}.flags.{LENGTH_FLAG}: {length}, but the context of {plan.model} is "
                f"{shape.max_context} tokens: lower it, or cut the requests"
            )
        if hardware is not None:
            _check_memory(name, config, hardware, length)
        lengths += [length] if length < shape.max_context else []
    router = plan.router and _with_length(plan.router, lengths)
    return msgspec.structs.replace(plan, engines=engines, router=router)


def _with_length(router: RouterPlan, lengths: list[int]) -> RouterPlan:
    """Return a router with `max-model-len`, if some engines are limited to these lengths.

    A router refuses engines that serve shorter sequences than itself. Raises PlanError.
    """
    if not lengths:
        return router
    own, least = find_flag(router.flags, "max_model_len"), min(lengths)
    if own is None:
        return msgspec.structs.replace(router, flags={**router.flags, LENGTH_FLAG: least})
    if own > least:
        raise PlanError(
            f"router.flags.{LENGTH_FLAG}: {own}, but an engine serves {least} tokens at most: "
            "lower it"
        )
    return router


def _check_shape(plan: ServingPlan, name: str, shape: ModelShape) -> None:
    """Raise PlanError if the stages have other layers than the model, or ranks that do not fit."""
    stages = plan.engines[name].stages
    num_layers = sum(stage.layers for stage in stages)
    if num_layers != shape.layers:
        raise PlanError(
            f"engines.{name}.stages: {num_layers} layers, but {plan.model} has {shape.layers}"
        )
    for stage in stages:
        try:
            shape.shard(stage.num_ranks)
        except ValueError as error:
            raise PlanError(f"engines.{name}.stages: {error}") from None


def _check_memory(name: str, config: EngineConfig, hardware: PipelineSpec, length: int) -> None:
    """Raise PlanError if the KV cache has no space for a sequence of the longest length."""
    num_blocks = count_kv_tokens(config, hardware, False) // config.scheduler.block_size
    try:
        config.scheduler.resolve(len(hardware.stages), num_blocks, length)
    except ValueError as error:
        weights = hardware.model.parameters * hardware.model.bytes_per_weight / 1e9
        raise PlanError(
            f"engines.{name}: its devices have too little memory for {weights:.1f} GB of weights "
            f"and the KV cache: {error}, or choose more or larger devices"
        ) from None


def engine_hardware(plan: ServingPlan, name: str, config: EngineConfig) -> PipelineSpec | None:
    """Return model and devices of an engine; None if the simulator's table does not have them.

    Raises:
        PlanError: The stages and the model do not fit each other.
    """
    shape = MODELS.get(plan.model)
    devices: list[str] = []
    for stage in plan.engines[name].stages:
        names = {plan.nodes[stage.node].devices[index] for index in stage.devices}
        if len(names) != 1 or not names <= DEVICES.keys():
            return None
        devices += names
    if shape is None:
        return None
    weight_bytes = config.emulation.emulated_bytes_per_weight
    if weight_bytes is not None:
        shape = replace(shape, bytes_per_weight=weight_bytes)
    try:
        return build_hardware(
            plan.model,
            ",".join(devices),
            len(devices),
            degrees=config.stage_degrees,
            layers=[stage.layers for stage in plan.engines[name].stages],
            shape=shape,
        )
    except ValueError as error:
        raise PlanError(f"engines.{name}: {error}") from None


def count_kv_tokens(
    config: EngineConfig, hardware: PipelineSpec, leaves_activations: bool = True
) -> int:
    """Return the tokens for whose KV entries every device of an engine has space; 0 if none has.

    Args:
        config: Share of the memory, and scheduler options.
        hardware: Model and devices.
        leaves_activations: Leave space for an estimate of the activations, which a started engine
            measures, and the simulator does not count.
    """
    share, scheduler = config.gpu_memory_utilization, config.scheduler
    return _count_kv_tokens(scheduler, hardware, share, leaves_activations)


def _count_kv_tokens(
    config: SchedulerConfig, hardware: PipelineSpec, share: float, leaves_activations: bool = True
) -> int:
    size = config.block_size
    scheduler = config.resolve(len(hardware.stages), 1, 1)
    blocks: list[float] = []
    for index, count in enumerate(hardware.stage_kv_blocks(size, share)):
        shard = hardware.model.shard(hardware.stages[index].tp)
        used = activation_bytes(shard, scheduler) if leaves_activations else 0
        blocks.append(count - used / hardware.rank_block_bytes(index, size))
    return max(0, floor(min(blocks))) * size


def activation_bytes(shard: ModelShape, scheduler: SchedulerConfig) -> int:
    """Return an estimate of the bytes of a rank's activations in its largest micro-batch.

    Args:
        shard: The model as the rank sees it.
        scheduler: Resolved options.
    """
    tokens = scheduler.max_num_batched_tokens
    assert tokens is not None, "the options are resolved"
    # Residual and input of a layer, and the operator with the widest input and output.
    attention = (shard.heads + 2 * shard.kv_heads) * shard.head_dim + shard.hidden
    width = 2 * shard.hidden + max(attention, 3 * shard.mlp)
    logits = scheduler.max_num_seqs * shard.vocabulary * BYTES_PER_LOGIT
    return tokens * width * BYTES_PER_ELEMENT + logits
