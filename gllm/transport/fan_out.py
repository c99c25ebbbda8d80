"""Sending end of several edges: the ranks of the next stage that receive from one rank.

All ranks of a stage have the same activations, so a rank of the next stage needs only one of them.
With more receivers than senders a sender has several, with fewer some senders have none.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gllm.transport.base import Sender

if TYPE_CHECKING:
    import torch


class FanOutSender:
    """Sends the activations of each step over several edges."""

    def __init__(self, senders: Sequence[Sender]) -> None:
        """Create the sending end.

        senders: one per receiver; without any, activations are dropped.
        """
        self._senders = senders

    def mark_begin(self, step: int) -> None:
        """See Sender."""
        for sender in self._senders:
            sender.mark_begin(step)

    def send(self, step: int, hidden: "torch.Tensor") -> None:
        """See Sender."""
        for sender in self._senders:
            sender.send(step, hidden)

    def fail(self, step: int, error: str) -> None:
        """See Sender."""
        for sender in self._senders:
            sender.fail(step, error)

    def close(self) -> None:
        """See Sender."""
        for sender in self._senders:
            sender.close()


def join_senders(senders: Sequence[Sender]) -> Sender:
    """Return one sending end for all receivers of a rank."""
    return senders[0] if len(senders) == 1 else FanOutSender(senders)
