"""Endpoint of an engine: the machines of its workers, as the KV movers of other engines reach them.

Engines and routers pass it on as opaque bytes.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from gllm.messages.kv_layout import KvLayout


class KvMachine(msgspec.Struct, frozen=True, array_like=True):
    """One machine with workers of an engine."""

    host: str
    """Identity of the machine until it restarts; equal for processes of one machine."""
    socket: str
    """Name of the mover's abstract Unix socket, unguessable."""
    address: str
    """HOST:PORT of the data port; empty if other machines cannot reach this one."""
    certificate: bytes
    """Certificate of the data port in DER; empty without encryption."""
    layouts: Annotated[list[KvLayout], Meta(max_length=4096)]
    """Layout of each worker of the machine."""


class KvEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """All machines of an engine."""

    machines: Annotated[list[KvMachine], Meta(min_length=1, max_length=1024)]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Machine and position there of each worker."""
        return [
            (number, place)
            for number, machine in enumerate(self.machines)
            for place in range(len(machine.layouts))
        ]


def encode_endpoint(endpoint: KvEndpoint) -> bytes:
    """Return an endpoint as bytes."""
    return msgspec.msgpack.encode(endpoint)


def decode_endpoint(data: bytes) -> KvEndpoint:
    """Return an endpoint. Raises ValueError."""
    try:
        return msgspec.msgpack.decode(data, type=KvEndpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the KV endpoint is invalid: {error}") from error
