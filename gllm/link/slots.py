"""Slots of a ring as frames, and frames as slots.

A step travels as one frame with its slot's header and error text, at offset 0, and frames with its
activations, in order, from offset PAGE_BYTES on.

A slot may be overwritten while it is sent: by the step that is `slots` later, which is planned once
the first one has committed. The receiving stage has read the first step by then, so its ring has
signalled that step before the overwriting began, and ignores all frames of the step since. Bytes of
two steps therefore never reach a stage. After a reconnection the sending end resends what the
receiving ring had not signalled by then, and so nothing that may be overwritten meanwhile.
"""

from dataclasses import dataclass
from typing import NamedTuple

from gllm.link.frames import EdgeName, FrameClass, FrameError, FrameHeader
from gllm.transport.ring import PAGE_BYTES, SLOT_HEADER, Ring, SlotHeader

MAX_STEP = 2**63 - 1


class StepFrames(NamedTuple):
    """Bytes that carry one step."""

    head: bytes
    """Frame with the slot's header and error, and the header of the frame with the payload."""
    payload: memoryview
    """Activations, in the slot's memory; empty for none."""


def read_step(ring: Ring, name: EdgeName, step: int) -> StepFrames | None:
    """Return the frames of a step that was signalled; None if the slot has a later step by now."""
    header = ring.header(step)
    if header.step != step or header.find_fault(ring.shape):
        return None
    begin = ring.offset(step)
    head = ring.memory[begin : begin + SLOT_HEADER.size + header.error_bytes]
    place = (*name, ring.slot(step), step)
    frames = FrameHeader(FrameClass.ACTIVATIONS, *place, 0, len(head)).pack() + head
    payload = memoryview(ring.memory)[ring.payload(step) :][: header.payload_bytes]
    if payload:
        length = len(payload)
        frames += FrameHeader(FrameClass.ACTIVATIONS, *place, PAGE_BYTES, length).pack()
    return StepFrames(frames, payload)


@dataclass(slots=True)
class _PartialStep:
    """Step whose header has arrived."""

    step: int
    next_offset: int
    end: int


class SlotWriter:
    """Receiver of the steps of one connection, which checks each frame before it writes a byte."""

    def __init__(self, ring: Ring) -> None:
        """Fill a ring."""
        self._ring = ring
        self._partial: dict[int, _PartialStep] = {}
        self._head = bytearray(PAGE_BYTES)

    def place(self, frame: FrameHeader) -> memoryview | None:
        """Return the memory for a frame's payload; None if the ring has the step already.

        Raises:
            FrameError: the frame does not fit.
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
        begin = ring.offset(frame.step) + frame.offset
        return memoryview(ring.memory)[begin : begin + frame.length]

    def finish(self, frame: FrameHeader) -> None:
        """Handle a frame whose payload is in its place; signal a step that is complete.

        Raises:
            FrameError: the slot's header does not fit.
        """
        if frame.offset == 0:
            self._begin_step(frame)
        else:
            self._partial[frame.slot].next_offset += frame.length
        partial = self._partial[frame.slot]
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
        end = PAGE_BYTES + header.payload_bytes
        self._partial[frame.slot] = _PartialStep(frame.step, PAGE_BYTES, end)
