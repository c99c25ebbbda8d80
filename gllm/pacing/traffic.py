"""Interface between a link and its policy: classes of traffic, waiting messages and chunks."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol


class TrafficClass(IntEnum):
    """Priority of a message on a link: decode, prefill or KV cache; smaller is more urgent."""

    DECODE = 0
    """Activations of a micro-batch of decodes; also plans of steps and sampled tokens."""
    PREFILL = 1
    """Activations of a micro-batch with a prefill chunk."""
    KV_CACHE = 2
    """KV blocks on their way to another engine."""


class WaitingMessage(Protocol):
    """Message in the send queue of a link, unsent or sent in part."""

    @property
    def traffic_class(self) -> TrafficClass:
        """Priority class of the message."""

    @property
    def num_bytes(self) -> int:
        """Size of the whole message."""

    @property
    def remaining_bytes(self) -> int:
        """Bytes that are not sent yet, at least 1."""

    @property
    def number(self) -> int:
        """Number of messages that the link received before this one."""


class LinkView(NamedTuple):
    """Rate of a link, and time until the next decode needs it, when a policy selects a message."""

    now: float
    """Time in seconds."""
    bytes_per_second: float
    """Rate at which the link sends; 0 if it is unknown."""
    slack_seconds: float | None
    """Time until the next decode output of the sender is ready (gllm.pacing.slack), at most 0 if it
    is late; None if none is expected.
    """


class Chunk(NamedTuple):
    """Number of bytes of a waiting message that a link sends before its policy selects again."""

    position: int
    """Position of the message among the waiting ones."""
    num_bytes: int
    """At least 1, at most the remaining bytes of the message."""


class LinkPolicy(Protocol):
    """Interface of policies that choose the message, or part of it, that a link sends next."""

    @property
    def uses_slack(self) -> bool:
        """True if the policy reads `LinkView.slack_seconds`; it may be None for others."""

    @property
    def sends_whole(self) -> bool:
        """True if the policy always sends the whole message if only one waits.

        The simulator's links then do not call `select` for it.
        """

    def select(self, waiting: Sequence[WaitingMessage], view: LinkView) -> Chunk:
        """Return the next chunk to send. The link sends all of it before the next call.

        Args:
            waiting: unsent or partly sent messages in order of arrival, at least one.
            view: rate of the link, and time until the next decode is ready.
        """
