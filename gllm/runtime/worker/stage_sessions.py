"""Sessions of one epoch between its driver and the other workers."""

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

import zmq

from gllm.messages import codec
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage
from gllm.messages.kv_transfer import KvBlocksCopied, KvMachineReport
from gllm.messages.reports import StageTimes
from gllm.messages.steps import GrammarReady, StepDone
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.messaging.bus import Hub, Spoke
from gllm.runtime.messaging.session import SessionError

LOST_SECONDS = 5.0
"""Time in which the parent closes an instance after another stage has ended."""


class RankPeers(NamedTuple):
    """Ranks of one stage, to which the driver sends the same messages."""

    hub: Hub
    senders: list[int]

    def send(self, message: WireMessage) -> None:
        """Queue a message, which concerns the current epoch."""
        self.send_encoded(codec.encode(message))

    def send_encoded(self, payload: bytes) -> None:
        """Queue an encoded message of the current epoch."""
        self.hub.send_encoded(self.senders, payload)


class StageSessions:
    """Message connections of one worker to the driver; in the driver's worker, to all workers.

    The driver's worker is rank 0 of stage 0. It listens (`Hub`), the others connect (`Spoke`).
    """

    def __init__(
        self,
        assignment: StageAssignment,
        context: zmq.Context[zmq.Socket[bytes]],
        run: int,
        on_messages: Callable[[Iterable[AnyMessage]], None],
        on_lost: Callable[[BaseException], None],
    ) -> None:
        """Bind the hub on the driver's worker; the other workers connect after all have loaded.

        Args:
            assignment: assignment of the worker.
            context: ZeroMQ context of this process.
            run: number of this start of the parent.
            on_messages: called with the messages for this stage, and on the driver's worker with
                those for the driver.
            on_lost: called some time after a loss, unless these are closed before.
        """
        self._assignment = assignment
        self._context, self._run = context, run
        self._on_messages, self._on_lost = on_messages, on_lost
        self._is_closed = False
        self._connected_senders: set[int] = set()
        """Workers that have reached the driver, its own included."""
        self._spoke: Spoke | None = None
        self._hub = self._bind() if assignment.has_driver else None

    @property
    def peers(self) -> tuple[RankPeers | None, list[RankPeers]]:
        """The driver's channels to the other ranks of its stage, and to each other stage."""
        assert self._hub is not None, "the driver is on the first stage"
        placement = self._assignment.placement
        first, *others = [
            [worker.sender for worker in placement.workers_of(stage)]
            for stage in range(placement.num_stages)
        ]
        other_ranks = [sender for sender in first if sender != self._assignment.sender]
        return (
            RankPeers(self._hub, other_ranks) if other_ranks else None,
            [RankPeers(self._hub, senders) for senders in others],
        )

    @property
    def machines(self) -> list[RankPeers]:
        """The driver's channels to the first worker of each other machine."""
        assert self._hub is not None, "the driver is on the first stage"
        placement = self._assignment.placement
        firsts = [placement.workers_on(node)[0] for node in placement.node_stages]
        return [RankPeers(self._hub, [worker.sender]) for worker in firsts[1:]]

    def connect(self) -> None:
        """Connect to the driver's hub."""
        assignment = self._assignment
        self._spoke = Spoke(
            self._context,
            self._run,
            assignment.sender,
            assignment.driver_address,
            codec.decode_for_stage,
        )
        self._spoke.advance(assignment.placement.epoch)
        self._spoke.start(self._on_messages, self._on_session_lost)

    def on_connected(self, sender: int) -> bool:
        """Record that a worker has connected to the driver; return True once all workers have.

        The parent removes the socket's name when all stages are ready, so nothing can connect
        afterwards.
        """
        self._connected_senders.add(sender)
        return len(self._connected_senders) == len(self._assignment.placement.workers)

    def send_to_driver(
        self,
        message: StepDone | GrammarReady | StageTimes | KvMachineReport | KvBlocksCopied,
    ) -> None:
        """Send a message to the driver, which in its own process handles it at once."""
        if self._spoke is not None:
            self._spoke.send(message)
        else:
            self._on_messages([message])

    def close(self) -> None:
        """End the sessions."""
        self._is_closed = True
        for connection in (self._hub, self._spoke):
            if connection is not None:
                connection.close()

    def _bind(self) -> Hub:
        assignment = self._assignment
        hub = Hub(self._context, self._run, codec.decode_for_driver)
        hub.advance(assignment.placement.epoch)
        hub.bind(assignment.driver_address)
        for sender in assignment.placement.senders[1:]:
            hub.expect(sender)
        hub.start(
            lambda messages: self._on_messages(message for _, message in messages),
            lambda _, cause: self._on_session_lost(cause),
        )
        return hub

    def _on_session_lost(self, cause: str) -> None:
        """Report the end of a session with another worker."""
        self.fail_later(SessionError(f"a session with another stage ended: {cause}"))

    def fail_later(self, error: BaseException) -> None:
        """Report an error after LOST_SECONDS, unless the head process closes the stage first."""
        asyncio.get_running_loop().call_later(LOST_SECONDS, self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self._is_closed:
            self._on_lost(error)
