"""Sending end of an edge: from the rings of this machine's worker to the other machine."""

import time
from collections.abc import Sequence

import msgspec

from gllm.messages.nodes import LinkState
from gllm.pacing.policy_registry import make_link_policy
from gllm.pacing.traffic import LinkView, TrafficClass
from gllm.transport.link.commands import OpenLinkEdge
from gllm.transport.link.connection import FrameConnection
from gllm.transport.link.decode_clock import DecodeClock
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
from gllm.transport.link.send_queue import SendQueue
from gllm.transport.link.settings import LinkSettings
from gllm.transport.link.slots import read_step
from gllm.transport.ring import Ring

_PIECE_BYTES = 2**18
"""Bytes of a chunk between two samples of the connection."""


class SendingEnd(EdgeEnd):
    """Sends each step once to a receiving end that keeps its state, however often it reconnects.

    Steps of several lanes share the connection: a link policy selects whose bytes go next. With one
    lane all steps have one class, and each goes as soon as it is signalled.
    """

    _last_sent: list[dict[int, int | None]]
    """By lane: last step of each slot that the other machine has, or that was queued since."""
    _lanes_with_layout: set[int]
    """Lanes whose layout this connection has carried."""

    def __init__(
        self,
        name: EdgeName,
        command: OpenLinkEdge,
        descriptors: Sequence[int],
        settings: LinkSettings,
    ) -> None:
        """See EdgeEnd."""
        super().__init__(name, command, descriptors, settings)
        self._rings: list[Ring | None] = [None] * command.num_lanes
        """The worker's ring of each lane, once the worker has laid it out."""
        self._is_shaped = command.num_lanes > 1
        """True if the policy has a choice."""
        self._monitor = LinkMonitor(self._is_shaped)
        self._clock = DecodeClock()
        self._queue = self._make_queue()

    @property
    def state(self) -> LinkState:
        """State for people, with the measurements of this direction."""
        estimator = self._monitor.estimator
        rate, round_trip = estimator.bytes_per_second, estimator.round_trip_seconds
        return msgspec.structs.replace(
            super().state,
            policy=self._settings.policy,
            bytes_per_second=None if rate is None else float(f"{rate:.3g}"),
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
        for lane, ring in enumerate(self._rings):
            if ring is None:
                ring = self._rings[lane] = Ring.attach(*self._ring_files[lane])
            if ring is not None:
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

    def _on_decodes_signalled(self, ring: Ring, turn: int) -> None:
        """Note that decode steps up to a turn have ended."""
        begin = ring.last_begin
        if begin is not None and begin[0] <= turn:
            self._observe_begin(ring)
        self._clock.on_end(time.monotonic())

    def _observe_begin(self, ring: Ring) -> None:
        if (begin := ring.last_begin) is not None:
            turn, nanoseconds = begin
            self._clock.on_begin(turn, 1e-9 * nanoseconds)

    def _on_writable(self, connection: FrameConnection) -> None:
        """Send the next chunk."""
        if self._queue:
            self._send_chunk(connection)

    def _send_chunk(self, connection: FrameConnection) -> None:
        now = time.monotonic()
        slack_seconds = None
        if self._is_shaped:
            self._monitor.check_supply()
            if (ring := self._rings[TrafficClass.DECODE]) is not None:
                self._observe_begin(ring)
            slack_seconds = self._clock.slack_seconds(now)
        view = LinkView(now, self._monitor.send_bytes_per_second(), slack_seconds)
        has_prefill = self._queue.has_prefill
        headers, payload = self._queue.pop(view)
        connection.send(headers, payload[:_PIECE_BYTES])
        for begin in range(_PIECE_BYTES, len(payload), _PIECE_BYTES):
            self._monitor.observe(time.monotonic(), True, has_prefill)
            connection.send(payload[begin : begin + _PIECE_BYTES])

    def _has_more(self) -> bool:
        return bool(self._queue)

    def _on_pass(self, connection: FrameConnection) -> float | None:
        now = time.monotonic()
        self._monitor.observe(now, bool(self._queue), self._queue.has_prefill)
        if not self._queue and self._monitor.should_probe(now):
            connection.send(self.name.header(FrameClass.PROBE, b""))
        return self._monitor.seconds_to_sample(now)
