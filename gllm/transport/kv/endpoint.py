"""Endpoint of an engine: the machines of its workers, as the KV movers of other engines reach them.

Engines and routers pass it on as opaque bytes.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from gllm.messages.kv_layout import KvLayout


class KvMachine(msgspec.Struct, frozen=True, array_like=True):
    """Network address, Unix socket and KV cache layouts of one machine of an engine.

    Other engines use it to fetch KV blocks.
    """

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
    """Addresses and KV cache layouts of an engine's machines, for engines that fetch its KV."""

    machines: Annotated[list[KvMachine], Meta(min_length=1, max_length=1024)]


def encode_endpoint(endpoint: KvEndpoint) -> bytes:
    """Return the msgpack encoding of an engine's KV endpoint."""
    return msgspec.msgpack.encode(endpoint)


def decode_endpoint(data: bytes) -> KvEndpoint:
    """Decode an engine's KV endpoint from msgpack. Raises ValueError if the data is invalid."""
    try:
        return msgspec.msgpack.decode(data, type=KvEndpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the KV endpoint is invalid: {error}") from error
