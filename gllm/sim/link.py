"""Link in simulated time: messages occupy it one after another and arrive a propagation later."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from gllm.pacing.policy_registry import make_link_policy
from gllm.pacing.traffic import LinkPolicy, LinkView, TrafficClass
from gllm.sim.costs.base import TransferCost
from gllm.sim.event_loop import PIPELINE, EventLoop

T = TypeVar("T")

TIME_TOLERANCE = 1e-9
"""Tolerance in seconds between the end of a chunk and the time of an event."""
NOMINAL_BYTES_PER_SECOND = 6_553_600.0
"""Rate of messages whose cost model knows times only, because policies decide on bytes: a chunk of
64 KiB takes 10 ms."""


class SendingWindow(Protocol):
    """Protocol of limits on the bytes in flight of a sender, such as TCP's congestion window."""

    @property
    def bytes_per_second(self) -> float:
        """Rate that the window permits; infinite if the link alone limits the sender."""

    def sending_seconds(self, now: float, num_bytes: int, bytes_per_second: float) -> float:
        """Send bytes at a rate; return the seconds until the last one has left."""


class MessageLink(Protocol):
    """Protocol of what carries messages in simulated time: a link, or a path over several."""

    @property
    def loop(self) -> EventLoop:
        """Clock of the link."""

    @property
    def num_waiting(self) -> int:
        """Number of messages that are not completely sent."""

    @property
    def uses_slack(self) -> bool:
        """True if a policy reads the slack of the senders."""

    def add_slack_source(self, owner: object, source: Callable[[float], float | None]) -> None:
        """Add a sender, until `drop`; the policy considers the slack of its next decode output.

        Args:
            owner: The sender.
            source: Returns the time until its next decode output in seconds; None: there is none.
        """

    def send(
        self,
        traffic_class: TrafficClass,
        cost: TransferCost,
        deliver: Callable[[float, T], None],
        argument: T,
        owner: object = None,
        rank: int = PIPELINE,
    ) -> None:
        """Send a message; it leaves at once or waits.

        Args:
            traffic_class: Class of the message, for the policy.
            cost: Occupancy and propagation of the message.
            deliver: Called with the arrival time and the argument.
            argument: Second argument of the call.
            owner: Sender, for `drop`.
            rank: Rank of the arrival among the events of its time.
        """

    def drop(self, owner: object) -> None:
        """Remove the messages and the slack of a sender that has ended.

        Messages that are sent completely arrive nevertheless.
        """


@dataclass(eq=False, slots=True)
class LinkMessage:
    """Message that waits for a simulated network link or is being sent over it."""

    number: int
    """Number of messages that the link received before this one."""
    traffic_class: TrafficClass
    cost: TransferCost
    num_bytes: int
    remaining_bytes: int
    deliver: Callable[[float, Any], None]
    """Called with the arrival time and the argument."""
    argument: object
    owner: object
    """Sender, whose messages can be dropped together."""
    rank: int
    """Order of the arrival among events at the same time."""
    is_dropped: bool = False

    def occupancy_seconds(self, num_bytes: int) -> float:
        """Return the occupancy of a part of the message, at the message's own rate."""
        return self.cost.occupancy_seconds * (num_bytes / self.num_bytes)


class SimulatedLink:
    """Simulated network link that sends one message at a time, in chunks chosen by a policy.

    The policy (gllm.pacing) is the same code that paces real KV transfers. A message occupies the
    link for its size over the bandwidth, and arrives one latency later. Several senders may share a
    link: stages of a pipeline on one network card, or KV transfers of several engines. Messages of
    equal latency arrive in the order in which their last chunks were sent.

    Args:
        loop: Event loop with the simulated clock.
        policy: Chooses the next chunk to send.
        window: Limits how fast the sender may send; None: the link's bandwidth alone does.
    """

    def __init__(
        self, loop: EventLoop, policy: LinkPolicy, window: SendingWindow | None = None
    ) -> None:
        self.loop = loop
        """Clock of the link."""
        self._policy = policy
        self._window = window
        self._sends_whole = policy.sends_whole and window is None
        """True if an idle link sends a message at once and whole."""
        self._waiting: list[LinkMessage] = []
        self._sending: LinkMessage | None = None
        """Message of the latest chunk; None after a drop."""
        self._free_time = 0.0
        """End of the latest chunk."""
        self._is_end_due = False
        """True if an event ends the latest chunk. One that completes its message needs none until
        another message waits for it."""
        self._num_messages = 0
        self._bytes_per_second = NOMINAL_BYTES_PER_SECOND
        """Rate of the newest message."""
        self._slack_sources: list[tuple[object, Callable[[float], float | None]]] = []
        """Owners, and their times until the next decode output."""

    @property
    def num_waiting(self) -> int:
        """Number of messages that are not completely sent."""
        sending = self._sending
        is_last_chunk = sending is not None and not sending.remaining_bytes
        return len(self._waiting) + (is_last_chunk and self._is_busy(self.loop.now))

    @property
    def uses_slack(self) -> bool:
        """True if the policy reads the slack of the senders."""
        return self._policy.uses_slack

    def add_slack_source(self, owner: object, source: Callable[[float], float | None]) -> None:
        """Add a sender: see `MessageLink.add_slack_source`."""
        self._slack_sources.append((owner, source))

    def send(
        self,
        traffic_class: TrafficClass,
        cost: TransferCost,
        deliver: Callable[[float, T], None],
        argument: T,
        owner: object = None,
        rank: int = PIPELINE,
    ) -> None:
        """Send a message; it leaves at once or waits for the link: see `MessageLink.send`."""
        now = self.loop.now
        size = cost.num_bytes or max(1, round(cost.occupancy_seconds * NOMINAL_BYTES_PER_SECOND))
        message = LinkMessage(
            self._num_messages, traffic_class, cost, size, size, deliver, argument, owner, rank
        )
        self._num_messages += 1
        if cost.occupancy_seconds:
            self._bytes_per_second = message.num_bytes / cost.occupancy_seconds
        sending = self._sending
        is_idle = sending is None or not self._is_busy(now)
        if is_idle and self._sends_whole:
            # Most messages of a pipeline find their link idle: the policy has no choice then.
            self._send_bytes(message, message.num_bytes, cost.occupancy_seconds, now)
            return
        self._waiting.append(message)
        if is_idle:
            self._start_chunk(now)
        elif sending is not None and not self._is_end_due:
            self._push_end(sending)

    def drop(self, owner: object) -> None:
        """Remove the messages and the slack of a sender, and stop its chunk."""
        now = self.loop.now
        self._waiting = [message for message in self._waiting if message.owner is not owner]
        self._slack_sources = [source for source in self._slack_sources if source[0] is not owner]
        sending = self._sending
        if sending is not None and sending.owner is owner and self._is_busy(now):
            sending.is_dropped = True
            self._sending = None
            self._is_end_due = False
            if self._waiting:
                self._start_chunk(now)

    def _is_busy(self, now: float) -> bool:
        """Return True if a chunk has not ended; one that an event ends is busy until that."""
        if self._sending is None:
            return False
        return self._is_end_due or self._free_time - now > TIME_TOLERANCE

    def _start_chunk(self, now: float) -> None:
        position, num_bytes = self._policy.select(self._waiting, self._view(now))
        message = self._waiting[position]
        if not 1 <= num_bytes <= message.remaining_bytes:
            raise ValueError(
                f"a link policy selected {num_bytes} bytes of a message with "
                f"{message.remaining_bytes}: select 1 to {message.remaining_bytes}"
            )
        seconds = message.occupancy_seconds(num_bytes)
        if self._window is not None and seconds:
            seconds = self._window.sending_seconds(now, num_bytes, num_bytes / seconds)
        self._send_bytes(message, num_bytes, seconds, now)
        if not message.remaining_bytes:
            del self._waiting[position]
        if self._waiting:
            self._push_end(message)

    def _send_bytes(self, message: LinkMessage, num_bytes: int, seconds: float, now: float) -> None:
        """Occupy the link for a part of a message; the last one makes the message arrive."""
        self._sending = message
        message.remaining_bytes -= num_bytes
        self._free_time = free_time = now + seconds
        if not message.remaining_bytes:
            arrival = free_time + message.cost.propagation_seconds
            self.loop.push(arrival, message.rank, self._deliver, message)

    def _view(self, now: float) -> LinkView:
        rate = self._bytes_per_second
        if self._window is not None:
            rate = min(rate, self._window.bytes_per_second)
        if not self._policy.uses_slack:
            return LinkView(now, rate, None)
        slacks = [source(now) for _, source in self._slack_sources]
        slack = min((seconds for seconds in slacks if seconds is not None), default=None)
        return LinkView(now, rate, slack)

    def _push_end(self, message: LinkMessage) -> None:
        self._is_end_due = True
        self.loop.push(self._free_time, PIPELINE, self._end_chunk, message)

    def _end_chunk(self, now: float, message: LinkMessage) -> None:
        if message is not self._sending:
            return  # The message was dropped.
        self._is_end_due = False
        self._sending = None
        if self._waiting:
            self._start_chunk(now)

    def _deliver(self, now: float, message: LinkMessage) -> None:
        if not message.is_dropped:
            message.deliver(now, message.argument)


def make_link(
    loop: EventLoop, policy: str = "serial", window: SendingWindow | None = None
) -> SimulatedLink:
    """Return an idle simulated network link.

    Args:
        loop: Event loop with the simulated clock.
        policy: Name of the policy that chooses the next chunk to send, as for `make_link_policy`.
        window: Limits how fast the sender may send; None: the link's bandwidth alone does.

    Raises:
        ValueError: The name of the policy is unknown.
    """
    return SimulatedLink(loop, make_link_policy(policy), window)
