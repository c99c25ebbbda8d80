"""How activations get from one stage to the next: the interface, and who implements it.

Owns the contract of an edge. Knows nothing of models; metadata travels on the bus ahead of the
activations, so both ends know step, shape and dtype beforehand and a transport only checks them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import torch


class StepFailed(Exception):
    """The stages before could not compute this step; its sequences end with this error."""


class TransportFault(Exception):
    """What arrived is not what the plan announced; the pipeline cannot go on."""


OnFault = Callable[[BaseException], None]
"""Reports, from any thread, why an edge is broken."""


class EdgeShape(msgspec.Struct, frozen=True):
    """What an edge has to carry at most."""

    slots: int
    """Steps in flight at most: a slot is used again only after the step before in it committed."""
    max_tokens: int
    hidden_size: int
    itemsize: int
    """Bytes of one element."""


class Sender(Protocol):
    """The earlier stage's end. Called on the compute thread."""

    def send(self, step: int, hidden: "torch.Tensor") -> None:
        """hidden: [tokens, hidden_size]. It may be changed once this returns; on a device, by what
        is put into the stage's stream from then on."""

    def fail(self, step: int, error: str) -> None:
        """Tell the following stages that there is no activation for this step."""


class Receiver(Protocol):
    """The later stage's end. Called on the compute thread."""

    def receive(self, step: int, tokens: int) -> "torch.Tensor":
        """[tokens, hidden_size] of this step; waits for it without using the CPU.

        The tensor is the receiver's, to overwrite as well, until the step has committed; on a
        device it is there for what is put into the stage's stream from now on. Raises StepFailed,
        TransportFault.
        """

    def check(self) -> None:
        """Raises TransportFault where what was received may not be what was sent; to be asked once
        a device has computed with it."""
