"""Endpoint of an engine: the machines of its workers, as the KV movers of other engines reach them.

Engines and routers pass it on as opaque bytes.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from gllm.messages.kv_layout import KvLayout


class KvMachine(msgspec.Struct, frozen=True, array_like=True):
    """Address and KV cache layouts of one machine of an engine."""

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
    """Addresses and KV cache layouts of all machines of an engine."""

    machines: Annotated[list[KvMachine], Meta(min_length=1, max_length=1024)]


def encode_endpoint(endpoint: KvEndpoint) -> bytes:
    """Encode an endpoint as msgpack."""
    return msgspec.msgpack.encode(endpoint)


def decode_endpoint(data: bytes) -> KvEndpoint:
    """Decode an endpoint. Raises ValueError if the bytes are none."""
    try:
        return msgspec.msgpack.decode(data, type=KvEndpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the KV endpoint is invalid: {error}") from error
