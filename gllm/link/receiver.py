"""Receiving end of an edge: from the other machine to the ring of this machine's worker."""

from gllm.link.connection import FrameConnection
from gllm.link.edge_end import EdgeEnd
from gllm.link.frames import (
    EdgeResume,
    FrameClass,
    FrameError,
    FrameHeader,
    RingLayout,
    decode_payload,
)
from gllm.link.slots import SlotWriter
from gllm.transport.ring import Ring

_SCRATCH_BYTES = 2**16


class ReceivingEnd(EdgeEnd):
    """Fills a ring; the bytes of a step that the ring has already are dropped."""

    _ring: Ring | None = None
    _writer: SlotWriter | None = None

    def _resume(self, connection: FrameConnection, resume: EdgeResume) -> None:
        # Steps that were not complete are sent again from their beginning.
        self._writer = None
        if resume.signalled:
            raise FrameError("RESUME of a sending end names steps")

    def _signalled_steps(self) -> list[int | None]:
        ring = self._attach()
        return [] if ring is None else ring.signalled_steps

    def _attach(self) -> Ring | None:
        """Return the worker's ring; None as long as the worker has not laid it out."""
        if self._ring is None:
            self._ring = Ring.attach(self._memory, self._event)
            if self._ring is not None:
                self._ring.begin_relay()
        return self._ring

    def _on_frame(self, connection: FrameConnection, header: FrameHeader) -> None:
        if header.frame_class == FrameClass.LAYOUT:
            self._check_layout(connection, connection.receive(header.length))
        elif header.frame_class == FrameClass.ACTIVATIONS:
            self._receive_activations(connection, header)
        else:
            raise FrameError(f"{header.frame_class.name} on an open edge")

    def _check_layout(self, connection: FrameConnection, payload: bytes) -> None:
        """Compare the rings of both machines. Raises FrameError, EdgeRefusedError."""
        ring, peer = self._attach(), decode_payload(payload, RingLayout)
        if ring is None:
            raise FrameError("a step before the worker is ready")
        own = RingLayout(ring.shape.slots, ring.shape.hidden_size, ring.shape.itemsize)
        if own != peer:
            self._refuse(connection, f"the rings differ: {peer} is sent, {own} is expected")
        self._writer = SlotWriter(ring)

    def _receive_activations(self, connection: FrameConnection, header: FrameHeader) -> None:
        if self._writer is None:
            raise FrameError("activations before LAYOUT")
        place = self._writer.place(header)
        if place is not None:
            connection.receive_into(place)
            self._writer.finish(header)
            return
        left = header.length
        while left:
            left -= len(connection.receive(min(left, _SCRATCH_BYTES)))
