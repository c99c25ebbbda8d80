"""The codec: messages as msgpack with a schema each, checked on arrival, never pickle."""

import re
from typing import Any

import msgspec

from gllm.messages.base import WireMessage
from gllm.messages.control import CommandDone, Profile, ResetPrefixCache
from gllm.messages.lifecycle import (
    InitializeCache,
    LoadProgress,
    Shutdown,
    StageConnected,
    StageFailed,
    StageLoaded,
    StageReady,
)
from gllm.messages.reports import BubbleReport, StageTimes, StageUtilization
from gllm.messages.requests import AbortSequences, EngineOutputs, RejectedRequest, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import GrammarReady, RegisterSequences, RunStep, StepDone

AnyMessage = (
    SubmitRequest
    | RejectedRequest
    | AbortSequences
    | ResetPrefixCache
    | Profile
    | CommandDone
    | RegisterSequences
    | RunStep
    | StepDone
    | GrammarReady
    | StageConnected
    | StageTimes
    | EngineOutputs
    | BubbleReport
    | LoadProgress
    | StageLoaded
    | InitializeCache
    | StageReady
    | StageFailed
    | StageUtilization
    | Shutdown
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: WireMessage) -> bytes:
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


def _rejected(payload: bytes, error: str) -> RejectedRequest | None:
    """Return the rejection of a Submit that is readable as far as its sequence ids."""
    fields: Any = msgspec.msgpack.decode(payload)
    if not isinstance(fields, list) or len(fields) < 2 or fields[0] != SubmitRequest.__name__:
        return None
    seq = fields[1]
    if not isinstance(seq, int) or seq < 0:
        return None
    place = 1 + SubmitRequest.__struct_fields__.index("n")
    count = fields[place] if len(fields) > place else 1
    count = count if isinstance(count, int) and count > 0 else 1
    return RejectedRequest(seq, count, f"the request cannot be read: {_with_field_names(error)}")


def _with_field_names(error: str) -> str:
    """Replace the places in an array-like Submit by the names of its fields."""

    def name(match: re.Match[str]) -> str:
        outer = SubmitRequest.__struct_fields__[int(match[1]) - 1]
        if outer != "sampling" or match[2] is None:
            return f"`{outer}`"
        return f"`{outer}.{SequenceSamplingParams.__struct_fields__[int(match[2])]}`"

    return re.sub(r"`\$\[(\d+)\](?:\[(\d+)\])?[^`]*`", name, error)
