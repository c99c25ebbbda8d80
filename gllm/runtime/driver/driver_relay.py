"""Relay of messages between the driver and stages on other machines.

The stages of such a machine connect to a `DriverRelay`. Their messages travel to the head within
the agent's session, where `DriverProxies` has a session with the driver for each of the workers.
Nothing but step times is decoded on the way.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec
import zmq

from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, decode_for_driver, encode
from gllm.messages.lifecycle import Hello
from gllm.messages.nodes import StageFrame
from gllm.messages.reports import StageTimes
from gllm.recovery.clock_offset import ClockOffset
from gllm.runtime.messaging.bus import Hub, Spoke
from gllm.runtime.messaging.session import SessionError
from gllm.scheduler.plan import StepTime

log = logging.getLogger(__name__)


class DriverRelay:
    """Relays messages between the workers of this machine and the driver on another machine.

    It lasts for one epoch, the time between two starts or recoveries of the pipeline. The messages
    travel in the connection of this machine's agent to the head machine.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run: int,
        epoch: int,
        address: str,
        senders: Iterable[int],
        send: Callable[[StageFrame], None],
        clock: Callable[[], ClockOffset | None],
        on_lost: Callable[[int, str], None],
        lost_seconds: float,
    ) -> None:
        """Bind the address and wait for the stages, on the running event loop.

        Args:
            context: ZeroMQ context of this process.
            run: number of the head's start.
            epoch: epoch of the stages.
            address: to which they connect.
            senders: workers of this machine in the epoch.
            send: sends a frame to the head.
            clock: returns the offset of the head's clock; None without a session.
            on_lost: called some time after the end of a worker's session, unless this is closed
                before, with the worker and the cause.
            lost_seconds: that time.
        """
        self.epoch = epoch
        self._send = send
        self._clock = clock
        self._on_lost = on_lost
        self._lost_seconds = lost_seconds
        self._is_closed = False
        self._complete_until: dict[int, float] = {}
        """`complete_until` of the last StageTimes of each worker, by the head's clock."""
        self.hub: Hub = Hub(context, run, decode_for_driver)
        self.hub.advance(epoch)
        self.hub.bind(address)
        for sender in senders:
            self.hub.expect(sender)
        self.hub.start(self._on_messages, self._on_session_lost)

    def close(self) -> None:
        """End the sessions."""
        self._is_closed = True
        self.hub.close()

    def _on_messages(self, messages: list[tuple[int, AnyMessage]]) -> None:
        for sender, message in messages:
            payload: bytes | None = b""
            if isinstance(message, StageTimes):
                payload = self._convert(sender, message)
            elif not isinstance(message, Hello):
                payload = encode(message)
            if payload is not None:
                self._send(StageFrame(sender, self.epoch, payload))

    def _convert(self, sender: int, message: StageTimes) -> bytes | None:
        """Return encoded step times by the head's clock; None if its offset is unknown."""
        clock = self._clock()
        offset = None if clock is None else clock.seconds
        if offset is None:
            return None
        # A better estimate of the offset may be less than the last one; time never goes back.
        earliest = self._complete_until.get(sender, float("-inf"))

        def convert(seconds: float) -> float:
            return max(seconds + offset, earliest)

        steps = [
            StepTime(step.step, convert(step.start), convert(step.end)) for step in message.steps
        ]
        until = self._complete_until[sender] = convert(message.complete_until)
        return encode(msgspec.structs.replace(message, steps=steps, complete_until=until))

    def _on_session_lost(self, sender: int, cause: str) -> None:
        """Report the end of a session later: a worker ends it when it closes its stage."""
        asyncio.get_running_loop().call_later(self._lost_seconds, self._report_lost, sender, cause)

    def _report_lost(self, sender: int, cause: str) -> None:
        if not self._is_closed:
            self._on_lost(sender, f"the session with the driver ended: {cause}")


class DriverProxies:
    """Connections to the driver on behalf of workers on other machines, one per worker.

    It lives in the head process and forwards what `DriverRelay` sends from the workers' machines,
    until the next recovery.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run: int) -> None:
        """Create proxies of no epoch.

        Args:
            context: ZeroMQ context of this process.
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
            address: address on which the driver listens.
            sends: functions that send to the agent, by worker of another node.
        """
        self.close()
        self._epoch, self._address, self._sends = epoch, address, dict(sends)

    def on_frame(self, frame: StageFrame) -> None:
        """Forward a worker's frame to the driver; an empty frame opens the session."""
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
        """Close the session of a worker that has exited."""
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
