"""Machines of a test: network namespaces joined by a router, or addresses of the loopback device.

    with make_rig(3) as rig:
        server = rig.popen(0, [...])
        rig.hop(1).set_rate(100e6)
        rig.hop(1).cut()

A machine is connected to all others by one hop, which is shaped for both its directions.
"""

import contextlib
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, Self

from benchmarks.net import namespaces, shaper
from benchmarks.net.proxy import ProxyHop, TcpProxy

MTU = 1500
"""Maximum size of a packet in bytes, as of most networks between machines."""


class Hop(Protocol):
    """The connection of one machine to all others."""

    def set_rate(self, bits_per_second: float) -> None:
        """Limit each direction; 0 for no limit."""

    def set_delay(self, seconds: float) -> None:
        """Set the one-way delay."""

    def cut(self) -> None:
        """Drop everything from now on, without telling either side."""

    def restore(self) -> None:
        """End a cut."""


class Rig(Protocol):
    """Machines that are connected by hops."""

    addresses: list[str]
    """IP address per machine, to be bound there."""

    def popen(self, machine: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a machine, as subprocess.Popen does."""

    def inside(self, machine: int) -> AbstractContextManager[None]:
        """Return a context in which the calling thread creates sockets on a machine."""

    def reach(self, machine: int, port: int, source: int | None = None) -> str:
        """Return HOST:PORT at which `source`, or any other machine, reaches a port."""

    def hop(self, machine: int) -> Hop:
        """Return the connection of a machine."""


class NamespaceRig:
    """Machines as network namespaces, each joined to a router by its own hop.

    Args:
        num_machines: Number of machines, at most 250.
        shaped: Machines whose hop is shaped (`ShapedHop`); the others have a plain pair of veth
            devices. All by default.
        seed: Seed of random losses.
        mtu: Maximum size of a packet in bytes. Large ones stand for the offload of network cards,
            without which a fast link takes more of the host's cores than there are.

    Raises:
        RuntimeError: `unsupported_reason()`.
    """

    def __init__(
        self,
        num_machines: int,
        shaped: Sequence[int] | None = None,
        seed: int = 0,
        mtu: int = MTU,
    ) -> None:
        if reason := unsupported_reason():
            raise RuntimeError(reason)
        self._shaped = range(num_machines) if shaped is None else shaped
        self._seed, self._mtu = seed, mtu
        self._hops: dict[int, shaper.ShapedHop] = {}
        self._cleanup = ExitStack()
        self.addresses = [f"10.77.{machine}.1" for machine in range(num_machines)]
        self.namespaces: list[str] = []
        self.router = ""

    def __enter__(self) -> Self:
        try:
            suffixes = [f"m{machine}" for machine in range(len(self.addresses))]
            self.router, *self.namespaces = namespaces.make_namespaces("router", *suffixes)
            for name in (self.router, *self.namespaces):
                self._cleanup.callback(namespaces.delete_namespace, name)
            with namespaces.inside(self.router), open("/proc/sys/net/ipv4/ip_forward", "w") as file:
                file.write("1")
            for machine in range(len(self.addresses)):
                self._connect(machine)
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def popen(self, machine: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in a machine's namespace; its process id is that of the command."""
        place = ["ip", "netns", "exec", self.namespaces[machine]]
        return subprocess.Popen([*place, *command], **options)

    def inside(self, machine: int) -> AbstractContextManager[None]:
        """Return a context in which the calling thread creates sockets on a machine."""
        return namespaces.inside(self.namespaces[machine])

    def reach(self, machine: int, port: int, source: int | None = None) -> str:
        """Return HOST:PORT at which all machines reach a port."""
        return f"{self.addresses[machine]}:{port}"

    def hop(self, machine: int) -> shaper.ShapedHop:
        """Return the connection of a shaped machine. Raises KeyError for others."""
        return self._hops[machine]

    def limit_rate(self, machine: int, bits_per_second: float) -> None:
        """Limit what a machine sends over a hop that is not shaped, by the kernel's token bucket.

        It takes no time of a process, as fast links require.

        Args:
            machine: Machine whose hop is not shaped.
            bits_per_second: Rate.
        """
        limit = ("tbf", "rate", f"{bits_per_second:.0f}bit", "burst", "1mb", "latency", "10ms")
        command = ("netns", "exec", self.namespaces[machine], "tc", "qdisc", "replace")
        namespaces.run_ip(*command, "dev", "net0", "root", *limit)

    def pids(self, machine: int) -> list[int]:
        """Return the processes that run on a machine."""
        return namespaces.pids_in(self.namespaces[machine])

    def set_tcp_option(self, machine: int, name: str, value: int) -> None:
        """Set an option of /proc/sys/net/ipv4 for the connections of a machine."""
        with self.inside(machine), open(f"/proc/sys/net/ipv4/{name}", "w") as file:
            file.write(str(value))

    def _connect(self, machine: int) -> None:
        name, router_device = self.namespaces[machine], f"machine{machine}"
        if machine in self._shaped:
            hop = shaper.ShapedHop((name, self.router), ("net0", router_device), self._seed)
            self._cleanup.callback(hop.close)
            self._hops[machine] = hop
        else:
            pair = ("type", "veth", "peer", "name", router_device, "netns", self.router)
            namespaces.run_ip("-n", name, "link", "add", "net0", *pair)
        ends = ((name, "net0", 1), (self.router, router_device, 2))
        for place, device, number in ends:
            address = f"10.77.{machine}.{number}/24"
            namespaces.run_ip("-n", place, "address", "add", address, "dev", device)
            namespaces.run_ip("-n", place, "link", "set", device, "up", "mtu", str(self._mtu))
        namespaces.run_ip("-n", name, "route", "add", "default", "via", f"10.77.{machine}.2")


class LoopbackRig:
    """Machines as addresses of the loopback device, with TCP proxies as hops between them.

    Processes are not kept apart: only connections to an address of `reach` pass hops.
    """

    def __init__(self, num_machines: int) -> None:
        self.addresses = [f"127.0.0.{2 + machine}" for machine in range(num_machines)]
        self._hops = [ProxyHop() for _ in self.addresses]
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def popen(self, machine: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command."""
        return subprocess.Popen(command, **options)

    def inside(self, machine: int) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return contextlib.nullcontext()

    def reach(self, machine: int, port: int, source: int | None = None) -> str:
        """Start a proxy to a port of a machine; return its HOST:PORT."""
        hops = [self._hops[each] for each in (source, machine) if each is not None]
        proxy = TcpProxy((self.addresses[machine], port), hops)
        self._cleanup.callback(proxy.close)
        return proxy.address

    def hop(self, machine: int) -> ProxyHop:
        """Return the connection of a machine."""
        return self._hops[machine]


def unsupported_reason() -> str | None:
    """Return why there can be no `NamespaceRig` here; None if there can be."""
    if shaper.compiler() is None:
        return "no C compiler for the shaper: install gcc, or set CC"
    return namespaces.unsupported_reason()


def make_rig(num_machines: int) -> NamespaceRig | LoopbackRig:
    """Return namespaces where they are supported, else loopback addresses."""
    rig: Callable[[int], NamespaceRig | LoopbackRig]
    rig = LoopbackRig if unsupported_reason() else NamespaceRig
    return rig(num_machines)
