"""Codec of messages: msgpack with a schema for each message, checked on arrival.

There is one decoder per role of the receiver: what a peer may not send does not decode.
"""

import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect
from msgspec.msgpack import Decoder

from gllm.messages import (
    fleet,
    handoff,
    kv_cache,
    kv_disk,
    kv_transfer,
    lifecycle,
    nodes,
    reports,
    steps,
)
from gllm.messages.base import WireMessage
from gllm.messages.kv_transfer import KvCommand, KvReport
from gllm.messages.requests import AbortSequences, EngineOutputs, RejectedRequest, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.services import ToMaster, ToServiceNode

T = TypeVar("T")


class ForwardDecoder(Generic[T]):
    """Msgpack decoder that ignores unknown fields, so that newer versions can be read."""

    def __init__(self, kind: Any) -> None:
        """Create the decoder of a message type or a union of them."""
        self._kind = kind
        self._decoder: Decoder[T] = Decoder(kind)
        self._info = inspect.type_info(kind)

    def decode(self, payload: bytes) -> T:
        """Decode a message.

        Raises:
            msgspec.DecodeError: the payload is no message of the type, even without unknown fields.
        """
        try:
            return self._decoder.decode(payload)
        except msgspec.ValidationError as error:
            fields = _trim(msgspec.msgpack.decode(payload), self._info)
            try:
                message: T = msgspec.convert(fields, self._kind)
            except msgspec.ValidationError:
                raise error from None
            return message


def _trim(value: Any, info: inspect.Type) -> Any:
    """Return a decoded value without the fields of named tuples that its type does not have."""
    if not isinstance(value, list):
        return value
    match info:
        case inspect.UnionType(types=types):
            return _trim(value, _choose(value, types))
        case inspect.StructType(fields=fields, tag=tag):
            first = [] if tag is None else [value[0]]
            rest = value[len(first) :]
            # Further fields of structs are ignored by msgspec.
            return first + [_trim(v, f.type) for v, f in zip(rest, fields, strict=False)]
        case inspect.NamedTupleType(fields=fields):
            return [_trim(v, f.type) for v, f in zip(value, fields, strict=False)]
        case inspect.ListType(item_type=item):
            return [_trim(item_type, item) for item_type in value]
    return value


def _choose(value: list[Any], types: tuple[inspect.Type, ...]) -> inspect.Type:
    """Return the member of a union that a list is: the struct of its tag, or the only other one."""
    tag = value[0] if value else None
    for info in types:
        if isinstance(info, inspect.StructType) and info.tag is not None:
            if info.tag == tag:
                return info
        elif not isinstance(info, inspect.NoneType):
            return info
    return inspect.AnyType()


ToHead = (
    lifecycle.Hello
    | lifecycle.Heartbeat
    | reports.StageMeasured
    | lifecycle.LayersPrepared
    | lifecycle.LoadProgress
    | lifecycle.StageLoaded
    | lifecycle.StageReady
    | lifecycle.StageFailed
    | lifecycle.EpochClosed
    | lifecycle.CommandDone
    | EngineOutputs
    | reports.BubbleReport
    | reports.StageUtilization
    | reports.StepCostReport
    | kv_cache.KvCacheEvents
    | kv_transfer.KvTransferTotals
    | kv_disk.KvDiskTotals
    | kv_transfer.KvMoverStuck
    | handoff.KvPushStarted
    | handoff.FirstChunkComputed
)
"""Messages that a worker may send to the head process."""
ToWorker = (
    lifecycle.InitializeCache
    | lifecycle.CloseEpoch
    | lifecycle.Shutdown
    | lifecycle.StartProfile
    | lifecycle.StopProfile
    | lifecycle.ResetPrefixCache
    | SubmitRequest
    | RejectedRequest
    | AbortSequences
    | kv_cache.WatchKvCache
    | kv_cache.AdoptKvBlocks
    | reports.LinkTimes
    | handoff.PrefetchKv
    | handoff.ReleaseKvHolds
    | handoff.RenewKvHolds
    | handoff.HandOffSequence
    | handoff.KeepComputedKv
)
"""Messages that the head process may send to a worker."""
ToDriver = (
    lifecycle.Hello
    | steps.StepDone
    | steps.GrammarReady
    | reports.StageTimes
    | kv_transfer.KvMachineReport
    | kv_transfer.KvBlocksCopied
)
"""Messages that another stage may send to the driver's process."""
ToStage = (
    steps.RegisterSequences
    | steps.RunStep
    | kv_transfer.KvMachineCommand
    | kv_transfer.CopyKvBlocks
)
"""Messages that the driver may send to another stage."""
ToRouter = (
    lifecycle.Hello
    | fleet.AnnounceEngine
    | fleet.EngineReport
    | EngineOutputs
    | kv_cache.KvCacheEvents
    | lifecycle.CommandDone
    | fleet.RefuseRouter
    | handoff.KvPushStarted
    | handoff.FirstChunkComputed
)
"""Messages that an engine may send to a router."""
ToEngine = (
    lifecycle.Hello
    | fleet.GreetEngine
    | fleet.RouterHeartbeat
    | SubmitRequest
    | RejectedRequest
    | AbortSequences
    | kv_cache.WatchKvCache
    | fleet.DrainEngine
    | fleet.SetEngineRole
    | lifecycle.ResetPrefixCache
    | fleet.NoticeToEngine
    | fleet.RefuseEngine
    | handoff.PrefetchKv
    | handoff.ReleaseKvHolds
    | handoff.RenewKvHolds
    | handoff.HandOffSequence
    | handoff.KeepComputedKv
)
"""Messages that a router may send to an engine."""
FromAgent = lifecycle.Hello | nodes.ToNodeHub
"""Messages that the agent of another node may send to the head process."""
FromServiceNode = lifecycle.Hello | ToMaster
"""Messages that a node may send to the master of a cluster."""
AnyMessage = (
    ToHead
    | ToWorker
    | KvCommand
    | KvReport
    | ToDriver
    | ToStage
    | ToRouter
    | ToEngine
    | FromAgent
    | nodes.ToAgent
    | FromServiceNode
    | ToServiceNode
)
"""Every message that a process may receive."""

_encoder = msgspec.msgpack.Encoder()
_worker_decoder: Decoder[ToWorker] = Decoder(ToWorker)
_engine_decoder: Decoder[ToEngine] = Decoder(ToEngine)

decode_for_head: Callable[[bytes], ToHead] = Decoder(ToHead).decode
decode_for_kv_mover: Callable[[bytes], KvCommand] = Decoder(KvCommand).decode
decode_from_kv_mover: Callable[[bytes], KvReport] = Decoder(KvReport).decode
decode_for_driver: Callable[[bytes], ToDriver] = Decoder(ToDriver).decode
decode_for_stage: Callable[[bytes], ToStage] = Decoder(ToStage).decode
decode_for_router: Callable[[bytes], ToRouter] = ForwardDecoder[ToRouter](ToRouter).decode
decode_for_node_hub: Callable[[bytes], FromAgent] = Decoder(FromAgent).decode
decode_for_agent: Callable[[bytes], nodes.ToAgent] = Decoder(nodes.ToAgent).decode
decode_for_master: Callable[[bytes], FromServiceNode] = Decoder(FromServiceNode).decode
decode_for_service_node: Callable[[bytes], ToServiceNode] = Decoder(ToServiceNode).decode


def encode(message: WireMessage) -> bytes:
    """Encode a message as msgpack, with its class name as the type."""
    return _encoder.encode(message)


def decode_for_worker(payload: bytes) -> ToWorker:
    """Decode a message from the head process to a worker.

    A SubmitRequest with an invalid field becomes a RejectedRequest.

    Raises:
        msgspec.DecodeError: the payload is not a message that the head process may send.
    """
    return _decode_or_reject(_worker_decoder, payload)


def decode_for_engine(payload: bytes) -> ToEngine:
    """Decode a message from a router to an engine.

    A SubmitRequest with an invalid field becomes a RejectedRequest.

    Raises:
        msgspec.DecodeError: the payload is not a message that a router may send.
    """
    return _decode_or_reject(_engine_decoder, payload)


def _decode_or_reject(decoder: Decoder[T], payload: bytes) -> T | RejectedRequest:
    try:
        return decoder.decode(payload)
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
