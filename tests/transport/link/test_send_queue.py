"""Steps of two lanes as chunks of one connection: complete, and decodes not behind prefills."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.pacing.policy_registry import make_link_policy
from gllm.pacing.traffic import Chunk, LinkView, TrafficClass, WaitingMessage
from gllm.transport.base import EdgeLayout
from gllm.transport.link.frames import FRAME, EdgeName, FrameHeader, unpack_frame
from gllm.transport.link.sender import LinkChunk, SendQueue
from gllm.transport.link.slots import SlotWriter, read_step
from gllm.transport.ring import Ring
from tests.support.examples import num_examples
from tests.support.network.mover_processes import Files, payload_of, write_step
from tests.support.scheduler.link_messages import EVERY_LINK_POLICY

NAME = EdgeName(7, 1, 2)
LAYOUTS = (
    EdgeLayout(slots=3, max_tokens=4, hidden_size=6, itemsize=4),
    EdgeLayout(slots=2, max_tokens=600, hidden_size=24, itemsize=4),
)
"""Rings of decodes and of prefills: the latter need several chunks of 16 KiB."""


def frames_of(chunk: LinkChunk) -> list[tuple[FrameHeader, bytes]]:
    data, frames = chunk.headers + bytes(chunk.payload), []
    while data:
        header, data = unpack_frame(data), data[FRAME.size :]
        frames.append((header, data[: header.length]))
        data = data[header.length :]
    return frames


class Lanes:
    """Both ends of an edge with two lanes, and the stages that use them."""

    def __init__(self, policy: str) -> None:
        self.files = [Files.of_lanes(2) for _ in range(2)]
        self.sources, self.targets = (
            [files.ring(layout, lane) for lane, layout in enumerate(LAYOUTS)]
            for files in self.files
        )
        self.reconnect(policy)
        self.num_written, self.num_read = [0, 0], [0, 0]
        self.tokens: list[list[int]] = [[], []]

    def reconnect(self, policy: str) -> None:
        """Queue again what the receiving rings do not have."""
        self.queue = SendQueue(NAME, make_link_policy(EVERY_LINK_POLICY[policy]))
        self.writers = [SlotWriter(ring) for ring in self.targets]
        for lane, (source, target) in enumerate(zip(self.sources, self.targets, strict=True)):
            signalled = [step for step in source.signalled_steps if step is not None]
            for step in sorted(signalled):
                if not target.has_signalled(step):
                    self._queue(lane, source, step)

    def write(self, lane: int, tokens: int) -> bool:
        """Let the sending stage signal a step, if a slot is free."""
        turn = self.num_written[lane]
        if turn - self.num_read[lane] == LAYOUTS[lane].slots:
            return False
        tokens = 1 + tokens % LAYOUTS[lane].max_tokens
        self.tokens[lane].append(tokens)
        write_step(self.sources[lane], turn, tokens, self._value(lane, turn))
        self._queue(lane, self.sources[lane], turn)
        self.num_written[lane] += 1
        return True

    def move_chunk(self, slack: float | None) -> list[FrameHeader]:
        """Send a chunk, and let the receiving stage read the steps that are complete."""
        frames = frames_of(self.queue.pop(LinkView(0.0, 1e6, slack)))
        for header, payload in frames:
            writer = self.writers[header.lane]
            place = writer.place(header)
            assert place is not None
            place[:] = payload
            writer.finish(header)
        for lane, ring in enumerate(self.targets):
            while ring.has_signalled(self.num_read[lane]):
                self._read(lane, ring)
        return [header for header, _ in frames]

    def close(self) -> None:
        for files in self.files:
            files.close()

    def _queue(self, lane: int, source: Ring, step: int) -> None:
        data = read_step(source, step)
        assert data is not None
        self.queue.add(lane, source.slot(step), data)

    def _read(self, lane: int, ring: Ring) -> None:
        turn = self.num_read[lane]
        size = self.tokens[lane][turn] * ring.shape.hidden_size * ring.shape.itemsize
        begin = ring.payload(turn)
        assert ring.memory[begin : begin + size] == payload_of(self._value(lane, turn), size)
        self.num_read[lane] += 1

    @staticmethod
    def _value(lane: int, turn: int) -> int:
        return 1000 * lane + turn


OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 599)),
    st.tuples(st.just("move"), st.one_of(st.none(), st.floats(-1, 1))),
    st.just(("reconnect",)),
)


@settings(max_examples=num_examples(40, 1000), deadline=None)
@given(st.sampled_from(sorted(EVERY_LINK_POLICY)), st.lists(OPERATIONS, max_size=40))
def test_steps_of_both_lanes_arrive_whatever_is_cut(policy: str, operations: list) -> None:
    """Slots are reused as soon as their steps are read, and connections break between chunks."""
    lanes = Lanes(policy)
    for name, *arguments in operations:
        if name == "write":
            lanes.write(*arguments)
        elif name == "reconnect":
            lanes.reconnect(policy)
        elif lanes.queue:
            lanes.move_chunk(*arguments)
    while lanes.queue:
        before = lanes.queue.num_bytes
        lanes.move_chunk(None)
        assert lanes.queue.num_bytes == before - lanes.queue.last_chunk_bytes < before
    assert lanes.num_read == lanes.num_written
    assert not lanes.queue.has_prefill
    lanes.close()


@pytest.mark.parametrize("policy", ["molink", "molink-paper"])
def test_a_decode_goes_between_the_chunks_of_a_prefill(policy: str) -> None:
    lanes = Lanes(policy)
    lanes.write(TrafficClass.PREFILL, 599)
    # Without slack a chunk is as small as possible.
    assert {header.lane for header in lanes.move_chunk(0.0)} == {TrafficClass.PREFILL}
    lanes.write(TrafficClass.DECODE, 1)
    assert {header.lane for header in lanes.move_chunk(0.0)} == {TrafficClass.DECODE}
    assert lanes.num_read == [1, 0]
    while lanes.queue:
        lanes.move_chunk(0.0)
    assert lanes.num_read == [1, 1]
    lanes.close()


class HeadFirst:
    """Policy that selects single bytes: the smallest chunks that there can be."""

    uses_slack = False
    sends_whole = False

    def select(self, waiting: Sequence[WaitingMessage], view: LinkView) -> Chunk:
        return Chunk(len(waiting) - 1, 1)


def test_single_bytes_are_frames_that_fit() -> None:
    lanes = Lanes("serial")
    lanes.queue = SendQueue(NAME, HeadFirst())
    lanes.write(0, 1)
    lanes.write(1, 0)
    lanes.write(0, 0)
    num_chunks = 0
    while lanes.queue:
        assert all(header.length for header in lanes.move_chunk(None))
        num_chunks += 1
    # A chunk with a head has one byte of the payload too.
    assert num_chunks == sum(
        tokens * layout.hidden_size * layout.itemsize
        for tokens, layout in ((2, LAYOUTS[0]), (1, LAYOUTS[1]), (1, LAYOUTS[0]))
    )
    assert lanes.num_read == [2, 1]
    lanes.close()


def test_errors_have_no_payload() -> None:
    lanes = Lanes("molink")
    write_step(lanes.sources[1], 0, 3, 1, "out of memory")
    data = read_step(lanes.sources[1], 0)
    assert data is not None
    lanes.queue.add(1, 0, data)
    assert lanes.queue.has_prefill
    chunk = lanes.queue.pop(LinkView(0.0, 0.0, 0.0))
    assert (not lanes.queue, len(chunk.payload)) == (True, 0)
    (frame,) = frames_of(chunk)
    assert frame[1].endswith(b"out of memory")
    lanes.close()
