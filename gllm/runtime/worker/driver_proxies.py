"""Sessions with the driver in place of the workers of other nodes.

A worker of another machine cannot reach the driver's socket. Its agent has a hub of its own for it,
and forwards the messages within its session with the head; here a spoke per worker passes them on.
Nothing is decoded in between.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

import zmq

from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage
from gllm.messages.nodes import StageFrame
from gllm.runtime.messaging.session import SessionError
from gllm.runtime.messaging.spoke import Spoke

log = logging.getLogger(__name__)


class DriverProxies:
    """One spoke per worker of another node, during one epoch."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run: int) -> None:
        """Create proxies of no epoch.

        Args:
            context: of this process.
            run: number of this start of the head process.
        """
        self.num_stale = 0
        """Frames of other epochs, and of workers that are gone."""
        self._context = context
        self._run = run
        self._epoch = 0
        self._address = ""
        self._sends: dict[int, Callable[[WireMessage], None]] = {}
        """Functions that send to the agents, by worker of the epoch."""
        self._spokes: dict[int, Spoke | None] = {}
        """By worker; None once its session with the driver has ended."""

    def begin(
        self, epoch: int, address: str, sends: Mapping[int, Callable[[WireMessage], None]]
    ) -> None:
        """Begin an epoch; a proxy connects with the first frame of its worker.

        Args:
            epoch: its number.
            address: of the driver's hub.
            sends: functions that send to the agent, by worker of another node.
        """
        self.close()
        self._epoch, self._address, self._sends = epoch, address, dict(sends)

    def on_frame(self, frame: StageFrame) -> None:
        """Pass on a frame of a worker; an empty one says that the worker has connected."""
        if frame.epoch != self._epoch or frame.sender not in self._sends:
            self.num_stale += 1
            return
        self._connect(frame.sender)
        spoke = self._spokes[frame.sender]
        if spoke is None:
            self.num_stale += 1
        elif frame.payload:
            spoke.send_encoded(frame.payload)

    def forget(self, sender: int) -> None:
        """End the session of a worker that is gone; the driver learns of it."""
        self._sends.pop(sender, None)
        if spoke := self._spokes.pop(sender, None):
            spoke.close()

    def close(self) -> None:
        """End all sessions, with the epoch."""
        for sender in list(self._sends):
            self.forget(sender)

    def _connect(self, sender: int) -> None:
        if sender in self._spokes:
            return
        epoch, send = self._epoch, self._sends[sender]

        def wrap(payload: bytes) -> AnyMessage:
            return StageFrame(sender, epoch, payload)

        try:
            spoke = Spoke(self._context, self._run, sender, self._address, wrap)
        except zmq.ZMQError as error:
            raise SessionError(f"the driver cannot be reached: {error}") from error
        self._spokes[sender] = spoke
        spoke.advance(epoch)

        def relay(messages: list[AnyMessage]) -> None:
            for message in messages:
                send(message)

        spoke.start(relay, partial(self._on_lost, sender, epoch))

    def _on_lost(self, sender: int, epoch: int, cause: str) -> None:
        """Note that the driver has ended the session; its death is noticed elsewhere."""
        log.debug("the session of worker %d with the driver has ended: %s", sender, cause)
        if epoch == self._epoch and sender in self._spokes:
            self._spokes[sender] = None
