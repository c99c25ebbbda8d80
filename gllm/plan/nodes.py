"""Nodes that a service may use: their devices, and the links within and between them.

Devices of one node are alike and interchangeable, so a group of devices is the number that it has
of each node.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import msgspec

from gllm.sim.hardware.devices import DEVICES, GBIT_BYTES, DeviceSpec, NetworkLink
from gllm.sim.hardware.stages import look_up

CORE = ""
"""Device of a node that is this machine, whose cores serve: one for each stage."""
DEVICES_PER_NODE = 8
"""Devices of each node where no nodes are given."""
Group = tuple[int, ...]
"""Number of devices of each node."""


class DeviceNode(NamedTuple):
    """A machine with a number of equal devices, its address, and the link between its devices."""

    name: str
    device: str
    """A name of DEVICES, or CORE."""
    num_devices: int
    inner_link: NetworkLink | None = None
    """Link between two devices of the node; None: unknown."""
    host: str = ""
    """Address under which the other nodes reach it; empty: its name."""
    price: float | None = None
    """US dollars per hour of the whole node; None: that of its devices."""

    @property
    def spec(self) -> DeviceSpec:
        """Data sheet of one of the devices."""
        return DEVICES[self.device]


@dataclass(frozen=True)
class DeviceCluster:
    """Nodes from which a planner chooses, and the network links between them."""

    nodes: tuple[DeviceNode, ...]
    """Nodes with different names."""
    network: NetworkLink | None = None
    """Link between two devices of different nodes; None: unknown."""
    between: Mapping[tuple[int, int], NetworkLink] = field(default_factory=dict)
    """Links that differ from `network`, by (smaller node index, larger node index)."""

    @property
    def all_devices(self) -> Group:
        """Number of devices of each node."""
        return tuple(node.num_devices for node in self.nodes)

    @property
    def num_devices(self) -> int:
        """Number of devices of the cluster."""
        return sum(self.all_devices)

    @property
    def devices_per_node(self) -> int:
        """Number of devices of the smallest node."""
        return min(self.all_devices)

    def link(self, a: int, b: int) -> NetworkLink:
        """Return the link between a device of node `a` and a device of node `b`."""
        if a == b:
            link = self.nodes[a].inner_link
        else:
            link = self.between.get((min(a, b), max(a, b)), self.network)
        assert link is not None, "the links of the cluster are known"
        return link

    def memory(self, group: Group) -> float:
        """Return the memory in bytes of a group: a number of devices of each node."""
        pairs = zip(group, self.nodes, strict=True)
        return sum(count * node.spec.memory for count, node in pairs)

    def describe(self, group: Group) -> str:
        """Return a group of devices as text, such as `2 H100 + 1 L40`."""
        counts: dict[str, int] = {}
        for count, node in zip(group, self.nodes, strict=True):
            if count:
                counts[node.device] = counts.get(node.device, 0) + count
        return " + ".join(f"{count} {device}" for device, count in counts.items())


def with_inner_link(cluster: DeviceCluster, link: NetworkLink | None) -> DeviceCluster:
    """Return a cluster whose nodes have a link between their devices, unless theirs is known."""
    nodes = (node._replace(inner_link=node.inner_link or link) for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


NO_NODES = DeviceCluster(())
"""DeviceCluster without nodes, where a plan has as many as it needs."""


def equal_nodes(count: int, devices_per_node: int, device: str = "A100-80G") -> DeviceCluster:
    """Return a cluster of `count` nodes with equal devices; its network links are unknown."""
    return DeviceCluster(
        tuple(DeviceNode(f"node-{index}", device, devices_per_node) for index in range(count))
    )


def assume_nodes(device: str, num_devices: int) -> DeviceCluster:
    """Return an assumed cluster with this many devices, for plans without given nodes.

    Args:
        device: Name of the devices; nodes have 8 of them each. CORE: the cores of this machine.
        num_devices: Number of devices.
    """
    if device == CORE:
        return DeviceCluster((DeviceNode("local", CORE, num_devices, host="127.0.0.1"),))
    counts = (
        min(DEVICES_PER_NODE, num_devices - first)
        for first in range(0, num_devices, DEVICES_PER_NODE)
    )
    nodes = [DeviceNode(f"node-{i}", device, count) for i, count in enumerate(counts)]
    return DeviceCluster(tuple(nodes))


def parse_nodes(text: str) -> DeviceCluster:
    """Parse a list of nodes NAME=HOST:COUNTxDEVICE and return them as a cluster.

    Args:
        text: Nodes, such as `a=10.0.0.1:8xH100,b=10.0.0.2:4xA100-80G`.

    Raises:
        ValueError: A node has another form, an unknown device, or a name that occurs twice.
    """
    nodes: dict[str, DeviceNode] = {}
    for part in text.split(","):
        name, _, address = part.strip().partition("=")
        host, _, devices = address.rpartition(":")
        count, _, device = devices.partition("x")
        is_count = count.isascii() and count.isdigit() and int(count) > 0
        if not (name and host and is_count and name not in nodes and device in DEVICES):
            raise ValueError(
                f"--nodes {text}: {part!r} has to be NAME=HOST:COUNTxDEVICE, each name once, with "
                f"a device of {', '.join(DEVICES)}, as in a=10.0.0.1:8xH100"
            )
        nodes[name] = DeviceNode(name, device, int(count), host=host)
    return DeviceCluster(tuple(nodes.values()))


def read_data(name: str) -> str:
    """Return the text of a data file of the package `gllm.plan`, by its file name."""
    return (files("gllm.plan") / "data" / name).read_text(encoding="utf-8")


class LinkFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of a link class in a YAML cluster file: bandwidth and latency."""

    gbit: float
    """Gbit/s in one direction."""
    us: float
    """Latency in microseconds."""

    def build(self) -> NetworkLink:
        """Return the link in bytes per second and seconds."""
        return NetworkLink(self.gbit * GBIT_BYTES, self.us * 1e-6)


class MachineFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of a machine in a YAML cluster file: devices, link between them and address."""

    device: str
    """Name of the devices."""
    count: int
    """Number of devices."""
    link: str
    """Name of the link class between its devices."""
    host: str = ""
    """Address under which the other machines reach it, for the plan; empty: the machine's name."""


class ClusterFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of a YAML cluster file: link classes, machines, and the network between machines."""

    links: dict[str, LinkFields]
    machines: dict[str, MachineFields]
    network: str
    """Name of the link class between machines."""
    between: dict[str, str] = {}
    """Name of a link class that differs from `network`, by two machine names as in `a-b`."""


class MachineClassFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of a machine class in the file of the predefined clusters: device, link and size."""

    device: str
    link: str
    most: int
    """Largest number of devices per machine."""


class ShippedClusters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of the YAML file with the predefined clusters that are part of the package."""

    links: dict[str, LinkFields]
    machine_classes: dict[str, MachineClassFields]
    network: str
    clusters: dict[str, dict[str, int]]
    """Number of devices by machine class, by name of the cluster."""


@cache
def _shipped() -> ShippedClusters:
    return msgspec.yaml.decode(read_data("hexgen2_clusters.yaml"), type=ShippedClusters)


def cluster_names() -> list[str]:
    """Return the names of the predefined clusters that are part of the package."""
    return list(_shipped().clusters)


def named_cluster(name: str) -> DeviceCluster:
    """Return a predefined cluster by name. Raises ValueError, which lists the names."""
    return build_cluster(look_up("cluster", name, _shipped().clusters))


def build_cluster(counts: Mapping[str, int]) -> DeviceCluster:
    """Return a cluster with given numbers of devices, on machines of the predefined classes.

    Args:
        counts: Number of devices by machine class; they are divided among as few machines as
            possible.

    Raises:
        ValueError: A machine class is unknown.
    """
    shipped, machines = _shipped(), []
    for name, count in counts.items():
        kind = look_up("machine class", name, shipped.machine_classes)
        num_machines = -(-count // kind.most)
        for index in range(num_machines):
            share = count // num_machines + (index < count % num_machines)
            label = name if num_machines == 1 else f"{name}-{index}"
            link = shipped.links[kind.link].build()
            machines.append(DeviceNode(label, kind.device, share, link))
    return DeviceCluster(tuple(machines), shipped.links[shipped.network].build())


def read_cluster(path: Path) -> DeviceCluster:
    """Read a YAML cluster file and return its nodes and links.

    Raises:
        ValueError: A field is unknown, has a wrong type or value, or refers to an unknown name.
        OSError: The file cannot be read.
    """
    try:
        fields = msgspec.yaml.decode(path.read_bytes(), type=ClusterFields)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, link in fields.links.items():
        if not (link.gbit > 0 and link.us >= 0):
            raise ValueError(f"{path}: links.{name}: gbit must be above 0 and us at least 0")
    machines = []
    for name, machine in fields.machines.items():
        look_up(f"{path}: machines.{name}.device", machine.device, DEVICES)
        kind = look_up(f"{path}: machines.{name}.link", machine.link, fields.links)
        if machine.count < 1:
            raise ValueError(f"{path}: machines.{name}.count: {machine.count} is below 1")
        machines.append(DeviceNode(name, machine.device, machine.count, kind.build(), machine.host))
    if not machines:
        raise ValueError(f"{path}: machines: empty: add one at least")
    network = look_up(f"{path}: network", fields.network, fields.links).build()
    return DeviceCluster(tuple(machines), network, _read_pairs(path, fields))


def _read_pairs(path: Path, fields: ClusterFields) -> dict[tuple[int, int], NetworkLink]:
    names = list(fields.machines)
    pairs = {f"{a}-{b}": (names.index(a), names.index(b)) for a in names for b in names if a != b}
    links = {}
    for name, kind in fields.between.items():
        a, b = look_up(f"{path}: between", name, pairs)
        links[min(a, b), max(a, b)] = look_up(f"{path}: between.{name}", kind, fields.links).build()
    return links
