"""Receiving end of an edge: from the other machine to the rings of this machine's worker."""

from collections.abc import Sequence

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
    decode_payload,
)
from gllm.transport.link.settings import LinkSettings
from gllm.transport.link.slots import SlotWriter
from gllm.transport.ring import Ring

_SCRATCH_BYTES = 2**16


class ReceivingEnd(EdgeEnd):
    """Fills rings; the bytes of a step that a ring has already are dropped."""

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
        self._writers: list[SlotWriter | None] = [None] * command.num_lanes
        """By lane; None before its LAYOUT."""

    def _resume(self, connection: FrameConnection, resume: EdgeResume) -> None:
        # Steps that were not complete are sent again from their beginning.
        self._writers = [None] * len(self._rings)
        if resume.signalled:
            raise FrameError("RESUME of a sending end names steps")

    def _signalled_steps(self) -> list[list[int | None]]:
        rings = [self._attach(lane) for lane in range(len(self._rings))]
        return [[] if ring is None else ring.signalled_steps for ring in rings]

    def _attach(self, lane: int) -> Ring | None:
        """Return the worker's ring of a lane; None as long as the worker has not laid it out."""
        ring = self._rings[lane]
        if ring is None:
            ring = self._rings[lane] = Ring.attach(*self._ring_files[lane])
            if ring is not None:
                ring.begin_relay()
        return ring

    def _on_frame(self, connection: FrameConnection, header: FrameHeader) -> None:
        if header.lane >= len(self._rings):
            raise FrameError(f"lane {header.lane} of {len(self._rings)}")
        if header.frame_class == FrameClass.ACTIVATIONS:
            self._receive_activations(connection, header)
        elif header.frame_class == FrameClass.LAYOUT:
            self._check_layout(connection, header.lane, connection.receive(header.length))
        elif header.frame_class == FrameClass.PROBE:
            connection.send(self.name.header(FrameClass.ECHO, b""))
        else:
            raise FrameError(f"{header.frame_class.name} on an open edge")

    def _check_layout(self, connection: FrameConnection, lane: int, payload: bytes) -> None:
        """Compare the rings of both machines. Raises FrameError, EdgeRefusedError."""
        ring, peer = self._attach(lane), decode_payload(payload, RingLayout)
        if ring is None:
            raise FrameError("a step before the worker is ready")
        own = RingLayout.of(ring.shape)
        if own != peer:
            self._refuse(connection, f"the rings differ: {peer} is sent, {own} is expected")
        self._writers[lane] = SlotWriter(ring, self._encoding)

    def _receive_activations(self, connection: FrameConnection, header: FrameHeader) -> None:
        writer = self._writers[header.lane]
        if writer is None:
            raise FrameError("activations before LAYOUT")
        place = writer.place(header)
        if place is not None:
            connection.receive_into(place)
            writer.finish(header)
            return
        left = header.length
        while left:
            left -= len(connection.receive(min(left, _SCRATCH_BYTES)))
