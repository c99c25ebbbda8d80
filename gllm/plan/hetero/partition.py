"""First partition of the devices: spectral clustering by bandwidth, balanced by memory.

Source: HexGen-2 (arXiv 2502.07903), section 4.1. Devices with fast links between them form a group,
groups with fast links between them take different phases.
"""

from itertools import product
from typing import TYPE_CHECKING, Any

from gllm.plan.hetero.evaluation import Partition, make_partition
from gllm.plan.hetero.replicas import Phase, ReplicaPlanner
from gllm.plan.hetero.workload import MeanLengths
from gllm.plan.nodes import DeviceCluster, Group
from gllm.sim.hardware.shapes import ModelShape

if TYPE_CHECKING:
    import numpy

KV_REQUESTS = 32
"""Requests for whose KV cache each group has memory, beside the weights."""
IMBALANCE_WEIGHT = 4.0
"""Weight of the squared deviation of the groups' memory beside the share of bandwidth cut."""
MAX_BRUTE_FORCE = 12
"""Groups up to which all divisions into phases are compared."""


def count_groups(
    cluster: DeviceCluster, shape: ModelShape, lengths: MeanLengths, devices: Group | None = None
) -> int:
    """Return the number of device groups with which the search begins, at least 2.

    The total memory is divided by that of the weights plus the KV cache of KV_REQUESTS requests.

    Args:
        cluster: Devices and their memory.
        shape: Sizes of the model.
        lengths: Mean prompt and output lengths of the workload.
        devices: Devices to divide; default: all.
    """
    devices = devices or cluster.all_devices
    weights = shape.parameters * shape.bytes_per_weight
    kv = KV_REQUESTS * lengths.total * shape.layers * shape.kv_bytes
    return max(2, min(sum(devices), int(cluster.memory(devices) // (weights + kv))))


def first_partition(planner: ReplicaPlanner, devices: Group | None = None) -> Partition:
    """Return the initial partition of the search: groups of devices, each for prefill or decode.

    Args:
        planner: Has the cluster and predicts capacities.
        devices: Devices to divide; default: all of the cluster.
    """
    cluster = planner.cluster
    devices = devices or cluster.all_devices
    num_groups = count_groups(cluster, planner.shape, planner.costs.lengths, devices)
    groups = divide_devices(cluster, num_groups, devices)
    phases = choose_phases(planner, groups)
    return make_partition(zip(phases, groups, strict=True))


def divide_devices(
    cluster: DeviceCluster, num_groups: int, devices: Group | None = None
) -> list[Group]:
    """Divide devices into groups with fast links inside and similar total memory.

    Uses spectral clustering by bandwidth, then swaps and moves of devices.

    Args:
        cluster: Devices and network links.
        num_groups: Number of groups.
        devices: Devices to divide; default: all.
    """
    import numpy

    devices = devices or cluster.all_devices
    machines = [index for index, count in enumerate(devices) for _ in range(count)]
    affinity = numpy.array(
        [[cluster.link(a, b).bandwidth for b in machines] for a in machines], dtype=float
    )
    numpy.fill_diagonal(affinity, 0.0)
    labels = _cluster(affinity / affinity.max(), num_groups)
    memory = numpy.array([cluster.nodes[machine].spec.memory for machine in machines])
    labels = balance_groups(affinity, memory, labels, num_groups)
    groups = [[0] * len(cluster.nodes) for _ in range(num_groups)]
    for machine, label in zip(machines, labels, strict=True):
        groups[label][machine] += 1
    return [tuple(group) for group in groups if any(group)]


def _cluster(affinity: "numpy.ndarray[Any, Any]", num_groups: int) -> list[int]:
    """Return the group of each device by spectral clustering.

    The leading eigenvectors of the normalized affinity, rotated to the axes by a pivoted QR
    decomposition (Damle, Minden, Ying, "Simple, direct and efficient multi-way spectral
    clustering", 2019); scikit-learn has the same, but takes longer to import than a search does.
    """
    import numpy
    from scipy.linalg import qr, svd

    if num_groups >= len(affinity):
        return list(range(len(affinity)))
    scale = 1 / numpy.sqrt(numpy.maximum(affinity.sum(axis=1), 1e-30))
    _, vectors = numpy.linalg.eigh(affinity * scale[:, None] * scale[None, :])
    leading = vectors[:, -num_groups:]
    *_, pivots = qr(leading.T, pivoting=True)
    left, _, right = svd(leading[pivots[:num_groups]].T)
    return [int(label) for label in abs(leading @ (left @ right)).argmax(axis=1)]


def balance_groups(
    affinity: "numpy.ndarray[Any, Any]",
    memory: "numpy.ndarray[Any, Any]",
    labels: list[int],
    num_groups: int,
) -> list[int]:
    """Improve a division of devices into groups by swaps and moves (Kernighan and Lin).

    Each step makes the swap of two devices, or the move of one device, that most reduces a sum: the
    share of the bandwidth between groups, plus the weighted deviation of the groups' memory from
    the mean.

    Args:
        affinity: Bandwidth of each pair of devices, [devices, devices]; 0 on the diagonal.
        memory: Bytes of each device.
        labels: Group index of each device.
        num_groups: Number of groups.

    Returns:
        New group index of each device.
    """
    import numpy

    weights = affinity / max(affinity.sum() / 2, 1e-30)
    share = memory * num_groups / memory.sum()
    current = numpy.array(labels)
    for _ in range(4 * len(labels)):
        member = numpy.eye(num_groups)[current]
        inner = weights @ member
        loads = share @ member
        move = _move_gains(inner, loads, share, current)
        swap = _swap_gains(weights, inner, loads, share, current)
        if max(move.max(), swap.max()) <= 1e-12:
            break
        if move.max() >= swap.max():
            device, group = numpy.unravel_index(move.argmax(), move.shape)
            current[device] = group
        else:
            a, b = numpy.unravel_index(swap.argmax(), swap.shape)
            current[a], current[b] = current[b], current[a]
    return [int(label) for label in current]


def _move_gains(inner: Any, loads: Any, share: Any, current: Any) -> Any:
    """Return the gain of moving each device to each group, [devices, groups]."""
    own = inner[range(len(current)), current][:, None]
    before = (loads[current][:, None] - 1) ** 2 + (loads[None, :] - 1) ** 2
    after = (loads[current][:, None] - share[:, None] - 1) ** 2
    after = after + (loads[None, :] + share[:, None] - 1) ** 2
    gains = inner - own + IMBALANCE_WEIGHT * (before - after) / len(loads)
    gains[range(len(current)), current] = 0.0
    return gains


def _swap_gains(weights: Any, inner: Any, loads: Any, share: Any, current: Any) -> Any:
    """Return the gain of swapping each pair of devices, [devices, devices]."""
    gain = inner[:, current] - inner[range(len(current)), current][:, None]
    cut = gain + gain.T - 2 * weights
    change = share[None, :] - share[:, None]
    own, other = loads[current][:, None], loads[current][None, :]
    before = (own - 1) ** 2 + (other - 1) ** 2
    after = (own + change - 1) ** 2 + (other - change - 1) ** 2
    gains = cut + IMBALANCE_WEIGHT * (before - after) / len(loads)
    gains[current[:, None] == current[None, :]] = 0.0
    return gains


def choose_phases(planner: ReplicaPlanner, groups: list[Group]) -> list[Phase]:
    """Choose prefill or decode for each group of devices.

    Maximizes the bandwidth between prefill and decode groups, then the capacity of the smaller
    phase. Compares all assignments for up to MAX_BRUTE_FORCE groups; for more, changes of one group
    at a time improve an initial assignment.
    """
    cluster, num_groups = planner.cluster, len(groups)
    weights = [
        [_cross_bandwidth(cluster, a, b) if i != j else 0.0 for j, b in enumerate(groups)]
        for i, a in enumerate(groups)
    ]

    def value(phases: tuple[bool, ...]) -> tuple[float, float]:
        cut = sum(
            weights[i][j] for i in range(num_groups) for j in range(i) if phases[i] != phases[j]
        )
        return round(cut / 1e6), _scarce_capacity(planner, groups, phases)

    if num_groups <= MAX_BRUTE_FORCE:
        best = max(product((True, False), repeat=num_groups), key=value)
    else:
        best = tuple(index % 2 == 0 for index in range(num_groups))
        while True:
            flips = [
                (*best[:index], not best[index], *best[index + 1 :]) for index in range(num_groups)
            ]
            flipped = max(flips, key=value)
            if value(flipped) <= value(best):
                break
            best = flipped
    return [Phase.PREFILL if is_prefill else Phase.DECODE for is_prefill in best]


def _cross_bandwidth(cluster: DeviceCluster, a: Group, b: Group) -> float:
    return sum(
        count_a * count_b * cluster.link(i, j).bandwidth
        for i, count_a in enumerate(a)
        if count_a
        for j, count_b in enumerate(b)
        if count_b
    )


def _scarce_capacity(
    planner: ReplicaPlanner, groups: list[Group], phases: tuple[bool, ...]
) -> float:
    totals = {Phase.PREFILL: 0.0, Phase.DECODE: 0.0}
    for group, is_prefill in zip(groups, phases, strict=True):
        phase = Phase.PREFILL if is_prefill else Phase.DECODE
        replica = planner.best(group, phase)
        totals[phase] += replica.capacity if replica else 0.0
    return min(totals.values())
