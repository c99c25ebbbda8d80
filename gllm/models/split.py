"""Partition of a model's layers into contiguous pipeline stages, which are assumed equally fast."""

import math
from collections.abc import Sequence

from gllm.models.spec import ModelSpec

Partition = tuple[float, tuple[int, ...]]
"""Objective value of a partition, and the end of each part."""


def split_layers(model: ModelSpec, stages: int, layers: Sequence[int] | None = None) -> list[range]:
    """Return the layers of each stage.

    Args:
        model: the model.
        stages: number of stages.
        layers: number of layers of each stage; None to balance their costs.

    Raises:
        ValueError: the model has fewer layers than stages, or `layers` does not fit it.
    """
    total = model.num_layers
    if layers is None:
        if stages > total:
            raise ValueError(
                f"pipeline_parallel_size is {stages}, but the model has only {total} layers: "
                "use fewer stages"
            )
        layers = balance_costs(layer_costs(model), stages)
    if sum(layers) != total or len(layers) != stages or min(layers) < 1:
        raise ValueError(
            f"layers {','.join(map(str, layers))} has to give each of the {stages} stages at "
            f"least one layer and to add up to the model's {total}, but adds up to {sum(layers)}"
        )
    ends = [sum(layers[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, layers, strict=True)]


def layer_costs(model: ModelSpec) -> list[float]:
    """Return the cost of each layer: the number of weights read per decoded token.

    The first layer's includes the embedding, which reads one row; the last layer's includes the LM
    head, which reads vocabulary * hidden weights.
    """
    hidden = model.hidden_size
    costs = [
        float(layer.attention.weights_per_token(hidden) + layer.mlp.weights_per_token(hidden))
        for layer in model.layers
    ]
    costs[0] += hidden
    costs[-1] += model.vocab_size * hidden
    return costs


def balance_costs(costs: Sequence[float], stages: int) -> list[int]:
    """Return the sizes of contiguous non-empty parts that minimize the cost of the costliest part.

    Ties are broken by the sum of squared costs, so that the other parts are balanced too. Dynamic
    programming over (stages, items): O(stages * items^2).

    Args:
        costs: of each item.
        stages: number of parts.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    ceiling = _partition(sums, stages, math.inf, minimize_max=True)[0]
    # The ceiling is a sum of the very same differences, so comparing floats is exact.
    ends = _partition(sums, stages, ceiling, minimize_max=False)[1]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _partition(sums: Sequence[float], stages: int, ceiling: float, minimize_max: bool) -> Partition:
    """Return the best partition whose parts cost at most `ceiling`.

    Args:
        sums: cumulative costs, from 0 on.
        stages: number of parts.
        ceiling: largest cost of a part.
        minimize_max: whether to minimize the largest cost instead of the sum of squares.
    """
    items = len(sums) - 1
    best: list[Partition] = [(math.inf, ())] * (items + 1)
    best[0] = (0.0, ())
    for _ in range(stages):
        following: list[Partition] = [(math.inf, ())] * (items + 1)
        for end in range(1, items + 1):
            for begin in range(end):
                part = sums[end] - sums[begin]
                value, ends = best[begin]
                value = max(value, part) if minimize_max else value + part * part
                if part <= ceiling and value < following[end][0]:
                    following[end] = (value, (*ends, end))
        best = following
    return best[-1]
