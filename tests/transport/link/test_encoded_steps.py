"""Encoded steps between rings: contents, sizes, chunks of any size, other encodings refused."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.pacing.traffic import Chunk, LinkView, WaitingMessage
from gllm.transport.base import EdgeLayout, StepFailedError
from gllm.transport.link.commands import LinkEdgeLost, LinkReport
from gllm.transport.link.encodings import RowFormat
from gllm.transport.link.int8_encoding import Int8Encoding
from gllm.transport.link.sender import SendQueue
from gllm.transport.link.slots import SlotWriter, read_step
from gllm.transport.ring import Ring
from tests.support.examples import num_examples
from tests.support.network.mover_processes import Files, Mover, connect, write_step
from tests.support.network.mover_processes import read_step as receive_step
from tests.transport.link.test_frames import NAME, close, send

HIDDEN = 96
BFLOAT16 = EdgeLayout(slots=4, max_tokens=64, hidden_size=HIDDEN, itemsize=2, is_bfloat16=True)


def write_values(ring: Ring, step: int, tokens: int) -> bytes:
    """Send random bfloat16 as a worker does, and return what int8 makes of them."""
    values = np.random.default_rng(step).normal(size=(tokens, HIDDEN)).astype(np.float32)
    rows = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    begin = ring.payload(step)
    ring.memory[begin : begin + len(rows)] = rows
    ring.signal(step, tokens)
    encoding, received = Int8Encoding(), bytearray(len(rows))
    row = RowFormat(HIDDEN, 2, is_bfloat16=True)
    encoding.decode(encoding.encode(memoryview(rows), row), row, memoryview(received))
    assert bytes(received) != rows
    return bytes(received)


class SizedChunks:
    """Link policy that sends the oldest step in chunks of one size."""

    uses_slack = False
    sends_whole = False

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def select(self, waiting: Sequence[WaitingMessage], view: LinkView) -> Chunk:
        return Chunk(0, min(self.num_bytes, waiting[0].remaining_bytes))


@settings(max_examples=num_examples(8, 300))
@given(st.integers(60, 5000), st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_encoded_steps_pass_from_ring_to_ring(chunk_bytes: int, steps: list[int]) -> None:
    """A step of no tokens has failed."""
    ends, encoding = (Files(), Files()), Int8Encoding()
    source, target = (files.ring(BFLOAT16) for files in ends)
    writer = SlotWriter(target, encoding)
    for step, tokens in enumerate(steps):
        if tokens:
            expected = write_values(source, step, tokens)
        else:
            write_step(source, step, 0, 0, "out of memory")
        queue = SendQueue(NAME, SizedChunks(chunk_bytes))
        data = read_step(source, step, encoding)
        assert data is not None
        assert len(data.payload) == tokens * (HIDDEN + 2)
        queue.add(0, source.slot(step), data)
        while queue:
            assert not target.has_signalled(step)
            headers, payload = queue.pop(LinkView(0.0, 1e6, None))
            send(writer, headers + bytes(payload))
        if tokens:
            assert receive_step(target, step, tokens) == expected
        else:
            with pytest.raises(StepFailedError, match="out of memory"):
                target.wait(step, 3)
    close(*ends)


def test_data_movers_encode_what_they_send() -> None:
    with Mover("head", encoding="int8") as source, Mover("other", encoding="int8") as target:
        sent, received = (files.ring(BFLOAT16) for files in connect(source, target))
        for step in range(20):
            expected = write_values(sent, step, 64)
            assert receive_step(received, step, 64) == expected
        least = 20 * 64 * (HIDDEN + 2)
        report = source.wait_for(LinkReport, lambda each: each.links[0].num_bytes > least)
        assert report.links[0].num_bytes < 1.05 * least < 0.6 * 20 * 64 * 2 * HIDDEN


def test_other_encoding_is_refused_with_both_names() -> None:
    with Mover("head", encoding="int8") as source, Mover("other") as target:
        connect(source, target, waits=False)
        lost = source.wait_for(LinkEdgeLost)
        assert "head has --link-encoding int8, other has plain" in lost.cause
        assert "give all machines the same" in lost.cause


@pytest.mark.full
def test_formats_that_differ_are_refused() -> None:
    with Mover("head", encoding="int8") as source, Mover("other", encoding="int8") as target:
        sent, received = connect(source, target)
        received.ring(EdgeLayout(slots=4, max_tokens=64, hidden_size=HIDDEN, itemsize=2))
        write_values(sent.ring(BFLOAT16), 0, 1)
        assert "is_bfloat16=True" in target.wait_for(LinkEdgeLost).cause
