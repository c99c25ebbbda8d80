"""Network links of a plan as shared resources: the bytes that each request sends over each of them.

A machine has one way out and one way in for each class of link between machines, and all flows of
the plan share them: activations between stages on different machines, and KV transfers. All classes
together are limited by the machine's fastest one, which is its network card. Between machines the
network itself is not limited. Within a machine each device has a way out and a way in, which the
activations and KV transfers of its stage share; all-reduces are part of the times of the stages.
"""

from collections.abc import Iterator
from typing import NamedTuple

from gllm.plan.hetero.costs import layer_overlaps
from gllm.plan.hetero.replicas import Phase, Replica, ReplicaPlanner
from gllm.plan.layout import Stages
from gllm.plan.nodes import DeviceCluster
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.hardware.shapes import BYTES_PER_ELEMENT, ModelShape

SATURATED_SHARE = 1 - 1e-6
"""Utilization from which a link counts as saturated."""


class LinkDirection(NamedTuple):
    """One direction of a link that flows share: of a machine, or of the devices of a stage."""

    node: int
    """Index of the machine in the cluster."""
    is_up: bool
    """True for bytes that leave the machine or the devices."""
    bandwidth: float
    """Bytes per second."""
    engine: str = ""
    """Engine whose devices have the link; empty for a link of the machine."""
    stage: int = -1
    """Stage of that engine; -1 for a link of the machine."""

    @property
    def is_of_machine(self) -> bool:
        """True for a link between machines."""
        return not self.engine


LinkBytes = dict[LinkDirection, float]
"""Bytes per request by link; those of a stage are per device."""


def machines_of(replica: Replica) -> set[int]:
    """Return the indices of the machines on which a replica has a stage."""
    return {node for stage in replica.stages for node in stage.devices}


class RequestTraffic:
    """Bytes that a request of mean lengths sends over each link of a cluster.

    Args:
        cluster: Machines and network links.
        shape: Sizes of the model.
        prompt: Mean prompt length in tokens.
        output: Mean output length in tokens.
    """

    def __init__(
        self, cluster: DeviceCluster, shape: ModelShape, prompt: float, output: float
    ) -> None:
        self._cluster = cluster
        self.kv_bytes = prompt * shape.kv_bytes * shape.layers
        """KV cache of a request's prompt in bytes, over all layers."""
        token_bytes = shape.hidden * BYTES_PER_ELEMENT
        self._activations = {
            Phase.PREFILL: prompt * token_bytes,
            Phase.DECODE: output * token_bytes,
            Phase.MIXED: (prompt + output) * token_bytes,
        }
        """Bytes that a request sends from each stage to the next one."""
        nodes = range(len(cluster.nodes))
        self._fastest = [
            max(
                (cluster.link(node, other).bandwidth for other in nodes if other != node), default=0
            )
            for node in nodes
        ]
        """Bandwidth of each machine's fastest link to another one."""
        self._overlaps: dict[tuple[Stages, Stages], list[tuple[int, int, int]]] = {}

    def network_bandwidth(self, node: int) -> float:
        """Return the bytes per second that a machine sends at most, and receives at most."""
        return self._fastest[node]

    def activations(self, name: str, replica: Replica) -> LinkBytes:
        """Return the bytes per request that the stages of an engine send to each other."""
        links: LinkBytes = {}
        for index in range(len(replica.stages) - 1):
            for link, share in self.hop_shares(name, replica, index).items():
                links[link] = links.get(link, 0.0) + share * self._activations[replica.phase]
        return links

    def hop_shares(self, name: str, replica: Replica, index: int) -> LinkBytes:
        """Return the share of the activations of a stage for the next one that each link carries.

        Args:
            name: Name of the engine.
            replica: The engine.
            index: Index of the sending stage.
        """
        links: LinkBytes = {}
        ends = (name, index, replica), (name, index + 1, replica)
        self._add(links, *ends, 1.0, is_sharded=False)
        return links

    def kv_shares(
        self, prefill_name: str, prefill: Replica, decode_name: str, decode: Replica
    ) -> LinkBytes:
        """Return the share of the KV cache that each link between two engines carries."""
        key = prefill.stages, decode.stages
        if key not in self._overlaps:
            self._overlaps[key] = layer_overlaps(*key)
        num_layers = sum(stage.layers for stage in prefill.stages)
        links: LinkBytes = {}
        for source, target, count in self._overlaps[key]:
            ends = (prefill_name, source, prefill), (decode_name, target, decode)
            self._add(links, *ends, count / num_layers, is_sharded=True)
        return links

    def _add(
        self,
        links: LinkBytes,
        source: tuple[str, int, Replica],
        target: tuple[str, int, Replica],
        size: float,
        is_sharded: bool,
    ) -> None:
        """Add bytes that a stage sends to another one; KV cache is divided among the ranks."""
        (source_name, i, sender), (target_name, j, receiver) = source, target
        a, b = sender.stages[i].devices, receiver.stages[j].devices
        link = self._cluster.link(a[0], b[0])
        if a[0] == b[0]:
            for name, stage, devices, is_up in (
                (source_name, i, a, True),
                (target_name, j, b, False),
            ):
                way = LinkDirection(a[0], is_up, link.bandwidth, name, stage)
                links[way] = links.get(way, 0.0) + size / (len(devices) if is_sharded else 1)
            return
        for way in self._ways(a[0], b[0], link):
            links[way] = links.get(way, 0.0) + size

    def _ways(self, source: int, target: int, link: NetworkLink) -> Iterator[LinkDirection]:
        """Yield the links that bytes from one machine to another occupy."""
        for node, is_up in ((source, True), (target, False)):
            for bandwidth in {link.bandwidth, self._fastest[node]}:
                yield LinkDirection(node, is_up, bandwidth)


def make_traffic(planner: ReplicaPlanner) -> RequestTraffic:
    """Return the traffic of the requests for which a planner chooses replicas."""
    lengths = planner.costs.lengths
    return RequestTraffic(planner.cluster, planner.shape, lengths.prompt, lengths.output)
