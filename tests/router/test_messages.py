"""Messages of links: versions that differ, and what a peer may send."""

from typing import Any

import msgspec
import pytest

from gllm.messages.codec import decode_for_engine, decode_for_router, decode_for_worker, encode
from gllm.messages.fleet import OLDEST_PROTOCOL, PROTOCOL, EngineReport, is_compatible
from gllm.messages.handoff import MAX_TICKETS, KvSource, ReleaseKvHolds, RenewKvHolds
from gllm.messages.requests import EngineOutputs, RejectedRequest, SubmitRequest
from gllm.scheduler.plan import FinishedSequence, FirstToken, SchedulerStats, StepOutput
from gllm.scheduler.step_cost import StepCostCoefficients
from tests.support.routing.links import announcement, request

OUTPUTS = EngineOutputs(
    StepOutput([4], [7], [FirstToken(4, 2, 0.5)], [FinishedSequence(4, "error", error="x")]),
    SchedulerStats(1, 2),
    error_kinds=[(4, "unavailable")],
)
REPORT = EngineReport("ready", "", SchedulerStats(3), StepCostCoefficients(1.0), 5)


def later(message: Any) -> bytes:
    """Return the encoded message with further fields in every named tuple and struct."""
    fields = msgspec.msgpack.decode(encode(message))
    match message:
        case EngineOutputs():
            outcome, stats = fields[1], fields[2]
            outcome[2] = [[*first, "further"] for first in outcome[2]]
            outcome[3] = [[*end, "further"] for end in outcome[3]]
            fields[1], fields[2] = [*outcome, "further"], [*stats, {"further": 1}]
        case EngineReport():
            fields[3], fields[4] = [*fields[3], 1], [*fields[4], 1.0]
    return msgspec.msgpack.encode([*fields, "further"])


@pytest.mark.parametrize(
    "message",
    [OUTPUTS, REPORT, announcement(), announcement(kv_endpoint=b"x", kv_bytes_per_token=96)],
)
def test_further_fields_of_later_versions_are_ignored(message: Any) -> None:
    assert decode_for_router(encode(message)) == message
    assert decode_for_router(later(message)) == message


@pytest.mark.parametrize(
    "fields",
    [
        ["EngineReport", "ready"],
        ["EngineReport", "ready", "", [1, 2, "three"]],
        ["EngineReport", "ready", "", 5],
        ["EngineOutputs", [["1"], [2], [], []], []],
        ["SubmitRequest", 1],
        ["Unknown"],
        [],
        5,
    ],
)
def test_what_no_version_sends(fields: Any) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_for_router(msgspec.msgpack.encode(fields))


def test_requests_that_cannot_be_read_are_rejected() -> None:
    fields = msgspec.msgpack.decode(encode(request(5, [1], n=2)))
    fields[2] = [-1]
    rejected = decode_for_engine(msgspec.msgpack.encode(fields))
    assert isinstance(rejected, RejectedRequest)
    assert (rejected.seq, rejected.n) == (5, 2)
    with pytest.raises(msgspec.DecodeError):
        decode_for_engine(encode(announcement()))


def test_versions() -> None:
    assert is_compatible(PROTOCOL, OLDEST_PROTOCOL)
    assert is_compatible(PROTOCOL + 1, PROTOCOL)
    assert not is_compatible(PROTOCOL + 2, PROTOCOL + 1)
    assert not is_compatible(OLDEST_PROTOCOL - 1, OLDEST_PROTOCOL - 2)


@pytest.mark.parametrize("kind", [ReleaseKvHolds, RenewKvHolds])
def test_commands_about_held_blocks_are_bounded(kind: Any) -> None:
    message = kind([1, 2**63 - 1])
    assert decode_for_engine(encode(message)) == decode_for_worker(encode(message)) == message
    for tickets in ([0], [2**63], [1] * (MAX_TICKETS + 1)):
        with pytest.raises(msgspec.DecodeError):
            decode_for_engine(encode(kind(tickets)))


def test_a_request_with_an_impossible_source_is_rejected() -> None:
    source = KvSource("one", 3, 2**62, 4, b"endpoint")
    message = msgspec.structs.replace(request(5, [1], n=1), kv_ticket=8, kv_source=source)
    assert decode_for_engine(encode(message)) == message
    fields = msgspec.msgpack.decode(encode(message))
    fields[1 + SubmitRequest.__struct_fields__.index("kv_source")][2] = 0
    rejected = decode_for_engine(msgspec.msgpack.encode(fields))
    assert isinstance(rejected, RejectedRequest)
    assert "kv_source" in rejected.error
