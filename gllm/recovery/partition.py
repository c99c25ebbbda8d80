"""Exact partition of layers into contiguous stages of different speed and memory.

The cut with the fastest slowest stage, by dynamic programming, without knowledge of models.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Partition = tuple[float, tuple[int, ...]]
"""Objective value of a partition, and the end of each part."""
PartCost = Callable[[int, int, int], float]
"""Cost of (stage, first layer, layer after the last); infinity for a part that is not possible."""


@dataclass(frozen=True)
class StageCosts:
    """Cost of each layer on a pipeline stage, in a unit that all stages share, such as seconds."""

    layers: tuple[float, ...]
    """Cost of each layer of the model."""
    embedding: float = 0.0
    """Cost of the embedding, added on the first stage."""
    head: float = 0.0
    """Cost of the LM head, added on the last stage."""
    step: float = 0.0
    """Cost of a step that does not depend on the layers, added on every stage."""
    num_joint_layers: int = 1
    """Least number of layers of the last stage: these cannot be divided."""
    joined_layers: frozenset[int] = frozenset()
    """Layers that are on the stage of the layer before them."""

    def cost_of(self, begin: int, end: int) -> float:
        """Return the cost of the layers from `begin` up to `end`, not included, as one stage."""
        cost = self.step + sum(self.layers[begin:end])
        if begin == 0:
            cost += self.embedding
        if end == len(self.layers):
            cost += self.head
        return cost

    def scale(self, factor: float) -> "StageCosts":
        """Return the costs of a stage that is slower by a factor."""
        return replace(
            self,
            layers=tuple(cost * factor for cost in self.layers),
            embedding=self.embedding * factor,
            head=self.head * factor,
            step=self.step * factor,
        )


@dataclass(frozen=True)
class StageMemory:
    """Memory that each layer takes on one pipeline stage, and the stage's limit, in bytes."""

    needs: StageCosts
    """Bytes of weights, and of the KV cache that the stage needs at least."""
    limit_bytes: float = math.inf


def partition_layers(
    costs: Sequence[StageCosts],
    memory: Sequence[StageMemory] | None = None,
    min_layers: Sequence[int] | None = None,
) -> list[range]:
    """Divide the layers into contiguous stages so that the slowest stage is as fast as possible.

    The minimum is exact over all divisions into non-empty stages that fit the memory. Ties are
    broken by the sum of squared costs, so that the other stages are balanced too. Dynamic
    programming over (stages, layers): O(stages * layers^2).

    Args:
        costs: cost of each layer on each stage.
        memory: memory of each layer, and limit, on each stage; None without limits.
        min_layers: least number of layers of each stage; None for one.

    Returns:
        The layers of each stage.

    Raises:
        ValueError: no division gives each stage its layers and fits the memory.
    """
    stages, num_layers = len(costs), len(costs[0].layers)
    table = [_tabulate(cost) for cost in costs]
    needs = [_tabulate(stage.needs) for stage in memory or ()]
    limits = [stage.limit_bytes for stage in memory or ()]

    def cost_of(stage: int, begin: int, end: int) -> float:
        if end == num_layers and end - begin < costs[stage].num_joint_layers:
            return math.inf
        if begin in costs[stage].joined_layers:
            return math.inf
        if min_layers and end - begin < min_layers[stage]:
            return math.inf
        if memory and needs[stage](begin, end) > limits[stage]:
            return math.inf
        return table[stage](begin, end)

    ceiling = _partition(cost_of, num_layers, stages, math.inf, minimize_max=True)[0]
    if math.isinf(ceiling):
        reason = "" if stages > num_layers else " that fits the stages' memory"
        if (joint := costs[-1].num_joint_layers) > 1:
            reason = f", of which the last {joint} are on one stage{reason}"
        if joined := costs[-1].joined_layers:
            reason = f", of which {num_layers - len(joined)} can begin a stage{reason}"
        raise ValueError(f"there is no cut of {num_layers} layers into {stages} stages{reason}")
    # The ceiling is one of the very same costs, so comparing floats is exact.
    ends = _partition(cost_of, num_layers, stages, ceiling, minimize_max=False)[1]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def slowest_cost(costs: Sequence[StageCosts], cut: Sequence[range]) -> float:
    """Return the cost of the slowest stage, given the layers of each stage.

    Args:
        costs: cost of each layer on each stage.
        cut: layers of each stage.
    """
    return max(
        stage_costs.cost_of(part.start, part.stop)
        for stage_costs, part in zip(costs, cut, strict=True)
    )


def _tabulate(costs: StageCosts) -> Callable[[int, int], float]:
    """Return a function that computes `cost_of` from cumulative costs."""
    sums = [0.0]
    for cost in costs.layers:
        sums.append(sums[-1] + cost)
    last = len(costs.layers)

    def cost_of(begin: int, end: int) -> float:
        cost = costs.step + (sums[end] - sums[begin])
        if begin == 0:
            cost += costs.embedding
        return cost + costs.head if end == last else cost

    return cost_of


def _partition(
    cost_of: PartCost, num_layers: int, stages: int, ceiling: float, minimize_max: bool
) -> Partition:
    """Return the best partition whose parts cost at most `ceiling`.

    Args:
        cost_of: cost of a part.
        num_layers: of the model.
        stages: number of parts.
        ceiling: largest cost of a part.
        minimize_max: whether to minimize the largest cost instead of the sum of squares.
    """
    best: list[Partition] = [(math.inf, ())] * (num_layers + 1)
    best[0] = (0.0, ())
    for stage in range(stages):
        following: list[Partition] = [(math.inf, ())] * (num_layers + 1)
        # Each later stage gets a layer at least.
        for end in range(stage + 1, num_layers - (stages - stage - 1) + 1):
            for begin in range(stage, end):
                value, ends = best[begin]
                if math.isinf(value):
                    continue
                part = cost_of(stage, begin, end)
                value = max(value, part) if minimize_max else value + part * part
                if part <= ceiling and value < following[end][0]:
                    following[end] = (value, (*ends, end))
        best = following
    return best[-1]
