"""Distribution of the stages over nodes, at the start and after the loss of a node.

The first stage has the driver, so it is always on the head's node. The stages of a node are
neighbours, so that activations cross the network as seldom as possible.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import msgspec

from gllm.recovery.partition import StageCosts, StageMemory, partition_layers


class NodeShape(msgspec.Struct, frozen=True):
    """Layers, number of ranks and node of each pipeline stage."""

    layers: list[tuple[int, int]]
    """First layer of each stage and first layer after it."""
    degrees: list[int]
    """Number of ranks of each stage."""
    nodes: list[str]
    """Name of the node of each stage."""


@dataclass(frozen=True)
class NodeMemory:
    """Memory that the layers take, and memory limits of nodes and stages, in bytes."""

    needs: StageCosts
    """Weights, and keys and values of the longest sequence."""
    node_limits: dict[str, float] = field(default_factory=dict)
    """Memory of each node for all stages that it computes on the CPU; a missing node has no
    limit."""
    stage_limits: list[float] = field(default_factory=list)
    """Memory of the GPUs of each stage, infinity on the CPU; empty without limits."""


def distribute_stages(
    degrees: Sequence[int], num_nodes: int, stages_per_node: Sequence[int] = ()
) -> list[int]:
    """Assign pipeline stages to nodes: contiguous stages, and equal worker counts if possible.

    The largest number of workers per node is as small as possible; among such distributions the sum
    of squared numbers is. Ties are broken in favour of more stages on earlier nodes.

    Args:
        degrees: number of ranks of each stage.
        num_nodes: number of nodes; each gets at least one stage.
        stages_per_node: number of stages of each node; empty to distribute them evenly.

    Returns:
        The index of the node of each stage.

    Raises:
        ValueError: there are fewer stages than nodes, or `stages_per_node` does not fit.
    """
    num_stages = len(degrees)
    if stages_per_node:
        if len(stages_per_node) != num_nodes or sum(stages_per_node) != num_stages:
            raise ValueError(
                f"stages_per_node {','.join(map(str, stages_per_node))} has to be one number for "
                f"each of {num_nodes} nodes (--nnodes) that sum up to {num_stages} stages (--pp)"
            )
        return [node for node, size in enumerate(stages_per_node) for _ in range(size)]
    if num_stages < num_nodes:
        raise ValueError(
            f"{num_stages} pipeline stages cannot be distributed over {num_nodes} nodes, because "
            f"each node needs a stage: set --pp to {num_nodes} or more, or --nnodes to "
            f"{num_stages} or less"
        )
    # The cut of the reversed list, because partition_layers gives later parts more in a tie.
    costs = StageCosts(tuple(map(float, reversed(degrees))))
    parts = partition_layers([costs] * num_nodes)
    sizes = [len(part) for part in reversed(parts)]
    return [node for node, size in enumerate(sizes) for _ in range(size)]


def repartition_layers(
    shape: NodeShape,
    survivors: Sequence[str],
    costs: Sequence[StageCosts],
    memory: NodeMemory,
) -> NodeShape | None:
    """Return the stages after the loss of nodes: the remaining stages take over all layers.

    The stages that are left keep their ranks and nodes. The slowest stage is as fast as possible.

    Args:
        shape: stages before the loss.
        survivors: names of the nodes that are left.
        costs: time of each layer on each stage of `shape`.
        memory: limits of the nodes and of each stage of `shape`.

    Returns:
        The stages; None if the layers do not fit into the memory of the nodes that are left, or no
        stage is left on one.
    """
    kept = [stage for stage, node in enumerate(shape.nodes) if node in survivors]
    if not kept or kept[0] != 0:
        return None
    nodes = [shape.nodes[stage] for stage in kept]
    degrees = [shape.degrees[stage] for stage in kept]
    limits = memory.stage_limits and [memory.stage_limits[stage] for stage in kept]
    memory = replace(memory, stage_limits=limits)
    return _cut(nodes, degrees, [costs[stage] for stage in kept], memory)


def extend_layers(
    shape: NodeShape,
    nodes: Sequence[str],
    degrees: Sequence[int],
    costs: Sequence[StageCosts],
    memory: NodeMemory,
) -> NodeShape | None:
    """Return the stages after adding new ones on further nodes; all layers are divided again.

    The slowest stage is as fast as possible.

    Args:
        shape: present stages.
        nodes: node of each new stage.
        degrees: number of ranks of each new stage.
        costs: time of each layer on each stage, the new ones last.
        memory: limits of the nodes and of each stage, the new ones last.

    Returns:
        The stages; None if there are too few layers, or they do not fit.
    """
    return _cut([*shape.nodes, *nodes], [*shape.degrees, *degrees], costs, memory)


def fit_layers(
    shape: NodeShape, layer_counts: Sequence[int], memory: NodeMemory
) -> NodeShape | None:
    """Return a shape with other numbers of layers per stage.

    Args:
        shape: the stages.
        layer_counts: number of layers of each stage.
        memory: limits of the nodes and of each stage.

    Returns:
        The stages; None if their number differs, or the layers do not fit into the memory.
    """
    ends = list(accumulate(layer_counts))
    if len(ends) != len(shape.nodes):
        return None
    layers = [range(end - count, end) for end, count in zip(ends, layer_counts, strict=True)]
    limits = memory.stage_limits or [math.inf] * len(layers)
    sizes = [memory.needs.cost_of(part.start, part.stop) for part in layers]
    is_small = all(size <= limit for size, limit in zip(sizes, limits, strict=True))
    if not is_small or not _fits(layers, shape.nodes, memory):
        return None
    return NodeShape([(part.start, part.stop) for part in layers], shape.degrees, shape.nodes)


def _cut(
    nodes: list[str], degrees: list[int], costs: Sequence[StageCosts], memory: NodeMemory
) -> NodeShape | None:
    """Return stages that have all layers; None if these do not fit."""
    limits = memory.stage_limits or [math.inf] * len(nodes)
    stages = [StageMemory(memory.needs, limit) for limit in limits]
    try:
        layers = partition_layers(costs, stages)
        if not _fits(layers, nodes, memory):
            layers = _cut_by_node(nodes, costs, stages, memory.node_limits)
    except ValueError:
        return None
    if not _fits(layers, nodes, memory):
        return None
    return NodeShape([(part.start, part.stop) for part in layers], degrees, nodes)


def _fits(layers: Sequence[range], nodes: Sequence[str], memory: NodeMemory) -> bool:
    """Return True if the stages of each node fit into its memory together."""
    used = dict.fromkeys(nodes, 0.0)
    for part, node in zip(layers, nodes, strict=True):
        used[node] += memory.needs.cost_of(part.start, part.stop)
    return all(used[node] <= memory.node_limits.get(node, math.inf) for node in used)


def _cut_by_node(
    nodes: Sequence[str],
    costs: Sequence[StageCosts],
    memory: Sequence[StageMemory],
    node_limits: Mapping[str, float],
) -> list[range]:
    """Return the layers of each stage, cut over the nodes first and then within each node.

    So the layers fit into the memory of the nodes if that is possible, although the slowest stage
    may be slower than necessary.

    Args:
        nodes: name of the node of each stage; the stages of a node are neighbours.
        costs: of the layers on each stage.
        memory: of each stage.
        node_limits: bytes that all stages of a node may take together.

    Raises:
        ValueError: the layers do not fit.
    """
    groups = [[i for i, own in enumerate(nodes) if own == node] for node in dict.fromkeys(nodes)]
    needs = memory[0].needs
    node_costs = [costs[group[0]].scale(1 / len(group)) for group in groups]
    limits = [
        min(
            node_limits.get(nodes[group[0]], math.inf),
            sum(memory[stage].limit_bytes for stage in group),
        )
        for group in groups
    ]
    layers: list[range] = []
    node_memory = [StageMemory(needs, limit) for limit in limits]
    parts = partition_layers(node_costs, node_memory, [len(group) for group in groups])
    for group, part in zip(groups, parts, strict=True):
        within = partition_layers(
            [_part_of(costs[stage], part) for stage in group],
            [StageMemory(_part_of(needs, part), memory[stage].limit_bytes) for stage in group],
        )
        layers += [range(part.start + own.start, part.start + own.stop) for own in within]
    return layers


def _part_of(costs: StageCosts, layers: range) -> StageCosts:
    """Return the costs of some layers as those of a model that has no others."""
    is_first, is_last = layers.start == 0, layers.stop == len(costs.layers)
    return StageCosts(
        costs.layers[layers.start : layers.stop],
        costs.embedding if is_first else 0.0,
        costs.head if is_last else 0.0,
        costs.step,
        min(costs.num_joint_layers, len(layers)) if is_last else 1,
        frozenset(index - layers.start for index in costs.joined_layers if index in layers),
    )


def match_stages(old: Sequence[str], new: Sequence[str]) -> dict[int, int]:
    """Return the new index of each stage that stays on its node when the stages change.

    The first stage of a node remains its first one, and so on.

    Args:
        old: node of each stage before.
        new: node of each stage after.
    """
    after = {key: stage for stage, key in enumerate(_stage_keys(new))}
    keys = enumerate(_stage_keys(old))
    return {stage: after[key] for stage, key in keys if key in after}


def _stage_keys(nodes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the node of each stage, and the index of the stage among those of the node."""
    counts: Counter[str] = Counter()
    for node in nodes:
        yield node, counts[node]
        counts[node] += 1
