"""Partition of a model's layers into contiguous pipeline stages, which are assumed equally fast.

`gllm.recovery.partition` has the partition for stages of different speed.
"""

from collections.abc import Sequence

from gllm.models.spec.model import ModelSpec
from gllm.recovery.partition import StageCosts, partition_layers


def split_layers(model: ModelSpec, stages: int, layers: Sequence[int] | None = None) -> list[range]:
    """Divide a model's layers among pipeline stages; return the layer indices of each stage.

    Args:
        model: the model.
        stages: number of stages.
        layers: number of layers of each stage; None to balance their costs.

    Raises:
        ValueError: the model has fewer layers than stages, `layers` does not add up to them, or
            layers that share keys and values would be divided.
    """
    total, joint = model.num_layers, model.num_joint_layers
    if layers is None:
        if stages > total:
            raise ValueError(
                f"pipeline_parallel_size is {stages}, but the model has only {total} layers: "
                "use fewer stages"
            )
        if stages > total - joint + 1:
            raise ValueError(
                f"pipeline_parallel_size is {stages}, but the model's last {joint} layers share "
                f"keys and values, so they are on one stage: use at most {total - joint + 1}"
            )
        return partition_layers([layer_costs(model)] * stages)
    if sum(layers) != total or len(layers) != stages or min(layers) < 1:
        raise ValueError(
            f"layers {','.join(map(str, layers))} has to give each of the {stages} stages at "
            f"least one layer and to add up to the model's {total}, but adds up to {sum(layers)}"
        )
    if layers[-1] < joint:
        raise ValueError(
            f"layers {','.join(map(str, layers))} has to give the last stage at least {joint} "
            "layers, because they share keys and values"
        )
    ends = [sum(layers[: stage + 1]) for stage in range(stages)]
    if joined := model.joined_layers.intersection(ends):
        raise ValueError(
            f"layers {','.join(map(str, layers))} begins a stage at layer {min(joined)}, which "
            "attends to the keys that the layer before it selects: begin stages at layers with an "
            f"indexer, such as {_nearest_border(model, min(joined))}"
        )
    return [range(end - count, end) for end, count in zip(ends, layers, strict=True)]


def _nearest_border(model: ModelSpec, layer: int) -> int:
    """Return the last layer before `layer` at which a stage can begin."""
    return max(index for index in range(layer) if index not in model.joined_layers)


def layer_costs(model: ModelSpec) -> StageCosts:
    """Return the cost of each layer, the embedding and the LM head, to balance pipeline stages.

    The cost is the number of weights read per decoded token: one row of the embedding, and
    vocabulary * hidden weights of the LM head.
    """
    hidden = model.hidden_size
    layers = tuple(float(layer.weights_per_token(hidden)) for layer in model.layers)
    head = float(model.vocab_size * hidden)
    return StageCosts(
        layers,
        float(hidden),
        head,
        num_joint_layers=model.num_joint_layers,
        joined_layers=model.joined_layers,
    )
