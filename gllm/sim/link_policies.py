"""Link policies by name. Another policy is one class and one line of LINK_POLICIES."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from operator import attrgetter
from types import MappingProxyType

from gllm.sim.event_loop import EventLoop
from gllm.sim.link import LinkBurst, LinkMessage, LinkPolicy, MessageClass, SimulatedLink

CHUNK_SECONDS = 1e-3
"""Occupancy of a chunk: the time for which a more urgent message waits at most. A frame of 64 KiB
takes as long at 0.5 Gbit/s."""

WHOLE_FIRST_MESSAGE = LinkBurst(0, inf)


class SerialLinkPolicy:
    """Whole messages, first come, first served."""

    def select(self, waiting: Sequence[LinkMessage], now: float) -> LinkBurst:
        """Return all of the oldest message."""
        return WHOLE_FIRST_MESSAGE


class PriorityLinkPolicy:
    """Classes in order, and within a class first come, first served.

    A more urgent message interrupts another one at the end of a chunk of `chunk_seconds`.
    """

    def __init__(self, chunk_seconds: float = CHUNK_SECONDS) -> None:
        self._chunk_seconds = chunk_seconds

    def select(self, waiting: Sequence[LinkMessage], now: float) -> LinkBurst:
        """Return a chunk of the oldest message of the most urgent class."""
        index = 0
        if len(waiting) > 1:
            message = min(waiting, key=attrgetter("message_class", "number"))
            index = waiting.index(message)
        if waiting[index].message_class is MessageClass.DECODE:
            return LinkBurst(index, inf)  # Nothing is more urgent.
        return LinkBurst(index, self._chunk_seconds)


class FairLinkPolicy:
    """Equal shares of the link for all messages that wait, in turns of `chunk_seconds`."""

    def __init__(self, chunk_seconds: float = CHUNK_SECONDS) -> None:
        self._burst = LinkBurst(0, chunk_seconds)

    def select(self, waiting: Sequence[LinkMessage], now: float) -> LinkBurst:
        """Return a chunk of the message that was not served for the longest time."""
        return self._burst


LINK_POLICIES: Mapping[str, Callable[[], LinkPolicy]] = MappingProxyType(
    {
        "serial": SerialLinkPolicy,
        "priority": PriorityLinkPolicy,
        "fair": FairLinkPolicy,
    }
)
"""Factories of link policies by name."""


def make_link(loop: EventLoop, policy: str = "serial") -> SimulatedLink:
    """Return an idle link with a policy of LINK_POLICIES.

    Raises:
        ValueError: The name is unknown.
    """
    if policy not in LINK_POLICIES:
        raise ValueError(f"link policy {policy!r} is none of {', '.join(LINK_POLICIES)}")
    return SimulatedLink(loop, LINK_POLICIES[policy]())
