"""Checks of the way to the head: names, routes, ports and firewalls."""

import errno
import socket
from collections.abc import Callable

from gllm.deploy.doctor.finding import Finding, bad, good, note
from gllm.options.addresses import format_host_port, is_loopback
from gllm.options.ports import probe_port
from gllm.runtime.node.machine import find_own_address, is_own_address

CONNECT_SECONDS = 5.0
"""Time for a connection; a port that a firewall filters does not answer at all."""


def check_host_name(host: str, port: int) -> tuple[Finding, str]:
    """Resolve the host name of the head node; return the result and its first IP address."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        text = f"{host} is not known here: {error.strerror or error}"
        fix = "use the IP address of the head in --master-addr, or add `ADDRESS "
        fix += f"{host}` to /etc/hosts"
        return bad("name of the head", text, fix), ""
    addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
    if addresses[0] == host:
        return good("name of the head", f"{host} is an IP address"), host
    return good("name of the head", f"{host} is {', '.join(addresses)}"), addresses[0]


def check_route(
    address: str, port: int, find_source: Callable[[str, int], str] = find_own_address
) -> tuple[Finding, str]:
    """Check the route to the head node; return the result and this machine's address on that route.

    Args:
        address: IP address of the head.
        port: port of the head.
        find_source: returns the local address for connections to a given one, or raises OSError.
    """
    try:
        own = find_source(address, port)
    except OSError as error:
        fix = "connect this machine to the head's network or VPN; see `ip route get " + address
        return bad("route", f"none to {address}: {error.strerror}", fix + "`"), ""
    if is_loopback(address):
        text = "the head's address is a loopback one: it is this machine, or a tunnel begins there"
        return good("route", text), own
    if is_own_address(address):
        return good("route", f"{address} is an address of this machine: it is the head"), own
    return good("route", f"this machine reaches {address} from {own}"), own


def check_secret_is_needed(address: str, has_secret: bool) -> Finding | None:
    """Return a failure if a connection to another machine has no node secret; else None."""
    if has_secret or is_loopback(address):
        return None
    return bad(
        "node secret",
        f"{address} is another machine, and a connection to it needs a node secret",
        "on the head: gllm node --new-secret FILE; copy FILE to every machine and pass "
        "--node-secret-file FILE everywhere",
    )


def check_head_port(address: str, port: int, seconds: float = CONNECT_SECONDS) -> Finding:
    """Check that the head node accepts TCP connections of nodes at its port."""
    topic, target = "port of the head", format_host_port(address, port)
    refused = bad(
        topic,
        f"{target} refuses connections: the machine answers, but no head listens there",
        f"start gllm.serve with --node-rank 0 on the head, and --master-addr {target} or "
        "--node-listen with an address that this machine reaches; on the head: "
        f"ss -ltn 'sport = :{port}'",
    )
    fix = f"in a cloud, allow TCP {port} in the security group"
    return _check_port(topic, address, port, seconds, refused, ", or the machine is off", fix)


def check_data_port(own_address: str, port: int) -> Finding:
    """Check that this machine can listen at the port for activations of other nodes."""
    if port == 0:
        text = "none: this machine dials its neighbours, which have to accept connections"
        return note("data port", text)
    target = format_host_port(own_address, port)
    try:
        probe_port(own_address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return bad(
                "data port",
                f"{target} is in use by another program",
                f"end it (`ss -ltnp 'sport = :{port}'` shows it), or pass --data-port with a "
                "free port",
            )
        fix = "pass --data-port with a port from 1024 on"
        return bad("data port", f"{target}: {error.strerror}", fix)
    return good("data port", f"{target} is free; other machines need access to it")


def check_data_port_of_head(address: str, port: int, seconds: float = CONNECT_SECONDS) -> Finding:
    """Check that no firewall blocks the head node's port for activations."""
    topic, target = "data port of the head", format_host_port(address, port)
    refused = note(topic, f"{target} refuses connections, which is usual before the engine starts")
    fix = "or --data-port 0 on the head, which then dials this machine"
    return _check_port(topic, address, port, seconds, refused, "", fix)


def _check_port(
    topic: str,
    address: str,
    port: int,
    seconds: float,
    refused: Finding,
    other_cause: str,
    other_fix: str,
) -> Finding:
    """Connect to a port of the head once; return what that says about firewalls and the network.

    Args:
        topic: topic of the finding.
        address: address of the head.
        port: port of the head.
        seconds: time for the connection.
        refused: the finding if nothing listens there.
        other_cause: further cause of a port that does not answer.
        other_fix: further way to open a port that does not answer.
    """
    target = format_host_port(address, port)
    try:
        socket.create_connection((address, port), seconds).close()
    except ConnectionRefusedError:
        return refused
    except TimeoutError:
        return bad(
            topic,
            f"{target} does not answer within {seconds:g} s: a firewall drops the packets"
            f"{other_cause}",
            f"on the head: `sudo ufw allow {port}/tcp` or `sudo firewall-cmd --add-port "
            f"{port}/tcp`; {other_fix}",
        )
    except OSError as error:
        fix = f"check the network: `ping {address}`, `ip route get {address}`"
        return bad(topic, f"{target}: {error.strerror or error}", fix)
    return good(topic, f"{target} accepts connections")
