"""The codec: messages as msgpack with a schema each, checked on arrival, never pickle."""

import re
from typing import Any

import msgspec

from gllm.messages.base import Message
from gllm.messages.control import Done, ForgetPrefixes, Profile
from gllm.messages.lifecycle import Fatal, Linked, Loaded, Progress, Ready, Shutdown, Start
from gllm.messages.reports import Bubbles, StageLoad, StageTimes
from gllm.messages.requests import Abort, Rejected, Submit, Tokens
from gllm.messages.sampling import Sampling
from gllm.messages.steps import Begun, Register, Result, Step

AnyMessage = (
    Submit
    | Rejected
    | Abort
    | ForgetPrefixes
    | Profile
    | Done
    | Register
    | Step
    | Result
    | Begun
    | Linked
    | StageTimes
    | Tokens
    | Bubbles
    | Progress
    | Loaded
    | Start
    | Ready
    | Fatal
    | StageLoad
    | Shutdown
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """Return the message in a payload; Rejected for a Submit with a field that cannot be read.

    Raises msgspec.DecodeError for anything else that is no message.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        if rejected := _rejected(payload, str(error)):
            return rejected
        raise


def _rejected(payload: bytes, error: str) -> Rejected | None:
    """Return the rejection of a Submit that is readable as far as its sequence ids."""
    fields: Any = msgspec.msgpack.decode(payload)
    if not isinstance(fields, list) or len(fields) < 2 or fields[0] != Submit.__name__:
        return None
    seq = fields[1]
    if not isinstance(seq, int) or seq < 0:
        return None
    place = 1 + Submit.__struct_fields__.index("n")
    count = fields[place] if len(fields) > place else 1
    count = count if isinstance(count, int) and count > 0 else 1
    return Rejected(seq, count, f"the request cannot be read: {_with_field_names(error)}")


def _with_field_names(error: str) -> str:
    """Replace the places in an array-like Submit by the names of its fields."""

    def name(match: re.Match[str]) -> str:
        outer = Submit.__struct_fields__[int(match[1]) - 1]
        if outer != "sampling" or match[2] is None:
            return f"`{outer}`"
        return f"`{outer}.{Sampling.__struct_fields__[int(match[2])]}`"

    return re.sub(r"`\$\[(\d+)\](?:\[(\d+)\])?[^`]*`", name, error)
