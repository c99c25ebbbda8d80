"""Path over several simulated links that a message occupies at the same time.

A KV transfer between two machines, for example, occupies the way out of one and the way into the
other, which it shares with the transfers of other engines and with activations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from gllm.pacing.traffic import Chunk, LinkView, TrafficClass, WaitingMessage
from gllm.sim.costs.base import TransferCost
from gllm.sim.event_loop import PIPELINE, EventLoop
from gllm.sim.link import MessageLink

T = TypeVar("T")

KV_CHUNK_BYTES = 8 * 2**20
"""Largest chunk of KV blocks on a link that activations use too: they wait for 2.7 ms at 25 Gbit/s.
Connections of several processes share a network card in still smaller parts."""


class ActivationsFirstPolicy:
    """Link policy that sends activations whole and first, and KV blocks in chunks."""

    uses_slack = False
    sends_whole = False

    def select(self, waiting: Sequence[WaitingMessage], view: LinkView) -> Chunk:
        """Return the oldest message of the most urgent class, or a chunk of its KV blocks."""
        position = min(range(len(waiting)), key=lambda index: waiting[index].traffic_class)
        message = waiting[position]
        most = message.remaining_bytes
        if message.traffic_class is TrafficClass.KV_CACHE:
            most = min(most, KV_CHUNK_BYTES)
        return Chunk(position, most)


class LinkShare(NamedTuple):
    """Link of a path, with the share of a message's bytes that it carries."""

    link: MessageLink
    bytes_share: float
    bytes_per_second: float


@dataclass(eq=False, slots=True)
class _JointMessage:
    """Message whose parts are under way."""

    num_missing: int
    deliver: Callable[[float, object], None]
    argument: object


class JointLink:
    """Path over several shared links: a message arrives when the last link has sent its part.

    Args:
        loop: Event loop of the links.
        parts: Links of the path.

    Raises:
        ValueError: There is no link.
    """

    def __init__(self, loop: EventLoop, parts: Sequence[LinkShare]) -> None:
        if not parts:
            raise ValueError("parts is empty: a path has at least one link")
        self.loop = loop
        """Clock of the links."""
        self._parts = parts

    @property
    def num_waiting(self) -> int:
        """Largest number of messages that one of the links has not completely sent."""
        return max(part.link.num_waiting for part in self._parts)

    @property
    def uses_slack(self) -> bool:
        """True if the policy of a link reads the slack of the senders."""
        return any(part.link.uses_slack for part in self._parts)

    def add_slack_source(self, owner: object, source: Callable[[float], float | None]) -> None:
        """Add a sender to all links."""
        for part in self._parts:
            part.link.add_slack_source(owner, source)

    def send(
        self,
        traffic_class: TrafficClass,
        cost: TransferCost,
        deliver: Callable[[float, T], None],
        argument: T,
        owner: object = None,
        rank: int = PIPELINE,
    ) -> None:
        """Send the parts of a message over all links: see `MessageLink.send`."""
        message = _JointMessage(len(self._parts), deliver, argument)  # type: ignore[arg-type]
        for link, share, rate in self._parts:
            size = share * cost.num_bytes
            part = TransferCost(size / rate, cost.propagation_seconds, max(1, round(size)))
            link.send(traffic_class, part, _deliver_part, message, owner, rank)

    def drop(self, owner: object) -> None:
        """Remove the messages of a sender that has ended from all links."""
        for part in self._parts:
            part.link.drop(owner)


def _deliver_part(now: float, message: _JointMessage) -> None:
    message.num_missing -= 1
    if not message.num_missing:
        message.deliver(now, message.argument)
