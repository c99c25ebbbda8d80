"""Steps that wait for a connection, and the frames in which a link policy sends them."""

from typing import NamedTuple

from gllm.pacing.traffic import LinkPolicy, LinkView, TrafficClass
from gllm.transport.link.frames import EdgeName, FrameClass, FrameHeader
from gllm.transport.link.slots import StepBytes
from gllm.transport.ring import PAGE_BYTES


class QueuedStep:
    """Step that a connection has not carried completely."""

    __slots__ = ("_data", "_num_sent", "_place", "num_bytes", "number", "traffic_class")

    def __init__(self, number: int, name: EdgeName, lane: int, slot: int, data: StepBytes) -> None:
        """Prepare a step.

        Args:
            number: of steps that the connection has got before.
            name: of the edge.
            lane: of the step, which is also its class.
            slot: that has it on both machines.
            data: its bytes.
        """
        self.number = number
        self.traffic_class = TrafficClass(lane)
        self.num_bytes = len(data.head) + len(data.payload)
        self._place = (*name, lane, slot, data.step)
        self._data = data
        self._num_sent = 0
        """Bytes of the payload in earlier chunks."""

    @property
    def remaining_bytes(self) -> int:
        """Bytes that are in no chunk yet; the head is in the first one."""
        num_head = 0 if self._num_sent else len(self._data.head)
        return num_head + len(self._data.payload) - self._num_sent

    def pop(self, num_bytes: int) -> tuple[bytes, memoryview]:
        """Return headers and payload of the frames that carry the next bytes.

        num_bytes: a chunk with the head has at least that, and one byte of a payload.
        """
        head, payload = self._data.head, self._data.payload
        headers = b""
        if not self._num_sent:
            headers = FrameHeader(FrameClass.ACTIVATIONS, *self._place, 0, len(head)).pack() + head
            num_bytes = max(1, num_bytes - len(head))
        begin = self._num_sent
        part = payload[begin : begin + num_bytes]
        if part:
            offset, length = PAGE_BYTES + begin, len(part)
            headers += FrameHeader(FrameClass.ACTIVATIONS, *self._place, offset, length).pack()
            self._num_sent += length
        return headers, part


class LinkChunk(NamedTuple):
    """Frames that are sent without interruption."""

    headers: bytes
    payload: memoryview
    """Follows the headers, in a slot's memory; may be empty."""


class SendQueue:
    """Steps of all lanes of an edge that wait for its connection."""

    def __init__(self, name: EdgeName, policy: LinkPolicy) -> None:
        """Create an empty queue.

        Args:
            name: of the edge.
            policy: selects the chunks; it serves this queue only.
        """
        self._name, self._policy = name, policy
        self._waiting: list[QueuedStep] = []
        self._num_steps = 0
        self._num_prefills = 0
        self.last_chunk_bytes = 0
        """Size of the last chunk; 0 before the first one."""

    def __bool__(self) -> bool:
        """Return whether a step waits."""
        return bool(self._waiting)

    @property
    def has_prefill(self) -> bool:
        """True if a step waits that is no decode."""
        return self._num_prefills > 0

    @property
    def num_bytes(self) -> int:
        """Bytes that wait."""
        # A report is made on another thread; the copy is atomic.
        return sum(step.remaining_bytes for step in self._waiting[:])

    def add(self, lane: int, slot: int, data: StepBytes) -> None:
        """Append a step."""
        self._waiting.append(QueuedStep(self._num_steps, self._name, lane, slot, data))
        self._num_steps += 1
        self._num_prefills += lane != TrafficClass.DECODE

    def pop(self, view: LinkView) -> LinkChunk:
        """Return the next chunk; a step must wait.

        view: the link at this time.
        """
        position, num_bytes = self._policy.select(self._waiting, view)
        step = self._waiting[position]
        before = step.remaining_bytes
        headers, payload = step.pop(num_bytes)
        after = step.remaining_bytes if payload else 0
        if not after:
            del self._waiting[position]
            self._num_prefills -= step.traffic_class != TrafficClass.DECODE
        self.last_chunk_bytes = before - after
        return LinkChunk(headers, payload)
