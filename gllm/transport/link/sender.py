"""Sending end of an edge: from the rings of this machine's worker to the other machine.

A link policy selects the frames in which the waiting steps are sent.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gllm.messages.nodes import LinkState
from gllm.pacing.policy_registry import make_link_policy
from gllm.pacing.slack import StageClock
from gllm.pacing.traffic import LinkPolicy, LinkView, TrafficClass
from gllm.transport.link.commands import OpenLinkEdge
from gllm.transport.link.connection import FrameConnection
from gllm.transport.link.edge_end import EdgeEnd
from gllm.transport.link.frames import (
    EdgeName,
    EdgeResume,
    FrameClass,
    FrameError,
    FrameHeader,
    RingLayout,
    encode_payload,
)
from gllm.transport.link.link_monitor import LinkMonitor
from gllm.transport.link.settings import LinkSettings
from gllm.transport.link.slots import StepBytes, read_step
from gllm.transport.ring import PAGE_BYTES, Ring


class QueuedStep:
    """Activations of a step that have not been sent completely, with the number of bytes sent."""

    __slots__ = ("_data", "_num_sent", "_place", "num_bytes", "number", "traffic_class")

    def __init__(self, number: int, name: EdgeName, lane: int, slot: int, data: StepBytes) -> None:
        """Prepare a step.

        Args:
            number: number of steps queued before on this connection.
            name: identity of the connection.
            lane: index of the step's ring buffer, which is also its traffic class.
            slot: index of the step's buffer in the ring.
            data: header and activations.
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
        """Bytes that are still to be sent, header included."""
        num_head = 0 if self._num_sent else len(self._data.head)
        return num_head + len(self._data.payload) - self._num_sent

    def pop(self, num_bytes: int) -> tuple[bytes, memoryview]:
        """Return the frame headers and the payload of the next bytes to send.

        num_bytes: limit; the first call returns at least the step's header and one byte of payload.
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
    """Bytes to send without interruption: frame headers and a part of a step's activations."""

    headers: bytes
    payload: memoryview
    """Bytes after the headers, a view of shared memory; may be empty."""


class SendQueue:
    """Queue of the steps whose activations wait to be sent to the next stage on another machine.

    The link policy selects which step is sent next, and how many bytes of it.
    """

    def __init__(self, name: EdgeName, policy: LinkPolicy) -> None:
        """Create an empty queue.

        Args:
            name: identity of the connection.
            policy: selects the next bytes; must not be shared with another queue.
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
        """True if a step with prefills is queued."""
        return self._num_prefills > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the queued steps that are still to be sent."""
        # A report is made on another thread; the copy is atomic.
        return sum(step.remaining_bytes for step in self._waiting[:])

    def add(self, lane: int, slot: int, data: StepBytes) -> None:
        """Append a step."""
        self._waiting.append(QueuedStep(self._num_steps, self._name, lane, slot, data))
        self._num_steps += 1
        self._num_prefills += lane != TrafficClass.DECODE

    def pop(self, view: LinkView) -> LinkChunk:
        """Remove and return the next bytes to send; the queue must not be empty.

        view: state of the connection.
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


GAIN = 0.25
"""Weight of the latest duration in a mean."""
MAX_GAP_SECONDS = 5.0
"""Longest time between two decode steps that counts: later ones belong to other requests."""


class DecodeClock:
    """Predicts when a stage's next decode step ends, from the start and end times of earlier ones.

    The duration of a decode step is measured from its start to its output (T_i(n) in the paper).
    The time per round (T_o + T_m in the paper) is estimated as the time between two outputs: with
    several micro-batches in flight their outputs alternate, and the next one counts.
    """

    def __init__(self) -> None:
        self._clock = StageClock()
        self._last_begin = -1
        """Step whose begin was recorded last."""
        self._begin_time: float | None = None
        """Begin of the step that is computed; None between two steps."""
        self._end_time: float | None = None
        """End of the latest step; None before the first one."""
        self._stage_seconds: float | None = None
        """Mean duration of a step; None before the first one."""
        self._gap_seconds: float | None = None
        """Mean time from a signal to the next begin; None before the second step."""

    def on_begin(self, step: int, begin: float) -> None:
        """Record when the latest decode step began; repeated calls are ignored.

        Args:
            step: number of the step within its ring buffer.
            begin: time in seconds, time.monotonic().
        """
        if step <= self._last_begin:
            return
        self._last_begin, self._begin_time = step, begin
        if self._end_time is not None and begin - self._end_time <= MAX_GAP_SECONDS:
            self._gap_seconds = _mean(self._gap_seconds, max(0.0, begin - self._end_time))
        self._clock.on_decode_started(begin, self._stage_seconds or 0.0)

    def on_end(self, now: float) -> None:
        """Record that the latest decode step has ended, even if its begin was not recorded."""
        if self._begin_time is not None:
            self._stage_seconds = _mean(self._stage_seconds, now - self._begin_time)
        self._begin_time, self._end_time = None, now
        round_seconds = (self._gap_seconds or 0.0) + (self._stage_seconds or 0.0)
        # Rounds of earlier steps predict nothing that this one does not.
        self._clock = StageClock()
        self._clock.on_decode_finished(now, round_seconds)

    def slack_seconds(self, now: float) -> float | None:
        """Return the seconds until the next decode step is expected to end; None if none runs."""
        return self._clock.slack_seconds(now)


def _mean(mean: float | None, value: float) -> float:
    """Return a moving mean after another value."""
    return value if mean is None else mean + GAIN * (value - mean)


_PIECE_BYTES = 2**18
"""Bytes of a chunk between two samples of the connection."""


class SendingEnd(EdgeEnd):
    """Sending end of a connection between stages: sends each step once, across reconnections.

    Decode and prefill steps share the connection: a link policy selects the next bytes. With one
    ring buffer (--lanes 1) all steps have one priority, and each is sent as soon as it is ready.
    """

    _last_sent: list[dict[int, int | None]]
    """By lane: last step of each slot that the other machine has, or that was queued since."""
    _lanes_with_layout: set[int]
    """Lanes with a layout that this connection has sent."""

    def __init__(
        self,
        name: EdgeName,
        command: OpenLinkEdge,
        descriptors: Sequence[int],
        settings: LinkSettings,
    ) -> None:
        """Prepare an end; `start` connects it."""
        super().__init__(name, command, descriptors, settings)
        self._is_shaped = command.num_lanes > 1
        """True if the policy has a choice."""
        self._monitor = LinkMonitor(self._is_shaped, settings.min_bytes_per_second)
        self._clock = DecodeClock()
        self._queue = self._make_queue()

    @property
    def state(self) -> LinkState:
        """State of the connection for status pages, with measurements of the sending direction."""
        estimator = self._monitor.estimator
        rate, min_rate = estimator.bytes_per_second, estimator.min_bytes_per_second
        round_trip = estimator.round_trip_seconds
        return msgspec.structs.replace(
            super().state,
            policy=self._settings.policy,
            bytes_per_second=None if rate is None else float(f"{rate:.3g}"),
            min_bytes_per_second=None if min_rate is None else float(f"{min_rate:.3g}"),
            round_trip_seconds=None if round_trip is None else round(round_trip, 4),
            loss_rate=round(estimator.loss_rate, 4),
            num_queued_bytes=self._queue.num_bytes,
            last_chunk_bytes=self._queue.last_chunk_bytes,
        )

    def _resume(self, connection: FrameConnection, resume: EdgeResume) -> None:
        num_lanes = len(self._rings)
        if len(resume.signalled) != num_lanes:
            raise FrameError(f"RESUME of {len(resume.signalled)} lanes, here are {num_lanes}")
        self._last_sent = [dict(enumerate(steps)) for steps in resume.signalled]
        self._lanes_with_layout = set()
        self._queue = self._make_queue()
        self._monitor.begin(connection, time.monotonic())
        self._on_events(connection)

    def _make_queue(self) -> SendQueue:
        return SendQueue(self.name, make_link_policy(self._settings.policy))

    def _signalled_steps(self) -> list[list[int | None]]:
        return []

    def _on_frame(self, connection: FrameConnection, header: FrameHeader) -> None:
        if header.frame_class != FrameClass.ECHO:
            raise FrameError(f"{header.frame_class.name} from the receiving end")
        self._monitor.on_echo(time.monotonic())

    def _on_events(self, connection: FrameConnection) -> None:
        """Queue the steps that were signalled and that the other machine does not have."""
        for lane in range(len(self._rings)):
            if (ring := self._attach(lane)) is not None:
                self._queue_steps(connection, lane, ring)
        if not self._is_shaped:
            while self._queue:
                self._send_chunk(connection)

    def _queue_steps(self, connection: FrameConnection, lane: int, ring: Ring) -> None:
        last_sent, new = self._last_sent[lane], []
        for slot, step in enumerate(ring.signalled_steps):
            last = last_sent.get(slot)
            if step is not None and (last is None or step > last):
                new.append(step)
                last_sent[slot] = step
        if new and lane not in self._lanes_with_layout:
            layout = encode_payload(RingLayout.of(ring.shape))
            connection.send(self.name.header(FrameClass.LAYOUT, layout, lane=lane))
            self._lanes_with_layout.add(lane)
        for step in sorted(new):
            if data := read_step(ring, step, self._encoding):
                self._queue.add(lane, ring.slot(step), data)
        if new and self._is_shaped and lane == TrafficClass.DECODE:
            self._on_decodes_signalled(ring, max(new))

    def _on_decodes_signalled(self, ring: Ring, step: int) -> None:
        """Record that decode steps up to `step` have ended."""
        begin = ring.last_begin
        if begin is not None and begin[0] <= step:
            self._observe_begin(ring)
        self._clock.on_end(time.monotonic())

    def _observe_begin(self, ring: Ring) -> None:
        if (begin := ring.last_begin) is not None:
            step, nanoseconds = begin
            self._clock.on_begin(step, 1e-9 * nanoseconds)

    def _on_writable(self, connection: FrameConnection) -> None:
        """Send the next chunk."""
        if self._queue:
            self._send_chunk(connection)

    def _send_chunk(self, connection: FrameConnection) -> None:
        now = time.monotonic()
        slack_seconds = None
        if self._is_shaped:
            if (ring := self._rings[TrafficClass.DECODE]) is not None:
                self._observe_begin(ring)
            slack_seconds = self._clock.slack_seconds(now)
        view = LinkView(now, self._monitor.send_bytes_per_second(), slack_seconds)
        has_prefill = self._queue.has_prefill
        headers, payload = self._queue.pop(view)
        for begin in range(0, max(len(payload), 1), _PIECE_BYTES):
            if begin:
                self._monitor.observe(time.monotonic(), True, has_prefill)
            piece = payload[begin : begin + _PIECE_BYTES]
            parts = (piece,) if begin else (headers, piece)
            if self._is_shaped:
                connection.send_watched(self._monitor.check_supply, *parts)
            else:
                connection.send(*parts)

    def _has_more(self) -> bool:
        return bool(self._queue)

    def _on_pass(self, connection: FrameConnection) -> float | None:
        now = time.monotonic()
        self._monitor.observe(now, bool(self._queue), self._queue.has_prefill)
        if not self._queue and self._monitor.should_probe(now):
            connection.send(self.name.header(FrameClass.PROBE, b""))
        return self._monitor.seconds_to_sample(now)
