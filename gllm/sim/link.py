"""Link in simulated time: messages occupy it one after another and arrive a propagation later."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeVar

from gllm.sim.costs.base import TransferCost
from gllm.sim.event_loop import PIPELINE, EventLoop

T = TypeVar("T")

TIME_TOLERANCE = 1e-9
"""Seconds by which the end of a burst may differ from the time of an event."""


class MessageClass(IntEnum):
    """Class of a message; smaller values are more urgent."""

    DECODE = 0
    """Activations of a micro-batch of decodes; plans and results, which are small and on the way of
    every token."""
    PREFILL = 1
    """Activations of a micro-batch with a prefill chunk."""
    KV_CACHE = 2
    """KV blocks on their way to another engine."""


class LinkMessage:
    """Message that waits for a link or is being sent."""

    __slots__ = (
        "argument",
        "cost",
        "deliver",
        "is_dropped",
        "message_class",
        "number",
        "owner",
        "queued_time",
        "rank",
        "remaining_seconds",
    )

    def __init__(
        self,
        number: int,
        message_class: MessageClass,
        cost: TransferCost,
        queued_time: float,
        deliver: Callable[[float, Any], None],
        argument: object,
        owner: object,
        rank: int,
    ) -> None:
        self.number = number
        """Number of messages that the link received before this one."""
        self.message_class = message_class
        self.cost = cost
        self.queued_time = queued_time
        """Time in seconds at which the link received the message."""
        self.remaining_seconds = cost.occupancy_seconds
        """Occupancy that is left."""
        self.deliver = deliver
        """Called with the arrival time and the argument."""
        self.argument = argument
        self.owner = owner
        self.rank = rank
        """Rank of the arrival among the events of its time."""
        self.is_dropped = False


class LinkBurst(NamedTuple):
    """Part of a message that a link sends without interruption."""

    position: int
    """Position of the message among the waiting ones."""
    seconds: float
    """Occupancy after which the policy is asked again, above 0; the rest of a shorter message ends
    the burst earlier."""


class LinkPolicy(Protocol):
    """Order in which a link sends its messages. One policy object serves one link."""

    def select(self, waiting: Sequence[LinkMessage], now: float) -> LinkBurst:
        """Return the next burst.

        Args:
            waiting: The messages, at least one. New messages and those that a burst interrupted go
                to the end.
            now: Time in seconds.
        """


class SimulatedLink:
    """Link that sends one message at a time, in bursts that its policy selects.

    The link is busy for the occupancy of a message only; the message arrives its propagation after
    that. Several senders may share a link: edges of a pipeline on one network card, or KV transfers
    of several engines. Messages of equal propagation arrive in the order in which the link has sent
    their last burst.
    """

    __slots__ = (
        "_free_time",
        "_is_end_due",
        "_loop",
        "_num_messages",
        "_policy",
        "_sending",
        "_waiting",
    )

    def __init__(self, loop: EventLoop, policy: LinkPolicy) -> None:
        self._loop = loop
        self._policy = policy
        self._waiting: list[LinkMessage] = []
        self._sending: LinkMessage | None = None
        """Message of the latest burst; None after a drop."""
        self._free_time = 0.0
        """End of the latest burst."""
        self._is_end_due = False
        """True if an event ends the latest burst. One that completes its message needs none until
        another message waits for it."""
        self._num_messages = 0

    @property
    def loop(self) -> EventLoop:
        """Clock of the link."""
        return self._loop

    @property
    def num_waiting(self) -> int:
        """Number of messages that are not sent completely."""
        return len(self._waiting) + self._is_busy(self._loop.now)

    def send(
        self,
        message_class: MessageClass,
        cost: TransferCost,
        deliver: Callable[[float, T], None],
        argument: T,
        owner: object = None,
        rank: int = PIPELINE,
    ) -> None:
        """Send a message from now on.

        Args:
            message_class: Class of the message, for the policy.
            cost: Occupancy and propagation of the message.
            deliver: Called with the arrival time and the argument.
            argument: Second argument of the call.
            owner: Sender, for `drop`.
            rank: Rank of the arrival among the events of its time.
        """
        now = self._loop.now
        message = LinkMessage(
            self._num_messages, message_class, cost, now, deliver, argument, owner, rank
        )
        self._num_messages += 1
        self._waiting.append(message)
        sending = self._sending
        if sending is None or not self._is_busy(now):
            self._start_burst(now)
        elif not self._is_end_due:
            self._push_end(sending)

    def drop(self, owner: object) -> None:
        """Remove the messages of a sender that has ended, and stop its burst.

        Messages that are sent completely arrive nevertheless.
        """
        now = self._loop.now
        self._waiting = [message for message in self._waiting if message.owner is not owner]
        sending = self._sending
        if sending is not None and sending.owner is owner and self._is_busy(now):
            sending.is_dropped = True
            self._sending = None
            self._is_end_due = False
            if self._waiting:
                self._start_burst(now)

    def _is_busy(self, now: float) -> bool:
        """Return True if a burst has not ended; one that an event ends is busy until that."""
        if self._sending is None:
            return False
        return self._is_end_due or self._free_time - now > TIME_TOLERANCE

    def _start_burst(self, now: float) -> None:
        position, seconds = self._policy.select(self._waiting, now)
        if seconds <= 0:
            raise ValueError(f"a link policy selected a burst of {seconds} s: select more than 0 s")
        message = self._sending = self._waiting.pop(position)
        is_complete = seconds >= message.remaining_seconds
        burst_seconds = message.remaining_seconds if is_complete else seconds
        message.remaining_seconds -= burst_seconds
        self._free_time = free_time = now + burst_seconds
        if is_complete:
            arrival = free_time + message.cost.propagation_seconds
            self._loop.push(arrival, message.rank, self._deliver, message)
        if self._waiting or not is_complete:
            self._push_end(message)

    def _push_end(self, message: LinkMessage) -> None:
        self._is_end_due = True
        self._loop.push(self._free_time, PIPELINE, self._end_burst, message)

    def _end_burst(self, now: float, message: LinkMessage) -> None:
        if message is not self._sending:
            return  # The message was dropped.
        self._is_end_due = False
        self._sending = None
        if message.remaining_seconds:
            self._waiting.append(message)
        if self._waiting:
            self._start_burst(now)

    def _deliver(self, now: float, message: LinkMessage) -> None:
        if not message.is_dropped:
            message.deliver(now, message.argument)
