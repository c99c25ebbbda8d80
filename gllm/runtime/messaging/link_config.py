"""Configuration of one end of the links between routers and engines."""

import os
import secrets
import socket
from dataclasses import dataclass

from gllm.config.router import RouterConfig
from gllm.options.addresses import format_host_port as format_host_port
from gllm.options.addresses import parse_host_port as parse_host_port
from gllm.recovery.backoff import REFUSED_SECONDS
from gllm.routing.disaggregation.policy import DecodeChoice
from gllm.runtime.messaging.authenticator import RELOAD_SECONDS

RESOLVE_SECONDS = 5.0
"""Time between two resolutions of a name with several addresses."""


@dataclass(frozen=True)
class FleetLinkConfig:
    """The hub that peers dial, the peers that are dialled, and the limits of both."""

    hub: str | None = None
    """Address of the hub, PORT or HOST:PORT; None for no hub."""
    dial: tuple[str, ...] = ()
    """Peers to dial, as `gllm.runtime.messaging.discovery` reads them."""
    node_secret_file: str | None = None
    """File of the secret that all members share; None without encryption, on loopback only."""
    peer_timeout: float = 5.0
    """Seconds of silence after which a peer is lost."""
    max_guests: int = 256
    """Most peers that the hub accepts at a time."""
    resolve_seconds: float = RESOLVE_SECONDS
    """Interval at which the names of peers are resolved again."""
    reload_seconds: float = RELOAD_SECONDS
    """Interval at which the secret file is read again."""
    refused_seconds: float = REFUSED_SECONDS
    """Delay before a peer that refused a session is dialled again."""
    needs_first_chunks: bool = False
    """True for a router that has to receive FirstChunkComputed."""


def make_router_links(config: RouterConfig) -> FleetLinkConfig:
    """Return the configuration of a router's end."""
    return FleetLinkConfig(
        hub=None if config.hub == "off" else config.hub,
        dial=config.engines,
        node_secret_file=config.node_secret_file,
        peer_timeout=config.engine_timeout,
        max_guests=config.max_engines,
        needs_first_chunks=config.decode_choice == DecodeChoice.FIRST_CHUNK.value,
    )


def parse_hub_address(text: str, has_secret: bool) -> str:
    """Return the address that a hub binds, for ZeroMQ.

    Args:
        text: PORT or HOST:PORT. A port alone is bound on all interfaces if there is a secret, else
            on loopback. Port 0 picks a free one.
        has_secret: True if sessions are encrypted.

    Raises:
        ValueError: it is neither.
    """
    if text.isascii() and text.isdigit() and int(text) < 2**16:
        return f"tcp://{'*' if has_secret else '127.0.0.1'}:{int(text)}"
    if text.endswith(":0"):
        host, _ = parse_host_port(text[:-1] + "1")
        return f"tcp://{format_host_port(host, 0)}"
    try:
        host, port = parse_host_port(text)
    except ValueError:
        raise ValueError(f"the hub {text!r} is neither a PORT nor HOST:PORT") from None
    return f"tcp://{format_host_port(host, port)}"


MAX_NAME_LENGTH = 200
"""Most characters of the name of an engine or router."""


def new_run() -> int:
    """Return a random number for this start of a process."""
    return secrets.randbits(62)


def is_valid_name(name: str) -> bool:
    """Return True if a name of an engine or router may be shown in logs and metrics."""
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def default_engine_name() -> str:
    """Return a name that no other living engine has: that of the host, and the process id."""
    return f"{socket.gethostname()}-{os.getpid()}"
