"""Slots of a ring as frames, and frames as slots.

A step travels as one frame with its slot's header and error text, at offset 0, and frames with its
activations, in order, from offset PAGE_BYTES on; with an encoding, offsets and lengths are those of
the encoded bytes. Frames of other steps, of the same lane or another
one, may come between these.

A slot may be overwritten while it is sent again: by the step that is `slots` later in its lane,
which is planned once the first one has committed. The receiving stage has read the first step by
then, so its ring has signalled that step before the overwriting began, and ignores all frames of
the step since. Bytes of two steps therefore never reach a stage. A step of which bytes wait at the
sending end cannot have committed, so its slot keeps it. After a reconnection the sending end
resends what the receiving ring had not signalled by then, and so nothing that may be overwritten
meanwhile.
"""

from dataclasses import dataclass
from typing import NamedTuple

from gllm.transport.link.encodings import LinkEncoding, RowFormat
from gllm.transport.link.frames import FrameError, FrameHeader
from gllm.transport.ring import PAGE_BYTES, SLOT_HEADER, Ring, SlotHeader


class EncodedRows:
    """Encoded activations of a step as a sequence of bytes; rows are encoded when first read.

    Args:
        rows: activations in shared memory.
        row: format of a row of activations.
        encoding: encoding of the connection.
    """

    def __init__(self, rows: memoryview, row: RowFormat, encoding: LinkEncoding) -> None:
        self._rows, self._row, self._encoding = rows, row, encoding
        self._row_bytes = encoding.row_bytes(row)
        self._num_rows = len(rows) // row.num_bytes
        self._encoded = bytearray(self._num_rows * self._row_bytes)
        self._num_encoded = 0
        """Rows that are encoded."""

    def __len__(self) -> int:
        """Return the number of encoded bytes."""
        return len(self._encoded)

    def __getitem__(self, part: slice) -> memoryview:
        """Return a part of the encoded bytes."""
        begin, end, _ = part.indices(len(self._encoded))
        self._encode(min(self._num_rows, -(-end // self._row_bytes)))
        return memoryview(self._encoded)[begin:end]

    def _encode(self, end: int) -> None:
        """Encode the rows up to `end`."""
        begin, size = self._num_encoded, self._row.num_bytes
        if begin < end:
            rows = self._rows[begin * size : end * size]
            place = slice(begin * self._row_bytes, end * self._row_bytes)
            self._encoded[place] = self._encoding.encode(rows, self._row)
            self._num_encoded = end


class RowDecoder:
    """Buffer for encoded activations of a step, which decodes each row once it is complete.

    Args:
        rows: memory for the decoded activations.
        row: format of a row of activations.
        encoding: encoding of the connection.
    """

    def __init__(self, rows: memoryview, row: RowFormat, encoding: LinkEncoding) -> None:
        self._rows, self._row, self._encoding = rows, row, encoding
        self._row_bytes = encoding.row_bytes(row)
        self.encoded = memoryview(bytearray(len(rows) // row.num_bytes * self._row_bytes))
        """Memory for the encoded bytes, which arrive in order."""
        self._num_decoded = 0

    def decode(self, num_bytes: int) -> None:
        """Decode the rows that are complete once `num_bytes` bytes have arrived."""
        begin, end = self._num_decoded, num_bytes // self._row_bytes
        if begin < end:
            size, row_bytes = self._row.num_bytes, self._row_bytes
            rows = self._rows[begin * size : end * size]
            self._encoding.decode(
                self.encoded[begin * row_bytes : end * row_bytes], self._row, rows
            )
            self._num_decoded = end


MAX_STEP = 2**63 - 1


class StepBytes(NamedTuple):
    """Data of one step to send to another machine: number, header and activations."""

    step: int
    head: bytes
    """Header of the step, with the error text if any."""
    payload: memoryview | EncodedRows
    """Activations, in shared memory or encoded; empty if there are none."""


def read_step(ring: Ring, step: int, encoding: LinkEncoding | None = None) -> StepBytes | None:
    """Return the header and activations of a step; None if its buffer holds a later step by now.

    Args:
        ring: ring buffer of the worker.
        step: number of a step that the worker has signalled.
        encoding: encoding of the connection; None to send the activations unchanged.
    """
    header = ring.header(step)
    if header.step != step or header.find_fault(ring.shape):
        return None
    begin = ring.offset(step)
    head = ring.memory[begin : begin + SLOT_HEADER.size + header.error_bytes]
    payload = memoryview(ring.memory)[ring.payload(step) :][: header.payload_bytes]
    if encoding is None:
        return StepBytes(step, head, payload)
    return StepBytes(step, head, EncodedRows(payload, _row_of(ring), encoding))


@dataclass(slots=True)
class _PartialStep:
    """Step whose header has arrived."""

    step: int
    next_offset: int
    end: int
    decoder: RowDecoder | None
    """Memory for encoded activations; None if they go to the slot."""


class SlotWriter:
    """Writes activations received on one connection into the step buffers of a worker's ring.

    Each message is checked before any byte is written.
    """

    def __init__(self, ring: Ring, encoding: LinkEncoding | None = None) -> None:
        """Write to a ring buffer.

        Args:
            ring: ring buffer of the worker.
            encoding: encoding of the connection; None if activations are not encoded.
        """
        self._ring, self._encoding = ring, encoding
        self._partial: dict[int, _PartialStep] = {}
        self._head = bytearray(PAGE_BYTES)

    def place(self, frame: FrameHeader) -> memoryview | None:
        """Return the memory for the payload of a message; None if the step was already received.

        Raises:
            FrameError: step, buffer or length are not the expected ones.
        """
        ring, shape = self._ring, self._ring.shape
        if frame.slot >= shape.slots or frame.step > MAX_STEP:
            raise FrameError(f"step {frame.step} in slot {frame.slot} of {shape.slots}")
        if frame.slot != ring.slot(frame.step):
            raise FrameError(f"step {frame.step} is in slot {frame.slot}")
        if frame.offset + frame.length > ring.stride:
            raise FrameError(f"bytes up to {frame.offset + frame.length} of {ring.stride}")
        if ring.has_signalled(frame.step):
            return None
        partial = self._partial.get(frame.slot)
        if frame.offset == 0:
            if partial is not None:
                raise FrameError(f"step {frame.step} before the end of step {partial.step}")
            if not SLOT_HEADER.size <= frame.length <= PAGE_BYTES:
                raise FrameError(f"a slot's header of {frame.length} bytes")
            return memoryview(self._head)[: frame.length]
        if partial is None or (partial.step, partial.next_offset) != (frame.step, frame.offset):
            raise FrameError(f"bytes {frame.offset} of step {frame.step} are out of order")
        if not 0 < frame.length <= partial.end - frame.offset:
            raise FrameError(f"{frame.length} bytes, {partial.end - frame.offset} are missing")
        if partial.decoder is not None:
            return partial.decoder.encoded[frame.offset - PAGE_BYTES :][: frame.length]
        begin = ring.offset(frame.step) + frame.offset
        return memoryview(ring.memory)[begin : begin + frame.length]

    def finish(self, frame: FrameHeader) -> None:
        """Process a message after its payload was received; signal the step once it is complete.

        Raises:
            FrameError: the step's header does not fit the ring.
        """
        if frame.offset == 0:
            self._begin_step(frame)
        partial = self._partial[frame.slot]
        if frame.offset > 0:
            partial.next_offset += frame.length
            if partial.decoder is not None:
                partial.decoder.decode(partial.next_offset - PAGE_BYTES)
        if partial.next_offset == partial.end:
            del self._partial[frame.slot]
            self._ring.signal_written(frame.step)

    def _begin_step(self, frame: FrameHeader) -> None:
        header = SlotHeader(*SLOT_HEADER.unpack_from(self._head))
        fault = header.find_fault(self._ring.shape)
        if header.step != frame.step:
            fault = f"the header of step {header.step}"
        elif frame.length != SLOT_HEADER.size + header.error_bytes:
            fault = f"{frame.length} bytes with an error text of {header.error_bytes}"
        if fault:
            raise FrameError(f"step {frame.step} has {fault}")
        begin = self._ring.offset(frame.step)
        self._ring.memory[begin : begin + frame.length] = self._head[: frame.length]
        num_bytes, decoder = header.payload_bytes, None
        if self._encoding is not None:
            rows = memoryview(self._ring.memory)[self._ring.payload(frame.step) :][:num_bytes]
            decoder = RowDecoder(rows, _row_of(self._ring), self._encoding)
            num_bytes = len(decoder.encoded)
        end = PAGE_BYTES + num_bytes
        self._partial[frame.slot] = _PartialStep(frame.step, PAGE_BYTES, end, decoder)


def _row_of(ring: Ring) -> RowFormat:
    """Return the format of a token's activations."""
    return RowFormat(ring.shape.hidden_size, ring.shape.itemsize, ring.shape.is_bfloat16)
