"""How a model's layers are cut into contiguous stages.

Owns the costs and the cut. Knows nothing of devices: all stages are taken to be equally fast.
"""

import math
from collections.abc import Sequence

from gllm.models.spec import ModelSpec

Cut = tuple[float, tuple[int, ...]]
"""What a cut costs, and the end of each part."""


def split_layers(model: ModelSpec, stages: int, layers: Sequence[int] | None = None) -> list[range]:
    """The layers of each stage: as many as `layers` says, else balanced by cost.

    Raises ValueError where the model has fewer layers than stages, or `layers` does not add up.
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
    """Cost of each layer in weights read per decode step, its neighbours' share included.

    The embedding looks up one row per token, which is next to nothing; the LM head reads
    vocabulary * hidden weights and weighs on the last layer.
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
    """Items in each of `stages` contiguous non-empty parts, the costliest part as cheap as can be.

    Among the best cuts the one with the least sum of squared part costs, so that the other parts
    are alike too. Dynamic programming over (stages, items); O(stages * items^2).
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    ceiling = _cut(sums, stages, math.inf, worst=True)[0]
    # The ceiling is a sum of the very same differences, so comparing floats is exact.
    ends = _cut(sums, stages, ceiling, worst=False)[1]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _cut(sums: Sequence[float], stages: int, ceiling: float, worst: bool) -> Cut:
    """Least worst part, or least sum of squares under a ceiling, with the ends of the parts."""
    items = len(sums) - 1
    best: list[Cut] = [(math.inf, ())] * (items + 1)
    best[0] = (0.0, ())
    for _ in range(stages):
        following: list[Cut] = [(math.inf, ())] * (items + 1)
        for end in range(1, items + 1):
            for begin in range(end):
                part = sums[end] - sums[begin]
                value, ends = best[begin]
                value = max(value, part) if worst else value + part * part
                if part <= ceiling and value < following[end][0]:
                    following[end] = (value, (*ends, end))
        best = following
    return best[-1]
