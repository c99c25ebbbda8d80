"""Messages between a data mover (`gllm-link`) and its parent over their DescriptorChannel."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from gllm.config.link_encodings import PLAIN
from gllm.messages.kv_layout import KvLayout
from gllm.messages.nodes import LinkState
from gllm.pacing.policy_registry import DEFAULT_LINK_POLICY

MAX_LANES = 2
"""Lanes of an edge: decodes, and steps with prefills."""


class LinkPeer(msgspec.Struct, frozen=True):
    """Name, data address and TLS certificate of another machine of the engine."""

    node: str
    address: str
    """HOST:PORT of its data port; empty if it accepts no connections."""
    certificate: bytes
    """Certificate of its data connections, in DER; empty without encryption."""


class ConfigureLink(msgspec.Struct, frozen=True, tag=True):
    """Command: configure the data mover (`gllm-link`), which binds its data port.

    The answer is LinkListening. Sent first, and again when the head process has restarted. Its
    descriptor, if any, is the file of `NodeCertificate.descriptor`.
    """

    run: int
    """Random number of the head process's start."""
    node: str
    """Name of this machine."""
    listen: str
    """HOST:PORT to bind, port 0 for any; empty if this machine only connects to others."""
    has_tls: bool
    """True if a file descriptor with the certificate and its key is sent with the message."""
    congestion: str | None = None
    """Congestion control of TCP; None for the system's default."""
    policy: str = DEFAULT_LINK_POLICY
    """Order in which queued steps are sent: a name of LINK_POLICIES."""
    encoding: str = PLAIN
    """Encoding of activations: a name of LINK_ENCODINGS, equal on all machines."""
    node_timeout: float = 5.0
    """Limit in seconds; a connection between stages is lost after twice this time without
    reconnecting."""
    accepts_engines: bool = False
    """True if the data port is for engines of other machines that fetch KV blocks: they show no
    certificate, because tickets permit what they read."""
    min_bytes_per_second: float = 0.0
    """Rate of every link that the operator guarantees; a lower measurement does not count."""
    log_level: str = "warning"
    log_format: str = "text"


class OpenLinkEdge(msgspec.Struct, frozen=True, tag=True):
    """Command: connect a worker of this machine to the worker of a neighbouring stage elsewhere.

    Its descriptors are those of the worker's `Edge`, in the same order: memory and event of the
    first ring buffer, the files of the rendezvous, then memory and event of each further ring
    buffer.
    """

    epoch: int
    edge: int
    """Number of the connection within the epoch."""
    is_sender: bool
    """True if the worker of this machine sends."""
    dials: bool
    """True if this machine connects to the other one; False if it accepts the connection."""
    peer: LinkPeer
    num_lanes: Annotated[int, Meta(ge=1, le=MAX_LANES)] = 1
    """Number of ring buffers: 2 if decode steps may overtake prefill steps."""


class CloseLinkEdges(msgspec.Struct, frozen=True, tag=True):
    """Command: close the connections between stages of one epoch and of all earlier epochs.

    An epoch is the time between two restarts of the engine.
    """

    epoch: int


class OpenKvCaches(msgspec.Struct, frozen=True, tag=True):
    """Command: serve the KV caches of this machine's workers, and fetch KV into them.

    The data mover answers with KvCachesOpened. The command's descriptors are the memory of the
    workers' caches, in the order of the layouts, then the end of a DescriptorChannel to the driver,
    for KvCommand and KvReport. Caches of an earlier epoch are closed.
    """

    epoch: int
    engine: list[list[KvLayout]]
    """Layouts of the caches of all machines of the engine, by machine and worker."""
    machine: int
    """Index of this machine."""
    backend: str
    """Name of the KV backend, as in `gllm.config.kv_backends`."""
    encoding: str = PLAIN
    """Encoding of fetches over TCP: a name of LINK_ENCODINGS."""
    disk: str = ""
    """PATH:SIZE of the disk tier of the prefix cache on this machine; empty for none."""

    @property
    def layouts(self) -> list[KvLayout]:
        """Layouts of the caches of this machine's workers; empty for an unknown machine."""
        return self.engine[self.machine] if 0 <= self.machine < len(self.engine) else []


class CloseKvCaches(msgspec.Struct, frozen=True, tag=True):
    """Command: stop serving the KV caches and end all fetches, without reporting them."""


class KvCachesOpened(msgspec.Struct, frozen=True, tag=True):
    """Report that other engines can read the KV caches of this machine, or why they cannot."""

    epoch: int
    machine: bytes
    """KvMachine of this machine (gllm.transport.kv.endpoint); empty after an error."""
    cause: str = ""
    """Reason of a failure; empty on success."""


class LinkListening(msgspec.Struct, frozen=True, tag=True):
    """Report that the data mover (`gllm-link`) is configured, with the port that it has bound."""

    port: int
    """Bound port; 0 for none."""
    cause: str = ""
    """Reason why the data port could not be bound, after which the parent ends the data mover."""


class LinkEdgeOpened(msgspec.Struct, frozen=True, tag=True):
    """Report that a connection between two stages is open for the first time; sent by both ends."""

    epoch: int
    edge: int


class LinkEdgeLost(msgspec.Struct, frozen=True, tag=True):
    """Report that a connection between two stages was refused or was interrupted for too long."""

    epoch: int
    edge: int
    cause: str


class LinkReport(msgspec.Struct, frozen=True, tag=True):
    """State of all connections between stages, sent on change; counters at most once per second."""

    links: list[LinkState]
    num_malformed: int
    """Frames and handshakes that were invalid."""
    refused: dict[str, int]
    """Connections that were refused, by IP address."""
    refusal_causes: dict[str, str] = {}
    """Cause of the last refusal, by IP address."""


class CheckLink(msgspec.Struct, frozen=True, tag=True):
    """Command: answer with LinkAlive, which shows that commands are executed."""


class LinkAlive(msgspec.Struct, frozen=True, tag=True):
    """Answer to CheckLink: all commands before it are executed."""


LinkCommand = (
    ConfigureLink | OpenLinkEdge | CloseLinkEdges | OpenKvCaches | CloseKvCaches | CheckLink
)
"""Messages to a data mover."""
LinkMessage = (
    LinkListening | LinkEdgeOpened | LinkEdgeLost | LinkReport | KvCachesOpened | LinkAlive
)
"""Messages to its parent."""

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[LinkCommand] = msgspec.msgpack.Decoder(LinkCommand)
_message_decoder: msgspec.msgpack.Decoder[LinkMessage] = msgspec.msgpack.Decoder(LinkMessage)


def encode_link_message(message: LinkCommand | LinkMessage) -> bytes:
    """Return the msgpack encoding of a message to or from a data mover (`gllm-link`).

    File descriptors are sent separately.
    """
    return _encoder.encode(message)


def decode_link_command(payload: bytes, descriptors: Sequence[int]) -> LinkCommand:
    """Decode a command to a data mover (`gllm-link`) and check its number of file descriptors.

    Raises:
        msgspec.DecodeError: the payload is no valid message.
        ValueError: the number of descriptors is wrong.
    """
    command = _command_decoder.decode(payload)
    match command:
        case ConfigureLink():
            is_valid = len(descriptors) == int(command.has_tls)
        case OpenLinkEdge():
            is_valid = len(descriptors) >= 2 * command.num_lanes
        case OpenKvCaches():
            is_valid = len(descriptors) == len(command.layouts) + 1 > 1
        case CloseLinkEdges() | CloseKvCaches() | CheckLink():
            is_valid = not descriptors
    if not is_valid:
        raise ValueError(f"{type(command).__name__} has {len(descriptors)} descriptors")
    return command


def decode_link_message(payload: bytes) -> LinkMessage:
    """Decode a report of a data mover (`gllm-link`). Raises msgspec.DecodeError."""
    return _message_decoder.decode(payload)
