"""Encodings of activations: sizes, errors, limits, rows one by one, and whole steps."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gllm.config.link_encodings import LINK_ENCODINGS
from gllm.pacing.traffic import Chunk, LinkView, WaitingMessage
from gllm.transport.base import EdgeLayout, StepFailedError
from gllm.transport.link.commands import LinkEdgeLost, LinkReport
from gllm.transport.link.encodings import LinkEncoding, RowFormat, make_encoding
from gllm.transport.link.int8_encoding import BLOCK_ELEMENTS, Int8Encoding
from gllm.transport.link.sender import SendQueue
from gllm.transport.link.slots import EncodedRows, RowDecoder, SlotWriter, read_step
from gllm.transport.ring import Ring
from tests.support.examples import num_examples
from tests.support.network.mover_processes import Files, Mover, connect, write_step
from tests.support.network.mover_processes import read_step as receive_step
from tests.transport.link.test_frames import NAME, close
from tests.transport.link.test_frames import send as send_frames

HIDDEN = 96
BFLOAT16 = EdgeLayout(slots=4, max_tokens=64, hidden_size=HIDDEN, itemsize=2, is_bfloat16=True)

FORMATS = {torch.float32: (4, False), torch.bfloat16: (2, True), torch.float16: (2, False)}


def row_of(values: torch.Tensor) -> RowFormat:
    return RowFormat(values.shape[1], *FORMATS[values.dtype])


def memory_of(values: torch.Tensor) -> memoryview:
    return values.view(torch.uint8).reshape(-1).numpy().data


def send(encoding: LinkEncoding, values: torch.Tensor) -> torch.Tensor:
    """Return values [tokens, hidden] as the other machine receives them."""
    row, received = row_of(values), torch.full_like(values, 7.0)
    encoded = encoding.encode(memory_of(values), row)
    assert len(encoded) == len(values) * encoding.row_bytes(row)
    encoding.decode(encoded, row, memory_of(received))
    return received


def test_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'fp4' is none of plain, int8"):
        make_encoding("fp4")


@pytest.mark.parametrize("dtype", FORMATS)
def test_plain_rows_are_sent_from_their_own_memory(dtype: torch.dtype) -> None:
    values = torch.randn(5, 48).to(dtype)
    encoding = make_encoding("plain")
    memory = memory_of(values)
    assert encoding.encode(memory, row_of(values)) is memory
    assert torch.equal(send(encoding, values), values)


@pytest.mark.parametrize("hidden_size", [48, 192, 3584, 8192])
def test_int8_halves_the_bytes(hidden_size: int) -> None:
    """Also of the smallest models here; against 16 bits per element."""
    row = RowFormat(hidden_size, 2, True)
    assert make_encoding("int8").row_bytes(row) <= 0.53 * row.num_bytes


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=num_examples(25, 2000))
@given(data=st.data())
def test_int8_errors_are_half_a_level(dtype: torch.dtype, data: st.DataObject) -> None:
    largest = torch.finfo(dtype).max
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 9)))
    scale = data.draw(st.sampled_from([1e-30, 1e-3, 1.0, 300.0, 1e30]))
    floats = st.floats(-1, 1, width=32)
    drawn = torch.from_numpy(data.draw(arrays(np.float32, shape, elements=floats)))
    values = (drawn * scale).clamp(-largest, largest).to(dtype)
    received = send(Int8Encoding(), values)
    assert received.isfinite().all()
    levels = values.float().abs().amax(1, keepdim=True) / 127
    # Scales are bfloat16, and results are rounded to the format of the row.
    error = (received.double() - values.double()).abs()
    bound = levels.double() * 0.51 + received.abs().double() * torch.finfo(dtype).eps
    assert (error <= bound + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_largest_values_stay_finite(dtype: torch.dtype) -> None:
    values = torch.full((1, 3), torch.finfo(dtype).max, dtype=dtype)
    values[0, 1] = -values[0, 1]
    received = send(Int8Encoding(), values)
    assert received.isfinite().all()
    assert torch.allclose(received.double(), values.double(), rtol=0.01)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_token_that_is_not_finite_arrives_as_nan_alone(dtype: torch.dtype, bad: float) -> None:
    values = torch.randn(3, 40).to(dtype)
    values[1, 17] = bad
    received = send(Int8Encoding(), values)
    assert received[1].isnan().all()
    assert received[[0, 2]].isfinite().all()


def test_rows_of_more_elements_than_a_block_are_sent() -> None:
    values = torch.randn(3, BLOCK_ELEMENTS + 1)
    errors = (send(Int8Encoding(), values) - values).abs()
    assert (errors <= 0.51 * values.abs().amax(1, keepdim=True) / 127 + 1e-6).all()


def test_zeros_and_levels_are_exact() -> None:
    values = torch.zeros(2, 4)
    values[1] = torch.tensor([127.0, -127.0, 3.0, 0.0])
    assert torch.equal(send(Int8Encoding(), values), values)


@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_can_be_decoded_as_they_arrive(dtype: torch.dtype) -> None:
    """Blocks of any size give the same bytes: 40 rows are several blocks of the encoder."""
    encoding, values = Int8Encoding(), torch.randn(40, 8000).to(dtype)
    row, received = row_of(values), torch.zeros_like(values)
    encoded, size = encoding.encode(memory_of(values), row), encoding.row_bytes(row_of(values))
    for index in range(40):
        assert (
            encoding.encode(memory_of(values[index : index + 1]), row)
            == (encoded[index * size : (index + 1) * size])
        )
    for begin, end in ((0, 1), (1, 17), (17, 40)):
        encoding.decode(encoded[begin * size : end * size], row, memory_of(received[begin:end]))
    assert torch.equal(received, send(encoding, values))


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=num_examples(25, 2000))
@given(data=st.binary(min_size=20, max_size=20))
def test_any_bytes_can_be_decoded(dtype: torch.dtype, data: bytes) -> None:
    received = torch.zeros(2, 8, dtype=dtype)
    Int8Encoding().decode(memoryview(data), row_of(received), memory_of(received))


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    values = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    encoding, row = Int8Encoding(), RowFormat(64, 4)
    exact = torch.zeros(50, 64)
    encoding.decode(encoding.encode(memory_of(values), row_of(values)), row, memory_of(exact))
    assert torch.equal(send(encoding, values), exact.to(torch.bfloat16))


@pytest.mark.parametrize("name", LINK_ENCODINGS)
@settings(max_examples=num_examples(30, 1000))
@given(num_rows=st.integers(0, 7), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_chunks_of_any_size_are_encoded_and_decoded(
    name: str, num_rows: int, cuts: list[int]
) -> None:
    values = torch.randn(num_rows, 24, generator=torch.Generator().manual_seed(num_rows))
    encoding, row, received = make_encoding(name), row_of(values), torch.zeros_like(values)
    sent = EncodedRows(memory_of(values), row, encoding)
    decoder = RowDecoder(memory_of(received), row, encoding)
    assert len(sent) == len(decoder.encoded) == num_rows * encoding.row_bytes(row)
    ends = sorted(min(cut, len(sent)) for cut in cuts)
    for begin, end in zip([0, *ends], [*ends, len(sent)], strict=True):
        part = sent[begin:end]
        assert len(part) == end - begin
        decoder.encoded[begin:end] = part
        decoder.decode(end)
    assert torch.equal(received, send(encoding, values))


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
            send_frames(writer, headers + bytes(payload))
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
        report = source.wait_for(LinkReport, lambda report: report.links[0].num_bytes > least)
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
