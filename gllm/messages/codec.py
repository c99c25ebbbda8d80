"""Codec of messages: msgpack with a schema for each message, checked on arrival."""

import re
from typing import Any

import msgspec

from gllm.messages.base import WireMessage
from gllm.messages.control import CommandDone, ResetPrefixCache, StartProfile, StopProfile
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
    | StartProfile
    | StopProfile
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
"""Every message that a process may receive."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: WireMessage) -> bytes:
    """Encode a message as msgpack."""
    return _encoder.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """Decode a message; a SubmitRequest with an invalid field becomes a RejectedRequest.

    Raises:
        msgspec.DecodeError: the payload is no other valid message.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        if rejected := _reject(payload, str(error)):
            return rejected
        raise


def _reject(payload: bytes, error: str) -> RejectedRequest | None:
    """Return the rejection of a SubmitRequest; None if its sequence ids cannot be read either."""
    fields: Any = msgspec.msgpack.decode(payload)
    if not isinstance(fields, list) or len(fields) < 2 or fields[0] != SubmitRequest.__name__:
        return None
    seq = fields[1]
    if not isinstance(seq, int) or seq < 0:
        return None
    # The tag comes before the fields.
    index = 1 + SubmitRequest.__struct_fields__.index("n")
    count = fields[index] if len(fields) > index else 1
    count = count if isinstance(count, int) and count > 0 else 1
    return RejectedRequest(seq, count, f"the request cannot be read: {_name_fields(error)}")


def _name_fields(error: str) -> str:
    """Replace the array indices in an error of msgspec by the names of SubmitRequest's fields."""

    def name(match: re.Match[str]) -> str:
        field = SubmitRequest.__struct_fields__[int(match[1]) - 1]
        if field != "sampling" or match[2] is None:
            return f"`{field}`"
        return f"`{field}.{SequenceSamplingParams.__struct_fields__[int(match[2])]}`"

    return re.sub(r"`\$\[(\d+)\](?:\[(\d+)\])?[^`]*`", name, error)
