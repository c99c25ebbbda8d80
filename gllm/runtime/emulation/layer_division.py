"""Division of the layers among unlike emulated devices, by the times that the roofline predicts."""

from collections.abc import Sequence

from gllm.config.engine import EngineConfig
from gllm.models.spec.model import ModelSpec
from gllm.options.field_types import FieldError
from gllm.recovery.partition import StageCosts, StageMemory, partition_layers
from gllm.runtime.emulation.deployment import build_emulated_hardware
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.roofline import DeviceEfficiency, LayerRoofline
from gllm.sim.hardware.shapes import ModelShape
from gllm.sim.hardware.stages import StageSpec

DECODE = StageWork(0, 16, (), 16, 16 * 256, 16)
CHUNK = StageWork(1, 512, ((0, 512),), 0, 0, 1)
TYPICAL_WORKS = ((DECODE, 8), (CHUNK, 1))
"""Micro-batches that are balanced, with their numbers: those of the probe of real devices."""


def divide_by_predictions(
    config: EngineConfig, model: ModelSpec, max_model_len: int
) -> list[range] | None:
    """Return the layers of each stage of which the slowest is as fast as possible.

    Args:
        config: configuration of an engine with an emulated device.
        model: specification of the model.
        max_model_len: longest sequence in tokens, whose keys and values each stage has space for.

    Returns:
        None if the layers are configured, all stages are alike, or their times are measured ones.

    Raises:
        FieldError: devices or links are unknown, or no division fits their memory.
    """
    if config.layers != "auto" or config.emulation.emulated_profile is not None:
        return None
    hardware = build_emulated_hardware(config, model)
    shape, stages = hardware.model, hardware.stages
    if len({(stage.device, stage.tp, stage.rank_link) for stage in stages}) == 1:
        return None
    block_size = config.scheduler.block_size
    num_tokens = -(-max_model_len // block_size) * block_size
    costs = [_predict_costs(shape, stage) for stage in stages]
    memory = [
        StageMemory(
            _count_bytes(shape.shard(stage.tp), num_tokens),
            stage.device.memory * config.gpu_memory_utilization,
        )
        for stage in stages
    ]
    try:
        return partition_layers(costs, memory)
    except ValueError as error:
        raise FieldError(
            "device",
            f"device {config.device}: {error}, with keys and values of one sequence of "
            f"max_model_len {max_model_len}: raise --pp or --tp, or lower --max-model-len",
        ) from error


def _predict_costs(shape: ModelShape, stage: StageSpec) -> StageCosts:
    """Return the seconds of each layer, and of the ends of the model, on the devices of a stage."""
    efficiency = DeviceEfficiency()
    roofline = LayerRoofline(shape, stage, efficiency)

    def layer_seconds(is_sparse: bool) -> float:
        return sum(n * roofline.total_seconds(work, is_sparse) for work, n in TYPICAL_WORKS)

    seconds = {is_sparse: layer_seconds(is_sparse) for is_sparse in _kinds(shape)}
    return StageCosts(
        tuple(seconds[is_sparse] for is_sparse in _kinds(shape)),
        sum(n * roofline.sum_seconds(work) for work, n in TYPICAL_WORKS),
        sum(
            n * (roofline.head_seconds(work) + roofline.gather_seconds(work))
            for work, n in TYPICAL_WORKS
        ),
        sum(n * efficiency.stage_overhead for _, n in TYPICAL_WORKS),
    )


def _count_bytes(shard: ModelShape, num_tokens: int) -> StageCosts:
    """Return the bytes of weights, and of keys and values of a sequence, on a rank."""
    sequence = shard.kv_bytes * num_tokens
    layers = (shard.weights_of_layers(layer, 1) for layer in range(shard.layers))
    return StageCosts(
        tuple(weights * shard.bytes_per_weight + sequence for weights in layers),
        (shard.head_weights + shard.positions * shard.hidden) * shard.bytes_per_weight,
        shard.head_weights * shard.bytes_per_weight,
    )


def _kinds(shape: ModelShape) -> Sequence[bool]:
    """Return for each layer True if it has experts."""
    return [layer >= shape.num_dense_layers for layer in range(shape.layers)]
