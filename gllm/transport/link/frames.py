"""Frames of a data connection: their headers, their limits, and the payloads of the first ones.

A connection belongs to one edge of one epoch. It begins with a HELLO of the dialing end, which
the other one answers; then each end sends RESUME. After that the sending end sends LAYOUT before
its first step, and each step as frames of ACTIVATIONS; both ends send RENDEZVOUS.
"""

import struct
from enum import IntEnum
from typing import NamedTuple, Self, TypeVar

import msgspec

from gllm.config.link_encodings import PLAIN
from gllm.transport.base import EdgeLayout

MAGIC, VERSION = b"gA", 2
FRAME = struct.Struct("!2sBBQIHBHQII")
"""Binary layout of a frame's header: magic, version, and the fields of FrameHeader."""
MAX_HELLO_BYTES = 4096
"""Largest payload before the other end is known."""


class FrameError(Exception):
    """A message of another machine's data mover (`gllm-link`) is invalid.

    The connection is closed.
    """


class FrameClass(IntEnum):
    """Type of a message between the data movers (`gllm-link`) of two machines."""

    ACTIVATIONS = 0
    """A part of the activations of a step."""
    HELLO = 16
    ANSWER = 17
    RESUME = 18
    LAYOUT = 19
    RENDEZVOUS = 20
    """Rendezvous data that two workers exchange before they use NCCL."""
    PROBE = 21
    """Request for an ECHO, from the sending end of an idle connection."""
    ECHO = 22
    KV_HELLO = 23
    """First frame of a connection of two KV movers; gllm.transport.kv.frames follow."""


MAX_BYTES = {
    FrameClass.ACTIVATIONS: 2**32 - 1,
    FrameClass.HELLO: MAX_HELLO_BYTES,
    FrameClass.ANSWER: MAX_HELLO_BYTES,
    FrameClass.RESUME: 2**16,
    FrameClass.LAYOUT: 256,
    FrameClass.RENDEZVOUS: 2**14,
    FrameClass.PROBE: 0,
    FrameClass.ECHO: 0,
    FrameClass.KV_HELLO: MAX_HELLO_BYTES,
}
"""Largest payload in bytes by frame class; activations are also limited by the slot."""


class FrameHeader(NamedTuple):
    """Header of a message between two data movers (`gllm-link`): type, connection, step, length."""

    frame_class: FrameClass
    run: int
    epoch: int
    edge: int
    lane: int
    """Ring buffer of ACTIVATIONS and LAYOUT: 1 for steps with prefills if these can be overtaken;
    else 0."""
    slot: int
    """Index of the step's buffer in the ring, for ACTIVATIONS; 0 in all others."""
    step: int
    """Step number of ACTIVATIONS within their ring; 0 in all others."""
    offset: int
    """Position of the payload in the step's buffer, or in the log of a RENDEZVOUS."""
    length: int
    """Bytes of the payload."""

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return FRAME.pack(MAGIC, VERSION, *self)


def unpack_frame(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Parse and check the header of a message.

    Raises:
        FrameError: the bytes are no valid header.
    """
    magic, version, frame_class, *fields = FRAME.unpack_from(data)
    if magic != MAGIC:
        raise FrameError("the bytes are no frame of gllm-link")
    if version != VERSION:
        raise FrameError(f"the frame has version {version}, expected {VERSION}")
    try:
        header = FrameHeader(FrameClass(frame_class), *fields)
    except ValueError:
        raise FrameError(f"the frame has the unknown class {frame_class}") from None
    limit = MAX_BYTES[header.frame_class]
    if header.length > limit:
        name = header.frame_class.name
        raise FrameError(f"a frame {name} has {header.length} bytes, at most {limit} are allowed")
    if header.frame_class != FrameClass.ACTIVATIONS:
        if header.slot or header.step:
            raise FrameError(f"a frame {header.frame_class.name} names a slot or a step")
        if header.lane and header.frame_class != FrameClass.LAYOUT:
            raise FrameError(f"a frame {header.frame_class.name} names a lane")
    return header


class EdgeName(NamedTuple):
    """Identity of a connection between stages: head start, engine restart and number."""

    run: int
    """Random number of the head process's start."""
    epoch: int
    """Number of the engine restart."""
    edge: int
    """Number of the connection within the epoch."""

    def header(
        self, frame_class: FrameClass, payload: bytes, offset: int = 0, lane: int = 0
    ) -> bytes:
        """Return the bytes of a message that belongs to no step: header and payload."""
        return FrameHeader(frame_class, *self, lane, 0, 0, offset, len(payload)).pack() + payload

    def find_difference(self, header: FrameHeader) -> str:
        """Return why a message's header belongs to another connection; empty if it does not."""
        for name, value in self._asdict().items():
            received = getattr(header, name)
            if received != value:
                return f"the frame is of {name} {received}, expected {value}"
        return ""


class EdgeHello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Payload of HELLO, sent first by the dialing machine: machine names and encoding."""

    node: str
    """Name of the machine that dials."""
    peer: str
    """Name of the machine that the dialing machine expects to reach."""
    is_sender: bool
    """True if the dialing machine sends activations."""
    encoding: str = PLAIN
    """Name of the encoding that the dialing machine uses."""


class EdgeAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Payload of ANSWER: accepts or refuses the connection; sent by the machine that was dialed."""

    cause: str = ""
    """Reason for refusing the connection; empty if it is accepted."""
    is_final: bool = False
    """True if the dialing machine should not try again."""


class EdgeResume(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Payload of RESUME: the steps already received over an earlier connection."""

    signalled: list[list[int | None]]
    """Latest received step of each buffer, by ring; empty from the end that sends."""
    rendezvous_bytes: int
    """Received bytes of the other worker's rendezvous log."""


class RingLayout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Payload of LAYOUT: number of step buffers and dtype, which must be equal at both ends."""

    slots: int
    hidden_size: int
    itemsize: int
    is_bfloat16: bool = False

    @classmethod
    def of(cls, layout: EdgeLayout) -> Self:
        """Return the properties that the rings at both ends of a lane share."""
        return cls(layout.slots, layout.hidden_size, layout.itemsize, layout.is_bfloat16)


_Payload = TypeVar("_Payload", EdgeHello, EdgeAnswer, EdgeResume, RingLayout)
_encoder = msgspec.msgpack.Encoder()


def encode_payload(payload: EdgeHello | EdgeAnswer | EdgeResume | RingLayout) -> bytes:
    """Return the msgpack encoding of the payload of a handshake message."""
    return _encoder.encode(payload)


def decode_payload(data: bytes | memoryview, kind: type[_Payload]) -> _Payload:
    """Decode the payload of a handshake message. Raises FrameError if it is invalid.

    kind: expected class of the payload.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FrameError(f"the payload of a frame is invalid: {error}") from error
