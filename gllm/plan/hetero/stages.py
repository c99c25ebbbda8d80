"""Ways to run a group of unlike devices as one pipeline: stages, their ranks and their layers."""

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import floor
from typing import NamedTuple

from gllm.plan.hetero.cluster import DeviceCluster, Group

MAX_DEGREE = 8
"""Largest number of tensor-parallel ranks per stage."""
MAX_ORDERED_BLOCKS = 4
"""Machines of a group up to which every order of the machines is tried."""


class PlannedStage(NamedTuple):
    """One pipeline stage."""

    devices: tuple[int, ...]
    """Machine of each rank's device."""
    layers: int


Stages = tuple[PlannedStage, ...]


def stage_layouts(
    cluster: DeviceCluster, group: Group, num_layers: int, num_heads: int
) -> list[Stages]:
    """Return the ways to cut a group into stages; a stage's ranks divide the heads.

    The ranks of a stage are on one machine, as gllm runs them: of one number in all stages, or up
    to a number, the remainder of each machine as smaller stages. Layers are divided by memory.

    Args:
        cluster: Devices and links.
        group: Devices of the replica.
        num_layers: Layers of the model.
        num_heads: Attention heads of the model.
    """
    layouts: dict[Stages, None] = {}
    for order in _machine_orders(cluster, group):
        for cut in _cuts(order, group, num_heads):
            if len(cut) <= num_layers:
                layers = split_by_memory(cluster, cut, num_layers)
                stages = (PlannedStage(*pair) for pair in zip(cut, layers, strict=True))
                layouts[tuple(stages)] = None
    return list(layouts)


def split_by_memory(
    cluster: DeviceCluster, cut: Sequence[tuple[int, ...]], num_layers: int
) -> list[int]:
    """Return the layers of each stage in proportion to its memory, at least one.

    The ranks of a stage hold equal shares, so the smallest memory among them counts for all.
    """
    by_devices = {
        devices: len(devices) * min(cluster.machines[each].spec.memory for each in set(devices))
        for devices in set(cut)
    }
    memory = [by_devices[devices] for devices in cut]
    total = sum(memory)
    shares = [num_layers * each / total for each in memory]
    layers = [max(1, floor(share)) for share in shares]
    by_rest = sorted(range(len(cut)), key=lambda stage: layers[stage] - shares[stage])
    while (missing := num_layers - sum(layers)) != 0:
        if missing > 0:
            for stage in by_rest[:missing]:
                layers[stage] += 1
        else:
            layers[layers.index(max(layers))] -= 1
    return layers


def _machine_orders(cluster: DeviceCluster, group: Group) -> Iterator[tuple[int, ...]]:
    """Yield orders of the group's machines along the pipeline."""
    machines = [index for index, count in enumerate(group) if count]
    if len(machines) > MAX_ORDERED_BLOCKS or _links_alike(cluster, machines):
        # With equal links the order changes nothing but which machine holds which layers.
        yield tuple(machines)
        return
    yield from (order for order in permutations(machines) if order[0] <= order[-1])


def _links_alike(cluster: DeviceCluster, machines: Sequence[int]) -> bool:
    links = {cluster.link(a, b) for a in machines for b in machines if a < b}
    return len(links) < 2


def _cuts(
    order: Sequence[int], group: Group, num_heads: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    for degree in range(1, min(MAX_DEGREE, max(group)) + 1):
        if num_heads % degree:
            continue
        stages: list[tuple[int, ...]] = []
        for machine in order:
            stages += _cut_machine(machine, group[machine], degree, num_heads)
        yield tuple(stages)


def _cut_machine(machine: int, count: int, degree: int, num_heads: int) -> list[tuple[int, ...]]:
    """Return stages within a machine: as many ranks as `degree` allows, then the remainder."""
    stages = []
    while count:
        ranks = min(degree, count)
        while num_heads % ranks:
            ranks -= 1
        stages.append((machine,) * ranks)
        count -= ranks
    return stages
