"""Placements of prefill and decode engines: DistServe's Algorithms 1 and 2, without a simulator.

Algorithm 1 chooses the engine of each phase for itself, for clusters whose network between nodes is
fast. Algorithm 2 chooses units: as many pipeline stages of both phases on every node, so that
stages with the same layers share a node and KV caches stay within it.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), section 4.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from gllm.plan.layout import Parallelism, PlannedStage, Stages
from gllm.plan.nodes import DeviceCluster, equal_nodes

PHASES = ("prefill", "decode")
ROUNDING = 1e-9
"""Relative tolerance of a rate that engines serve exactly."""


class PlacementUnit(NamedTuple):
    """A prefill engine and a decode engine whose stages with the same layers share a node.

    KV transfers between the two stay within a node.
    """

    prefill: Parallelism
    decode: Parallelism
    num_nodes: int
    """Number of nodes over which both engines are spread."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs."""
        return self.prefill.num_gpus + self.decode.num_gpus

    @property
    def gpus_per_node(self) -> int:
        """GPUs on each of its nodes."""
        return self.num_gpus // self.num_nodes

    def stage_node(self, engine: Parallelism, stage: int) -> int:
        """Return the node of a stage, counted from the first node of the unit."""
        return stage * self.num_nodes // engine.pp

    def __str__(self) -> str:
        return f"{self.prefill}, {self.decode}"


@dataclass(frozen=True)
class PhaseGoodput:
    """Parallelism of a prefill or decode engine, and its goodput in requests per second.

    Goodput is the highest request rate within the SLO.
    """

    parallelism: Parallelism
    rate: float
    """Requests per second of one engine."""

    @property
    def per_gpu(self) -> float:
        """Requests per second per GPU."""
        return self.rate / self.parallelism.num_gpus


def engine_choices(cluster: DeviceCluster, heads: int, layers: int) -> Iterator[Parallelism]:
    """Yield the tensor- and pipeline-parallel degrees of engines that fit a cluster of equal nodes.

    All ranks of a stage are on one node. The tensor-parallel degree divides the number of attention
    heads, the pipeline-parallel degree the number of layers, as in DistServe's artifact.

    Args:
        cluster: Nodes with equal numbers of devices.
        heads: Attention heads of the model.
        layers: Layers of the model.
    """
    for tp in range(1, cluster.devices_per_node + 1):
        stages_per_node = cluster.devices_per_node // tp
        for pp in range(1, len(cluster.nodes) * stages_per_node + 1):
            if heads % tp == 0 and layers % pp == 0:
                yield Parallelism(tp, pp)


def unit_choices(cluster: DeviceCluster, heads: int, layers: int) -> Iterator[PlacementUnit]:
    """Yield pairs of prefill and decode engines that fit equal nodes and share them stage by stage.

    Pairs on few nodes come first.

    Args:
        cluster: Nodes with equal numbers of devices.
        heads: Attention heads of the model.
        layers: Layers of the model.
    """
    segments = list(engine_choices(equal_nodes(1, cluster.devices_per_node), heads, 0))
    for num_nodes in range(1, len(cluster.nodes) + 1):
        fitting = [engine for engine in segments if layers % (num_nodes * engine.pp) == 0]
        for prefill in fitting:
            for decode in fitting:
                if prefill.num_gpus + decode.num_gpus <= cluster.devices_per_node:
                    yield PlacementUnit(
                        Parallelism(prefill.tp, num_nodes * prefill.pp),
                        Parallelism(decode.tp, num_nodes * decode.pp),
                        num_nodes,
                    )


def count_engines(rate: float, goodput: float) -> int:
    """Return the number of engines that serve a request rate, at least 1.

    Args:
        rate: Requests per second of the service.
        goodput: Requests per second that one engine serves within its SLO.

    Raises:
        ValueError: The goodput is not above 0.
    """
    if goodput <= 0:
        raise ValueError(f"goodput is {goodput}: no number of engines serves a rate")
    return max(1, ceil(rate / goodput * (1 - ROUNDING)))


def count_for_cluster(
    num_gpus: int,
    prefill: PhaseGoodput,
    decode: PhaseGoodput,
    fits: Callable[[int, int], bool] = lambda num_prefill, num_decode: True,
) -> tuple[int, int]:
    """Return how many prefill and decode engines give the highest request rate on a number of GPUs.

    Among combinations with equal rates, the one with the fewest GPUs is returned.

    Args:
        num_gpus: Number of GPUs of the cluster.
        prefill: GPUs and request rate of one prefill engine.
        decode: GPUs and request rate of one decode engine.
        fits: Returns True if the nodes hold so many prefill and decode engines. GPUs that are free
            on different nodes may be enough in number, but not for a stage of several ranks.

    Raises:
        ValueError: There are too few GPUs for one engine of each phase.
    """
    sizes = prefill.parallelism.num_gpus, decode.parallelism.num_gpus
    combinations = []
    for num_prefill in range(1, (num_gpus - sizes[1]) // sizes[0] + 1):
        for num_decode in range(1, (num_gpus - num_prefill * sizes[0]) // sizes[1] + 1):
            rate = min(num_prefill * prefill.rate, num_decode * decode.rate)
            used = num_prefill * sizes[0] + num_decode * sizes[1]
            combinations.append((rate, -used, num_prefill, num_decode))
    for _, _, *counts in sorted(combinations, reverse=True):
        if fits(*counts):
            return counts[0], counts[1]
    raise ValueError(
        f"{num_gpus} GPUs do not hold a prefill engine of {sizes[0]} and a decode engine of "
        f"{sizes[1]}: add nodes"
    )


def place_units(
    cluster: DeviceCluster, unit: PlacementUnit, count: int, num_layers: int
) -> list[tuple[Stages, Stages]]:
    """Assign copies of a prefill/decode engine pair to nodes, and return the stages of each.

    Stages with the same layers are on one node. Groups of `unit.num_nodes` nodes are filled one
    after another.

    Args:
        cluster: Nodes with equal numbers of devices.
        unit: Parallelism of both engines and the number of nodes of a pair.
        count: Number of pairs.
        num_layers: Layers of the model.

    Returns:
        (stages of the prefill engine, stages of the decode engine) of each pair.

    Raises:
        ValueError: The pairs do not fit the nodes.
    """
    per_group = cluster.devices_per_node // unit.gpus_per_node
    if count > per_group * (len(cluster.nodes) // unit.num_nodes):
        raise ValueError(
            f"{len(cluster.nodes)} nodes of {cluster.devices_per_node} GPUs do not hold {count} "
            f"units of {unit}: add nodes"
        )

    def place(first: int, engine: Parallelism) -> Stages:
        return tuple(
            PlannedStage((first + unit.stage_node(engine, stage),) * engine.tp, layers)
            for stage, layers in enumerate(engine.split_layers(num_layers))
        )

    firsts = [index // per_group * unit.num_nodes for index in range(count)]
    return [(place(first, unit.prefill), place(first, unit.decode)) for first in firsts]
