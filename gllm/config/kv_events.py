"""Configuration of the KV cache events that an engine publishes for routers of other projects.

The fields and their names are those of vLLM's `--kv-events-config`.
"""

import re
from dataclasses import dataclass

from gllm.options.addresses import is_loopback, parse_ip_address
from gllm.options.field_types import FieldError, convert_fields
from gllm.options.json_fields import parse_json_fields
from gllm.options.options import INT32_MAX, bounded_field

PUBLISHERS = ("null", "zmq")
"""Values of `publisher`."""
_TCP_ADDRESS = re.compile(r"tcp://(?P<host>\*|\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(?P<port>\d+)")


@dataclass(frozen=True)
class KvEventsConfig:
    """Options for publishing KV cache events (stored and removed blocks), as in vLLM.

    Fields are those of vLLM's `--kv-events-config`.
    """

    enable_kv_cache_events: bool = False
    publisher: str = bounded_field("zmq", choices=PUBLISHERS)
    """null publishes nothing."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Address of the PUB socket. With `*`, an IP address or ipc:// it is bound. With a host name it
    is connected to: one subscriber then listens under that name to many engines."""
    replay_endpoint: str | None = None
    """Address to which a ROUTER socket for lost batches is bound; None for no such socket."""
    buffer_steps: int = bounded_field(10_000, ge=0, le=INT32_MAX)
    """Batches kept for replays."""
    hwm: int = bounded_field(100_000, ge=0, le=INT32_MAX)
    """Batches queued for each subscriber; further ones are dropped for it. 0 means no limit."""
    max_queue_size: int = bounded_field(100_000, ge=0, le=INT32_MAX)
    """Accepted for vLLM's sake and not used: batches are sent at once."""
    topic: str = ""
    """Topic of the ZeroMQ messages."""

    def __post_init__(self) -> None:
        """Check and convert the fields. Raises FieldError."""
        convert_fields(self)
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            if address is not None and not _is_address(address):
                raise FieldError(
                    name, f"{name} is {address!r:.100}, but has to be tcp://HOST:PORT or ipc://PATH"
                )
        if self.replay_endpoint is not None and not is_bound(self.replay_endpoint):
            raise FieldError(
                "replay_endpoint",
                f"replay_endpoint {self.replay_endpoint} has a host name, but has to be bound: "
                "give an IP address, or * for all",
            )

    @property
    def is_enabled(self) -> bool:
        """True if events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def exposed_address(self) -> str | None:
        """The first address that other hosts can reach; None if all are local or not used."""
        addresses = (self.endpoint, self.replay_endpoint) if self.is_enabled else ()
        return next((address for address in addresses if address and not _is_local(address)), None)


def parse_kv_events(text: str) -> KvEventsConfig:
    """Parse the JSON object of `--kv-events-config`. Raises ValueError."""
    config: KvEventsConfig = parse_json_fields(KvEventsConfig, text)
    return config


def is_bound(address: str) -> bool:
    """Return True if a ZeroMQ socket binds an address, False if it connects to it.

    IP addresses, `*`, localhost and ipc:// are bound; other host names are connected to.
    """
    host = _host(address)
    return host in ("", "*", "localhost") or parse_ip_address(host) is not None


def _is_address(address: str) -> bool:
    match = _TCP_ADDRESS.fullmatch(address)
    if match is None:
        return address.startswith("ipc://") and len(address) > len("ipc://")
    return int(match["port"]) < 2**16


def _is_local(address: str) -> bool:
    """Return True if other hosts cannot reach an address."""
    host = _host(address)
    return not host or is_loopback(host)


def _host(address: str) -> str:
    """Return the host of an address, without brackets; empty for ipc."""
    match = _TCP_ADDRESS.fullmatch(address)
    return "" if match is None else match["host"].strip("[]")
