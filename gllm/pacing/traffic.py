"""Interface between a link and its policy: classes of traffic, waiting messages and chunks."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol


class TrafficClass(IntEnum):
    """Class of a message; smaller values are more urgent."""

    DECODE = 0
    """Activations of a micro-batch of decodes; plans and results, which are small and on the way of
    every token."""
    PREFILL = 1
    """Activations of a micro-batch with a prefill chunk."""
    KV_CACHE = 2
    """KV blocks on their way to another engine."""


class WaitingMessage(Protocol):
    """Message that a link has not sent completely."""

    @property
    def traffic_class(self) -> TrafficClass:
        """Class of the message."""

    @property
    def num_bytes(self) -> int:
        """Size of the message."""

    @property
    def remaining_bytes(self) -> int:
        """Bytes that are not sent yet, at least 1."""

    @property
    def number(self) -> int:
        """Number of messages that the link received before this one."""


class LinkView(NamedTuple):
    """Properties of a link at the time of a decision."""

    now: float
    """Time in seconds."""
    bytes_per_second: float
    """Rate at which the link sends; 0 if it is unknown."""
    slack_seconds: float | None
    """Time until the next decode output of the sender is ready (gllm.pacing.slack), at most 0 if it
    is overdue; None if no decode is under way."""


class Chunk(NamedTuple):
    """Bytes of one message that a link sends until its policy selects again."""

    position: int
    """Position of the message among the waiting ones."""
    num_bytes: int
    """At least 1, at most the remaining bytes of the message."""


class LinkPolicy(Protocol):
    """Order in which a link sends its messages. One policy object serves one link."""

    @property
    def uses_slack(self) -> bool:
        """True if the policy reads `LinkView.slack_seconds`; other links may leave it None."""

    @property
    def sends_whole(self) -> bool:
        """True if the policy sends a message that waits alone whole, whatever the view.

        The simulator's links then do not call `select` for it.
        """

    def select(self, waiting: Sequence[WaitingMessage], view: LinkView) -> Chunk:
        """Return the next chunk. The link sends all of it before the next call.

        Args:
            waiting: The messages in the order of their numbers, at least one; messages of which a
                part is sent are among them.
            view: Properties of the link.
        """
