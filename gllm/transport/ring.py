"""Ring of slots in memory that two processes share, and the event that counts its steps.

The processes are the workers at both ends of an edge, or a worker and the data mover of its machine
(gllm/transport/link). This module imports no torch.

A step uses slot step % slots, and at most `slots` steps are in flight. With two lanes each has a
ring of its own, and `step` is the number of a step within its lane. The previous step
of a slot has committed, so its readers are done, before the next one is planned; the receiver
therefore needs no signal back to the sender.

Memory: a control area of whole pages, then the slots. The control area holds the layout, and for
each slot the step that was signalled last. A slot is a page with the header of its step and the
text of an error, then the activations. Numbers have the byte order of the machine that wrote them,
which is little-endian on all supported ones.
"""

import mmap
import os
import struct
import threading
import time
from typing import NamedTuple

from gllm.transport.base import EdgeClosedError, EdgeLayout, StepFailedError, TransportError

PAGE_BYTES = 4096
"""Bytes reserved for a header and an error, and alignment of slots."""
SLOT_HEADER = struct.Struct("<QIIIIQ")
"""Fields of SlotHeader."""
MAX_ERROR_BYTES = PAGE_BYTES - SLOT_HEADER.size
"""Longest error text; the rest is cut off."""
_LAYOUT = struct.Struct("<QIIIII")
"""Magic number, and the fields of EdgeLayout."""
_MAGIC = 0x3130_6772_6D6C_6C67
"""Mark of version 1 of this memory, written last."""
_IS_RELAYED_OFFSET = 32
"""Offset of a byte that is 1 if a data mover fills the ring."""
_BEGUN_OFFSET = 40
"""Offset of the step that the sending stage began to compute last, and the time of that."""
_BEGUN = struct.Struct("<QQ")
"""A step plus 1, 0 for none; time.monotonic_ns()."""
_SIGNALLED_OFFSET = 64
"""Offset of the steps that were signalled last, one per slot."""
_SIGNALLED = struct.Struct("<Q")
"""A step plus 1; 0 for none."""


class SlotHeader(NamedTuple):
    """Header of a step's buffer in the ring: step, shape of the activations, error length."""

    step: int
    tokens: int
    hidden_size: int
    itemsize: int
    """Bytes per element."""
    error_bytes: int
    """Length of an error text in place of activations; 0 for none."""
    payload_bytes: int
    """Length of the activations; 0 if they are sent in another way."""

    def find_fault(self, layout: EdgeLayout) -> str:
        """Return why a step with this header does not fit into a ring; empty if it fits."""
        sizes = (self.hidden_size, self.itemsize)
        if sizes != (layout.hidden_size, layout.itemsize):
            expected = f"{layout.hidden_size} of {layout.itemsize} bytes"
            return f"activations of {sizes[0]} elements of {sizes[1]} bytes, expected {expected}"
        if self.tokens > layout.max_tokens:
            return f"{self.tokens} tokens, at most {layout.max_tokens} fit"
        if self.error_bytes > MAX_ERROR_BYTES:
            return f"an error text of {self.error_bytes} bytes, at most {MAX_ERROR_BYTES} fit"
        payload = self.tokens * self.hidden_size * self.itemsize
        if self.payload_bytes not in (0, payload):
            return f"{self.payload_bytes} bytes of activations, expected {payload}"
        return ""


class Ring:
    """Ring buffer in shared memory for the activations of the steps in flight, with an eventfd.

    One process writes, the other one reads. Pages use memory once they are written.
    """

    def __init__(self, memory: int, event: int, layout: EdgeLayout) -> None:
        """Map the memory, and initialize it unless the other process has done so.

        Args:
            memory: descriptor of the memory, which may be closed afterwards.
            event: eventfd, which must stay open.
            layout: shape and dtype of activations, and number of step buffers.

        Raises:
            TransportError: the other process has initialized it with another layout.
        """
        self.event, self.shape = event, layout
        payload = layout.max_tokens * layout.hidden_size * layout.itemsize
        self.stride = round_up_to_pages(PAGE_BYTES + payload)
        """Bytes from the buffer of one step to the next one."""
        self._begin = round_up_to_pages(_SIGNALLED_OFFSET + layout.slots * _SIGNALLED.size)
        size = self._begin + self.stride * layout.slots
        if existing := _read_layout(memory):
            if existing != layout:
                raise TransportError(f"the ends of an edge have {existing} and {layout}")
        else:
            os.ftruncate(memory, size)
        self.memory = mmap.mmap(memory, size)
        self._fence = threading.Lock()
        self._is_cancelled = False
        if not existing:
            fields = (
                layout.slots,
                layout.max_tokens,
                layout.hidden_size,
                layout.itemsize,
                layout.is_bfloat16,
            )
            _LAYOUT.pack_into(self.memory, 0, 0, *fields)
            order_writes(self._fence)
            _LAYOUT.pack_into(self.memory, 0, _MAGIC, *fields)

    @classmethod
    def attach(cls, memory: int, event: int) -> "Ring | None":
        """Map a ring that another process has initialized; return None if it has not been yet."""
        layout = _read_layout(memory)
        return None if layout is None else cls(memory, event, layout)

    def slot(self, step: int) -> int:
        """Return the index of a step's buffer."""
        return step % self.shape.slots

    def offset(self, step: int) -> int:
        """Return the offset of a step's buffer in bytes; it begins with the header."""
        return self._begin + self.slot(step) * self.stride

    def payload(self, step: int) -> int:
        """Return the offset of a step's activations, in bytes."""
        return self.offset(step) + PAGE_BYTES

    def header(self, step: int) -> SlotHeader:
        """Return the header in a step's buffer, which may be that of another step."""
        return SlotHeader(*SLOT_HEADER.unpack_from(self.memory, self.offset(step)))

    @property
    def signalled_steps(self) -> list[int | None]:
        """Last signalled step of each buffer; None for unused buffers."""
        end = _SIGNALLED_OFFSET + self.shape.slots * _SIGNALLED.size
        values = _SIGNALLED.iter_unpack(self.memory[_SIGNALLED_OFFSET:end])
        return [value - 1 if value else None for (value,) in values]

    def signal(self, step: int, tokens: int, error: str = "", has_payload: bool = True) -> None:
        """Notify the receiver of a step's activations, or of an error in their place.

        Args:
            step: number of the step.
            tokens: number of tokens.
            error: error text; empty for none.
            has_payload: False if the activations are not in the buffer.
        """
        shape = self.shape
        text = error.encode()[:MAX_ERROR_BYTES]
        begin = self.offset(step) + SLOT_HEADER.size
        self.memory[begin : begin + len(text)] = text
        payload = tokens * shape.hidden_size * shape.itemsize if has_payload else 0
        header = SlotHeader(step, tokens, shape.hidden_size, shape.itemsize, len(text), payload)
        SLOT_HEADER.pack_into(self.memory, self.offset(step), *header)
        self.signal_written(step)

    def signal_written(self, step: int) -> None:
        """Notify the receiver that a step's buffer, with its header, is written."""
        order_writes(self._fence)
        place = _SIGNALLED_OFFSET + self.slot(step) * _SIGNALLED.size
        _SIGNALLED.pack_into(self.memory, place, step + 1)
        os.eventfd_write(self.event, 1)

    def mark_begin(self, step: int) -> None:
        """Record for the data mover that the sending stage begins to compute a step."""
        _BEGUN.pack_into(self.memory, _BEGUN_OFFSET, step + 1, time.monotonic_ns())

    @property
    def last_begin(self) -> tuple[int, int] | None:
        """Latest step that the sending stage began to compute and its start time; None for none.

        The time is time.monotonic_ns(). If the value changes while it is read, the time may belong
        to the step before.
        """
        step, time_ns = _BEGUN.unpack_from(self.memory, _BEGUN_OFFSET)
        return (step - 1, time_ns) if step else None

    def has_signalled(self, step: int) -> bool:
        """Return True if a step, or a later one in the same buffer, was signalled."""
        place = _SIGNALLED_OFFSET + self.slot(step) * _SIGNALLED.size
        (value,) = _SIGNALLED.unpack_from(self.memory, place)
        return bool(value > step)

    def has_arrived(self, step: int) -> bool:
        """Return True if `wait` for the next step returns soon."""
        return self._is_cancelled or self.has_signalled(step)

    def begin_relay(self) -> None:
        """Prepare a ring that this data mover fills from now on.

        An earlier data mover may have been killed between the last step and its event. This one
        therefore writes an event, and the receiver ignores events without a step.
        """
        self.memory[_IS_RELAYED_OFFSET] = 1
        order_writes(self._fence)
        if any(step is not None for step in self.signalled_steps):
            os.eventfd_write(self.event, 1)

    def wait(self, step: int, tokens: int) -> None:
        """Wait until the sender signals a step.

        Raises:
            StepFailedError: the sender sent an error.
            TransportError: step or shape are not the expected ones.
            EdgeClosedError: `cancel` was called.
        """
        os.eventfd_read(self.event)
        while self.memory[_IS_RELAYED_OFFSET] and not self._is_cancelled:
            if self.has_signalled(step):
                break
            os.eventfd_read(self.event)
        if self._is_cancelled:
            # For the next call, which has to end too.
            os.eventfd_write(self.event, 1)
            raise EdgeClosedError("the edge is closed")
        shape, begin = self.shape, self.offset(step)
        header = self.header(step)
        if header.error_bytes and header.step == step:
            begin += SLOT_HEADER.size
            text = self.memory[begin : begin + header.error_bytes]
            raise StepFailedError(text.decode(errors="replace"))
        received = [*header[:4]]
        expected = [step, tokens, shape.hidden_size, shape.itemsize]
        if received != expected:
            names = "step, tokens, hidden size, element size"
            raise TransportError(
                f"received activations have ({names}) {received}, expected {expected}"
            )

    def cancel(self) -> None:
        """End `wait` with EdgeClosedError, now and later."""
        self._is_cancelled = True
        os.eventfd_write(self.event, 1)

    def close(self) -> None:
        """Unmap the memory once the last view of it is freed."""
        # Tensors keep the object alive, but do not prevent its `close`.
        del self.memory


def order_writes(fence: threading.Lock) -> None:
    """Make earlier writes of this thread visible to other processes before later ones.

    fence: a lock that is only used as a memory barrier.
    """
    for _ in range(2):
        # Two in a row order the writes before and after them on every processor.
        with fence:
            pass


def _read_layout(memory: int) -> EdgeLayout | None:
    """Return the layout of a ring; None if no process has written it yet."""
    data = os.pread(memory, _LAYOUT.size, 0)
    if len(data) < _LAYOUT.size:
        return None
    magic, *fields, is_bfloat16 = _LAYOUT.unpack(data)
    if magic != _MAGIC:
        return None
    slots, max_tokens, hidden_size, itemsize = fields
    return EdgeLayout(slots, max_tokens, hidden_size, itemsize, bool(is_bfloat16))


def round_up_to_pages(size: int) -> int:
    """Round a number of bytes up to a multiple of the page size."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES
