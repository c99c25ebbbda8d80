"""Sending end of an edge: from the ring of this machine's worker to the other machine."""

from gllm.link.connection import FrameConnection
from gllm.link.edge_end import EdgeEnd
from gllm.link.frames import (
    EdgeResume,
    FrameClass,
    FrameError,
    FrameHeader,
    RingLayout,
    encode_payload,
)
from gllm.link.slots import read_step
from gllm.transport.ring import Ring


class SendingEnd(EdgeEnd):
    """Sends each step once to a receiving end that keeps its state, however often it reconnects."""

    _ring: Ring | None = None
    """The worker's ring, once the worker has laid it out."""
    _last_sent: dict[int, int | None]
    """Last step of each slot that the other machine has, or that this connection has carried."""
    _has_sent_layout: bool
    """True if this connection has carried the layout."""

    def _resume(self, connection: FrameConnection, resume: EdgeResume) -> None:
        self._last_sent = dict(enumerate(resume.signalled))
        self._has_sent_layout = False
        self._on_event(connection)

    def _signalled_steps(self) -> list[int | None]:
        return []

    def _on_frame(self, connection: FrameConnection, header: FrameHeader) -> None:
        raise FrameError(f"{header.frame_class.name} from the receiving end")

    def _on_event(self, connection: FrameConnection) -> None:
        """Send the steps that were signalled and that the other machine does not have."""
        if self._ring is None:
            self._ring = Ring.attach(self._memory, self._event)
        ring = self._ring
        if ring is None:
            return
        new: list[int] = []
        for slot, step in enumerate(ring.signalled_steps):
            last = self._last_sent.get(slot)
            if step is not None and (last is None or step > last):
                new.append(step)
                self._last_sent[slot] = step
        if new and not self._has_sent_layout:
            shape = ring.shape
            layout = RingLayout(shape.slots, shape.hidden_size, shape.itemsize)
            connection.send(self.name.header(FrameClass.LAYOUT, encode_payload(layout)))
            self._has_sent_layout = True
        for step in sorted(new):
            if frames := read_step(ring, self.name, step):
                connection.send(frames.head, frames.payload)
