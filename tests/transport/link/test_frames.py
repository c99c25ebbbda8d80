"""Headers of frames and slots: what is packed comes back, and what does not fit writes nothing."""

import os
import socket
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.pacing.policies.serial import SerialPolicy
from gllm.pacing.traffic import LinkView
from gllm.transport.base import EdgeLayout
from gllm.transport.link.connection import FrameConnection
from gllm.transport.link.encodings import LinkEncoding
from gllm.transport.link.frames import (
    FRAME,
    MAX_BYTES,
    EdgeHello,
    EdgeName,
    EdgeResume,
    FrameClass,
    FrameError,
    FrameHeader,
    decode_payload,
    encode_payload,
    unpack_frame,
)
from gllm.transport.link.int8_encoding import Int8Encoding
from gllm.transport.link.sender import LinkChunk, SendQueue
from gllm.transport.link.slots import SlotWriter, read_step
from gllm.transport.ring import PAGE_BYTES, SLOT_HEADER, Ring, SlotHeader
from tests.support.examples import num_examples
from tests.support.network.mover_processes import Files, payload_of, write_step
from tests.support.network.records import replaced

LAYOUT = EdgeLayout(slots=3, max_tokens=4, hidden_size=6, itemsize=4)
NAME = EdgeName(2**64 - 1, 2**32 - 1, 2**16 - 1)


def number(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


@given(st.tuples(*(number(bits) for bits in (64, 32, 16, 8, 16, 64, 32, 32))))
def test_headers_come_back(fields: tuple[int, ...]) -> None:
    header = FrameHeader(FrameClass.ACTIVATIONS, *fields)
    assert unpack_frame(header.pack()) == header
    assert len(header.pack()) == FRAME.size == 37


@given(st.binary(min_size=FRAME.size, max_size=FRAME.size), st.booleans())
def test_any_bytes_are_a_header_or_an_error(data: bytes, has_magic: bool) -> None:
    data = (b"gA\2" + data[3:]) if has_magic else data
    try:
        header = unpack_frame(data)
    except FrameError:
        return
    assert header.pack() == data
    assert header.length <= MAX_BYTES[header.frame_class]


@pytest.mark.parametrize("frame_class", [each for each in FrameClass if each])
def test_other_frames_are_limited_and_name_no_slot(frame_class: FrameClass) -> None:
    header = FrameHeader(frame_class, *NAME, 0, 0, 0, 0, MAX_BYTES[frame_class])
    assert unpack_frame(header.pack()) == header
    longer = replaced(header, length=header.length + 1)
    for invalid in (longer, replaced(header, slot=1), replaced(header, step=1)):
        with pytest.raises(FrameError, match=frame_class.name):
            unpack_frame(invalid.pack())


@pytest.mark.parametrize("field", ["run", "epoch", "edge"])
def test_a_frame_of_another_edge_is_named(field: str) -> None:
    header = FrameHeader(FrameClass.ACTIVATIONS, *NAME, 0, 0, 0, 0, 0)
    assert NAME.find_difference(header) == ""
    assert field in NAME.find_difference(replaced(header, **{field: 1}))


@given(st.binary(max_size=64))
def test_any_payload_is_valid_or_an_error(data: bytes) -> None:
    with suppress(FrameError):
        hello = decode_payload(data, EdgeHello)
        assert decode_payload(encode_payload(hello), EdgeHello) == hello
    with suppress(FrameError):
        resume = decode_payload(data, EdgeResume)
        assert decode_payload(encode_payload(resume), EdgeResume) == resume


def send(writer: SlotWriter, data: bytes) -> None:
    """Let a writer receive a byte stream, as the receiving end does."""
    while data:
        header, data = unpack_frame(data), data[FRAME.size :]
        payload, data = data[: header.length], data[header.length :]
        place = writer.place(header)
        if place is not None:
            place[:] = payload
            writer.finish(header)


def stream_of(source: Ring, step: int) -> bytes:
    headers, payload = chunk_of(source, step)
    return headers + bytes(payload)


def chunk_of(source: Ring, step: int) -> LinkChunk:
    """Return a whole step as one chunk."""
    queue = SendQueue(NAME, SerialPolicy())
    data = read_step(source, step)
    assert data is not None
    queue.add(0, source.slot(step), data)
    chunk = queue.pop(LinkView(0.0, 0.0, None))
    assert not queue
    return chunk


@settings(max_examples=num_examples(10, 500))
@given(st.lists(st.tuples(st.integers(0, 4), st.text(max_size=20)), max_size=12))
def test_steps_pass_from_ring_to_ring(steps: list[tuple[int, str]]) -> None:
    ends = Files(), Files()
    source, target = (files.ring(LAYOUT) for files in ends)
    writer = SlotWriter(target)
    for step, (tokens, error) in enumerate(steps):
        write_step(source, step, tokens, step, error)
        data = stream_of(source, step)
        send(writer, data)
        assert target.has_signalled(step)
        assert target.header(step) == source.header(step)
        size = target.header(step).payload_bytes
        begin = target.payload(step)
        assert target.memory[begin : begin + size] == payload_of(step, size)
        # A second time, and in any part, it changes nothing.
        before = target.memory[:]
        source.memory[source.payload(step)] ^= 255
        send(writer, stream_of(source, step))
        assert target.memory[:] == before
        assert os.eventfd_read(ends[1].event) == 1
    close(*ends)


def close(*ends: Files) -> None:
    for files in ends:
        files.close()


class RecordingSocket(socket.socket):
    """Socket that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        self.sent.append(bytes(data))


def test_a_decode_step_is_sent_at_once() -> None:
    """Header and activations fill one TLS record."""
    files = Files()
    ring = files.ring(EdgeLayout(slots=1, max_tokens=1, hidden_size=1792, itemsize=2))
    write_step(ring, 0, 1, 5)
    headers, payload = chunk_of(ring, 0)
    with RecordingSocket() as connection:
        FrameConnection(connection).send(headers, payload)
        assert connection.sent == [headers + payload_of(5, 3584)]
    close(files)


FIELDS = {
    "slot": st.one_of(st.integers(0, 4), number(16)),
    "step": st.one_of(st.integers(0, 9), number(64)),
    "offset": st.one_of(
        st.sampled_from([0, 1, PAGE_BYTES, PAGE_BYTES + 24, PAGE_BYTES + 96]), number(32)
    ),
    "length": st.one_of(
        st.sampled_from([0, SLOT_HEADER.size, SLOT_HEADER.size + 5, 24, 96, PAGE_BYTES]),
        number(32),
    ),
}
HEADS = st.builds(
    SlotHeader,
    st.one_of(st.integers(0, 9), number(64)),
    st.one_of(st.integers(0, 5), number(32)),
    st.one_of(st.just(6), number(32)),
    st.one_of(st.just(4), number(32)),
    st.one_of(st.sampled_from([0, 5]), number(32)),
    st.one_of(st.sampled_from([0, 24, 96]), number(64)),
)


@pytest.mark.parametrize("encoding", [None, Int8Encoding()])
@settings(max_examples=num_examples(40, 5000))
@given(st.lists(st.tuples(st.fixed_dictionaries(FIELDS), HEADS), min_size=1, max_size=8))
def test_frames_write_within_their_slot_or_not_at_all(
    encoding: LinkEncoding | None, frames: list
) -> None:
    """Any frames, most of them invalid: nothing changes outside the slot, or before the check."""
    files = Files()
    ring = files.ring(LAYOUT)
    writer = SlotWriter(ring, encoding)
    for fields, head in frames:
        header = FrameHeader(FrameClass.ACTIVATIONS, *NAME, lane=0, **fields)
        before = ring.memory[:]
        try:
            place = writer.place(header)
            if place is None:
                assert ring.has_signalled(header.step)
                continue
            assert len(place) == header.length
            place[:] = (SLOT_HEADER.pack(*head) + b"e" * PAGE_BYTES)[: len(place)]
            writer.finish(header)
        except FrameError:
            assert ring.memory[:] == before
            break
        begin = ring.offset(header.step)
        outside = slice(64 + 8 * LAYOUT.slots, begin), slice(begin + ring.stride, None)
        assert all(ring.memory[:][part] == before[part] for part in outside)
        if ring.has_signalled(header.step):
            assert ring.header(header.step).step == header.step
            assert ring.header(header.step).find_fault(LAYOUT) == ""
    close(files)


@settings(max_examples=num_examples(15, 500))
@given(
    st.permutations([(lane, step) for lane in range(2) for step in range(LAYOUT.slots)]),
    st.lists(st.integers(1, 4), min_size=6, max_size=6),
)
def test_frames_of_a_lane_write_to_its_ring_alone(
    order: list[tuple[int, int]], sizes: list[int]
) -> None:
    """Steps of two lanes on one connection in any order: each lane has its own, in its slots."""
    ends = Files.of_lanes(2), Files.of_lanes(2)
    sources, targets = ([files.ring(LAYOUT, lane) for lane in range(2)] for files in ends)
    writers = [SlotWriter(ring) for ring in targets]
    queue = SendQueue(NAME, SerialPolicy())
    for (lane, step), tokens in zip(order, sizes, strict=True):
        write_step(sources[lane], step, tokens, 10 * lane + step)
        data = read_step(sources[lane], step)
        assert data is not None
        queue.add(lane, sources[lane].slot(step), data)
    while queue:
        headers, payload = queue.pop(LinkView(0.0, 0.0, None))
        frames = headers + bytes(payload)
        lane = unpack_frame(frames).lane
        before = [ring.memory[:] for ring in targets]
        send(writers[lane], frames)
        others = [ring.memory[:] == earlier for ring, earlier in zip(targets, before, strict=True)]
        assert all(others[:lane] + others[lane + 1 :])
    for (lane, step), tokens in zip(order, sizes, strict=True):
        ring = targets[lane]
        assert ring.header(step).payload_bytes == tokens * 24
        begin = ring.payload(step)
        assert ring.memory[begin : begin + tokens * 24] == payload_of(10 * lane + step, tokens * 24)
    close(*ends)


@pytest.mark.parametrize("seed", range(4))
def test_slot_of_a_later_step_is_not_read_as_the_earlier_one(seed: int) -> None:
    files = Files()
    ring = files.ring(LAYOUT)
    write_step(ring, seed, 2, 1)
    write_step(ring, seed + 3, 2, 1)
    assert read_step(ring, seed) is None
    assert read_step(ring, seed + 3) is not None
    close(files)
