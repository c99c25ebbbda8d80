"""Clusters of unlike devices: machines, the devices of each, and the links between them.

Devices of one machine are alike and interchangeable, so a group of devices is the number that it
has of each machine.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from gllm.plan.data_files import read_data
from gllm.plan.prices import PRICE_TABLES
from gllm.sim.hardware.devices import DEVICES, DeviceSpec, NetworkLink
from gllm.sim.hardware.stages import look_up

Group = tuple[int, ...]
"""Number of devices of each machine."""
GBIT_BYTES = 1e9 / 8
"""Bytes per gigabit."""


class MachineDevices(NamedTuple):
    """Devices of one machine."""

    name: str
    device: str
    """Name in the table of devices."""
    num_devices: int
    link: NetworkLink
    """Between two of its devices."""
    host: str = ""
    """Address under which the other machines reach it; empty: unknown."""

    @property
    def spec(self) -> DeviceSpec:
        """Return the data sheet of each device."""
        return DEVICES[self.device]


class DeviceCluster:
    """Machines and the links between them.

    Args:
        machines: The machines, with different names.
        network: Link between two devices of different machines.
        between: Links of pairs of machines that differ from `network`, by both indices.
    """

    def __init__(
        self,
        machines: Sequence[MachineDevices],
        network: NetworkLink,
        between: Mapping[tuple[int, int], NetworkLink] | None = None,
    ) -> None:
        self.machines = tuple(machines)
        self.network = network
        self._between = {tuple(sorted(pair)): link for pair, link in (between or {}).items()}

    @property
    def all_devices(self) -> Group:
        """Return the group of all devices."""
        return tuple(machine.num_devices for machine in self.machines)

    @property
    def num_devices(self) -> int:
        """Return the number of devices."""
        return sum(self.all_devices)

    def link(self, a: int, b: int) -> NetworkLink:
        """Return the link between a device of machine `a` and another one of machine `b`."""
        if a == b:
            return self.machines[a].link
        return self._between.get((min(a, b), max(a, b)), self.network)

    def memory(self, group: Group) -> float:
        """Return the bytes of memory of a group."""
        pairs = zip(group, self.machines, strict=True)
        return sum(count * machine.spec.memory for count, machine in pairs)

    def price(self, table: str = "hexgen-2") -> float:
        """Return the US dollars per hour of all devices.

        Args:
            table: A name of PRICE_TABLES.

        Raises:
            ValueError: The table is unknown, or has no price of a device.
        """
        prices = look_up("prices", table, PRICE_TABLES)
        return sum(
            machine.num_devices * look_up("price of device", machine.device, prices)
            for machine in self.machines
        )

    def scale_bandwidth(self, factor: float) -> "DeviceCluster":
        """Return the cluster with the bandwidth of every link multiplied by a factor."""

        def scale(link: NetworkLink) -> NetworkLink:
            return NetworkLink(link.bandwidth * factor, link.latency, link.node)

        machines = [each._replace(link=scale(each.link)) for each in self.machines]
        between = {(a, b): scale(link) for (a, b), link in self._between.items()}
        return DeviceCluster(machines, scale(self.network), between)

    def describe(self, group: Group) -> str:
        """Return a group as text, such as `2 H100 + 1 L40`; devices of several machines add up."""
        counts: dict[str, int] = {}
        for count, machine in zip(group, self.machines, strict=True):
            if count:
                counts[machine.device] = counts.get(machine.device, 0) + count
        return " + ".join(f"{count} {device}" for device, count in counts.items())


class LinkFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Class of links in a cluster file."""

    gbit: float
    """Gbit/s in one direction."""
    us: float
    """Latency in microseconds."""

    def build(self) -> NetworkLink:
        """Return the link."""
        return NetworkLink(self.gbit * GBIT_BYTES, self.us * 1e-6)


class MachineFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Machine of a cluster file."""

    device: str
    count: int
    link: str
    """Class of the links between its devices."""
    host: str = ""
    """Address under which the other machines reach it, for the plan; empty: the machine's name."""


class ClusterFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster file: classes of links, machines, and the network between them."""

    links: dict[str, LinkFields]
    machines: dict[str, MachineFields]
    network: str
    """Class of the links between machines."""
    between: dict[str, str] = {}
    """Classes of links that differ from `network`, by two machines joined with a dash."""


class MachineClassFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Class of machines of the shipped clusters."""

    device: str
    link: str
    most: int
    """Largest number of devices per machine."""


class ShippedClusters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of the shipped clusters."""

    links: dict[str, LinkFields]
    machine_classes: dict[str, MachineClassFields]
    network: str
    clusters: dict[str, dict[str, int]]
    """Number of devices by class of machines, by the name of the cluster."""


@cache
def _shipped() -> ShippedClusters:
    return msgspec.yaml.decode(read_data("hexgen2_clusters.yaml"), type=ShippedClusters)


def cluster_names() -> list[str]:
    """Return the names of the shipped clusters."""
    return list(_shipped().clusters)


def named_cluster(name: str) -> DeviceCluster:
    """Return a shipped cluster. Raises ValueError for an unknown name; it lists the names."""
    return build_cluster(look_up("cluster", name, _shipped().clusters))


def build_cluster(counts: Mapping[str, int]) -> DeviceCluster:
    """Return a cluster of the shipped classes of machines and links.

    Args:
        counts: Number of devices by class of machines; as few machines as possible hold them.

    Raises:
        ValueError: A class is unknown.
    """
    shipped, machines = _shipped(), []
    for name, count in counts.items():
        kind = look_up("machine class", name, shipped.machine_classes)
        num_machines = -(-count // kind.most)
        for index in range(num_machines):
            share = count // num_machines + (index < count % num_machines)
            label = name if num_machines == 1 else f"{name}-{index}"
            link = shipped.links[kind.link].build()
            machines.append(MachineDevices(label, kind.device, share, link))
    return DeviceCluster(machines, shipped.links[shipped.network].build())


def read_cluster(path: Path) -> DeviceCluster:
    """Return the cluster of a file.

    Raises:
        ValueError: A field is unknown, has a wrong type or value, or names nothing.
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
        machines.append(
            MachineDevices(name, machine.device, machine.count, kind.build(), machine.host)
        )
    if not machines:
        raise ValueError(f"{path}: machines: empty: add one at least")
    network = look_up(f"{path}: network", fields.network, fields.links).build()
    return DeviceCluster(machines, network, _read_pairs(path, fields))


def _read_pairs(path: Path, fields: ClusterFields) -> dict[tuple[int, int], NetworkLink]:
    names = list(fields.machines)
    pairs = {f"{a}-{b}": (names.index(a), names.index(b)) for a in names for b in names if a != b}
    links = {}
    for name, kind in fields.between.items():
        pair = look_up(f"{path}: between", name, pairs)
        links[pair] = look_up(f"{path}: between.{name}", kind, fields.links).build()
    return links
