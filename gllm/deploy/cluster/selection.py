"""Selection of the nodes of a service: which ones, in which order, and which one is the head.

Pure: without clock and I/O. Source: the MoLink platform's placement. Nodes with several GPUs come
first, for tensor parallelism; pipeline neighbours are chosen by the latency and the bandwidth of
their link; equal devices share the layers evenly, others by measured speed; the head is the node
with the best CPU and network.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

REFERENCE_BYTES = 2**20
"""Bytes of the message by whose time two links are compared: 73 tokens of 14 KiB, so that latency
decides between fast links, and bandwidth between slow ones."""
MAX_EXACT_NODES = 10
"""Most nodes for which the best order is found exactly."""
MAX_SUBSETS = 20_000
"""Most subsets of equally suitable nodes that are compared."""


class SelectionError(ValueError):
    """Raised if too few nodes suit an engine; the message has a reason for each node."""


@dataclass(frozen=True)
class NodeCandidate:
    """Hardware, CPU load and reachability of a free node that may run part of an engine."""

    name: str
    devices: tuple[str, ...] = ()
    """Names of the GPUs; empty for a node that computes on its CPU."""
    num_cores: int = 1
    memory_bytes: int = 0
    """Available memory of the host."""
    cpu_utilization: float = 0.0
    """Share of the cores in use, 0 to 1."""
    is_reachable: bool = True
    """True if other nodes can connect to it; else it only dials."""

    @property
    def speed_kind(self) -> tuple[tuple[str, ...], int]:
        """Kind of hardware: the GPUs, or the number of cores of a node without GPUs."""
        return tuple(sorted(self.devices)), 0 if self.devices else self.num_cores

    @property
    def idle_cores(self) -> float:
        """Number of cores that are not in use."""
        return self.num_cores * (1.0 - min(1.0, max(0.0, self.cpu_utilization)))


@dataclass(frozen=True)
class NodeRequirements:
    """Nodes that an engine requires: their number, GPUs and memory of each, or their names."""

    num_nodes: int = 1
    gpus_per_node: int = 0
    """GPUs that each node needs and uses; 0 for the largest power of two that it has."""
    memory_bytes_per_node: int = 0
    names: tuple[str, ...] = ()
    """Nodes to use; empty for any."""


@dataclass(frozen=True)
class NodeSelection:
    """Nodes chosen for an engine, with the tensor parallel size of the stage on each."""

    nodes: tuple[str, ...]
    """In the order of the pipeline stages, the head first."""
    degrees: tuple[int, ...]
    """Tensor-parallel ranks of each node's stage."""
    layers: str
    """`even` for nodes of equal hardware; `auto` to divide the layers by measured speeds."""


class LinkQuality(NamedTuple):
    """Measured round trip and bandwidth between two nodes; None for an unmeasured value."""

    round_trip_seconds: float | None = None
    bytes_per_second: float | None = None


class NetworkView:
    """Estimates of message times between nodes, from measured round trips and bandwidths."""

    def __init__(
        self,
        round_trips: Mapping[str, float] | None = None,
        links: Mapping[frozenset[str], LinkQuality] | None = None,
    ) -> None:
        """Create the view.

        Args:
            round_trips: seconds between the master and each node. Two nodes whose link was never
                measured are taken to be as far from each other as over the master.
            links: measured links, by the names of both nodes. A link without a measured bandwidth
                has the median of the others.
        """
        self._round_trips = dict(round_trips or {})
        self._links = dict(links or {})
        known = sorted(
            link.bytes_per_second for link in self._links.values() if link.bytes_per_second
        )
        self._usual_rate = known[len(known) // 2] if known else math.inf
        self._usual_trip = max(self._round_trips.values(), default=0.0)

    def message_seconds(self, first: str, second: str) -> float:
        """Return the seconds of a message of REFERENCE_BYTES between two nodes."""
        link = self._links.get(frozenset((first, second)), LinkQuality())
        trip = link.round_trip_seconds
        if trip is None:
            trip = self._master_trip(first) + self._master_trip(second)
        return trip / 2 + REFERENCE_BYTES / (link.bytes_per_second or self._usual_rate)

    def _master_trip(self, name: str) -> float:
        return self._round_trips.get(name, self._usual_trip)


def select_nodes(
    candidates: Iterable[NodeCandidate], requirements: NodeRequirements, network: NetworkView
) -> NodeSelection:
    """Choose the nodes of a multi-node engine and the order of its pipeline stages.

    Args:
        candidates: nodes that run no process of an engine.
        requirements: number of nodes, GPUs and memory that the engine requires.
        network: estimated message times between the nodes.

    Raises:
        SelectionError: too few nodes are suitable, or none of them can be the head.
    """
    candidates = sorted(candidates, key=lambda node: node.name)
    fitting = _find_fitting(candidates, requirements)
    chosen = _choose_members(fitting, requirements.num_nodes, network)
    head = choose_head(chosen, network)
    others = [node for node in chosen if node is not head]
    order = [head, *_order_stages(head, others, network)]
    blocked = [
        f"{left.name} and {right.name}"
        for left, right in pairwise(order)
        if not (left.is_reachable or right.is_reachable)
    ]
    if blocked:
        raise SelectionError(
            f"the nodes {', '.join(blocked)} would be neighbours, but neither accepts connections "
            "(--data-port 0): let more nodes accept them"
        )
    return NodeSelection(
        tuple(node.name for node in order),
        tuple(_degree(node, requirements.gpus_per_node) for node in order),
        "even" if len({node.speed_kind for node in order}) == 1 else "auto",
    )


def choose_head(nodes: Sequence[NodeCandidate], network: NetworkView) -> NodeCandidate:
    """Return the node with the best CPU and network, for the engine's API server and scheduler.

    Nodes are ranked by idle cores and by message time to all others; the least sum of both ranks
    wins, then the better network, then the name.

    Args:
        nodes: nodes chosen for the engine.
        network: estimated message times between the nodes.

    Raises:
        SelectionError: no node accepts connections, which the head of several nodes has to.
    """
    able = [node for node in nodes if node.is_reachable or len(nodes) == 1]
    if not able:
        raise SelectionError(
            "no node of the service accepts connections (--data-port 0), but the head has to"
        )

    def distance(node: NodeCandidate) -> float:
        return math.fsum(
            network.message_seconds(node.name, other.name) for other in nodes if other is not node
        )

    cores = sorted({node.idle_cores for node in able}, reverse=True)
    distances = sorted({distance(node) for node in able})

    def rank(node: NodeCandidate) -> tuple[int, int, str]:
        network_place = distances.index(distance(node))
        return cores.index(node.idle_cores) + network_place, network_place, node.name

    return min(able, key=rank)


def _find_fitting(
    candidates: Sequence[NodeCandidate], requirements: NodeRequirements
) -> list[NodeCandidate]:
    """Return the candidates that meet the requirements. Raises SelectionError for too few."""
    reasons = {node.name: _unsuitable_reason(node, requirements) for node in candidates}
    if requirements.names:
        for name in requirements.names:
            reason = reasons.get(name, "it is not free")
            if reason:
                raise SelectionError(f"node {name} cannot be used: {reason}")
        return [node for node in candidates if node.name in requirements.names]
    fitting = [node for node in candidates if not reasons[node.name]]
    if len(fitting) < requirements.num_nodes:
        unsuitable = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        raise SelectionError(
            f"{requirements.num_nodes} nodes are needed, but {len(fitting)} of the "
            f"{len(candidates)} free ones fit" + (f" ({unsuitable})" if unsuitable else "")
        )
    return fitting


def _unsuitable_reason(node: NodeCandidate, requirements: NodeRequirements) -> str:
    """Return the requirement that a node does not meet; empty for none."""
    if len(node.devices) < requirements.gpus_per_node:
        return f"it has {len(node.devices)} GPUs of {requirements.gpus_per_node}"
    if node.memory_bytes < requirements.memory_bytes_per_node:
        return (
            f"it has {node.memory_bytes / 2**30:.1f} GiB of "
            f"{requirements.memory_bytes_per_node / 2**30:.1f} GiB of memory"
        )
    return ""


def _choose_members(
    fitting: Sequence[NodeCandidate], num_nodes: int, network: NetworkView
) -> list[NodeCandidate]:
    """Return the nodes with the most GPUs; among nodes with equally many the closest ones."""
    chosen: list[NodeCandidate] = []
    for num_gpus in sorted({len(node.devices) for node in fitting}, reverse=True):
        group = [node for node in fitting if len(node.devices) == num_gpus]
        num_missing = num_nodes - len(chosen)
        chosen += _closest(chosen, group, min(num_missing, len(group)), network)
    return chosen


def _closest(
    chosen: Sequence[NodeCandidate],
    group: Sequence[NodeCandidate],
    number: int,
    network: NetworkView,
) -> list[NodeCandidate]:
    """Return some nodes of a group such that they and the chosen ones are close to each other."""
    if number in (0, len(group)):
        return list(group[:number])
    if math.comb(len(group), number) <= MAX_SUBSETS:
        return list(
            min(
                combinations(group, number),
                key=lambda part: (
                    not any(node.is_reachable for node in (*chosen, *part)),
                    _spread([*chosen, *part], network),
                    -math.fsum(node.idle_cores for node in part),
                ),
            )
        )
    part: list[NodeCandidate] = []
    for _ in range(number):
        rest = [node for node in group if node not in part]
        part.append(min(rest, key=lambda node: _spread([*chosen, *part, node], network)))
    return part


def _spread(nodes: Sequence[NodeCandidate], network: NetworkView) -> float:
    """Return the sum of the message times of all pairs."""
    return math.fsum(
        network.message_seconds(left.name, right.name) for left, right in combinations(nodes, 2)
    )


def _order_stages(
    head: NodeCandidate, others: Collection[NodeCandidate], network: NetworkView
) -> list[NodeCandidate]:
    """Return the other nodes in the order in which the path from the head is fastest."""

    def hop(left: NodeCandidate, right: NodeCandidate) -> float:
        # Two nodes that only dial cannot be neighbours.
        if not (left.is_reachable or right.is_reachable):
            return 1e9
        return network.message_seconds(left.name, right.name)

    rest = list(others)
    if len(rest) > MAX_EXACT_NODES:
        return _improve_order(head, rest, hop)
    # Held and Karp: the best path to each last node over each set of nodes.
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {
        (1 << i, i): (hop(head, node), (i,)) for i, node in enumerate(rest)
    }
    for _ in rest[1:]:
        longer: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (visited, last), (seconds, path) in best.items():
            for i, node in enumerate(rest):
                if visited >> i & 1:
                    continue
                key, entry = (visited | 1 << i, i), (seconds + hop(rest[last], node), (*path, i))
                if key not in longer or entry < longer[key]:
                    longer[key] = entry
        best = longer
    return [rest[i] for i in min(best.values(), default=(0.0, ()))[1]]


def _improve_order(
    head: NodeCandidate,
    rest: list[NodeCandidate],
    hop: Callable[[NodeCandidate, NodeCandidate], float],
) -> list[NodeCandidate]:
    """Return an order found by nearest neighbours and then by reversing parts of the path."""
    path, left = [head], list(rest)
    while left:
        nearest = min(left, key=lambda node: hop(path[-1], node))
        left.remove(nearest)
        path.append(nearest)

    def length(nodes: Sequence[NodeCandidate]) -> float:
        return math.fsum(hop(a, b) for a, b in pairwise(nodes))

    improved = True
    while improved:
        improved = False
        for begin, end in combinations(range(1, len(path) + 1), 2):
            other = [*path[:begin], *reversed(path[begin:end]), *path[end:]]
            if length(other) < length(path) - 1e-12:
                path, improved = other, True
    return path[1:]


def _degree(node: NodeCandidate, gpus_per_node: int) -> int:
    """Return the tensor-parallel ranks of a node: as required, else the GPUs as a power of two."""
    return gpus_per_node or 1 << max(0, len(node.devices).bit_length() - 1)
