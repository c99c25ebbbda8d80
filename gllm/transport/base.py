"""Interface of a transport, which moves activations from one pipeline stage to the next.

The driver announces every step to all stages ahead of its activations. Both ends of an edge
therefore know step, shape and dtype beforehand, and a transport only checks them.

With two lanes (gllm/scheduler/lanes.py) an edge has a sender and a receiver per lane, and `step` is
the number of the step within its lane.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import torch


class StepFailedError(Exception):
    """An earlier stage could not compute this step; the step's sequences end with this error."""


class TransportError(Exception):
    """The activations received are not those announced; the pipeline cannot continue."""


class EdgeClosedError(Exception):
    """This process has cancelled the edge, because its epoch is over."""


OnTransportError = Callable[[BaseException], None]
"""Reports, from any thread, why an edge is broken."""


class EdgeLayout(msgspec.Struct, frozen=True):
    """Capacity of an edge."""

    slots: int
    """Largest number of steps in flight, and one more where a stage has several ranks. A slot is
    reused only after its previous step has committed, and the step after that one too in the latter
    case."""
    max_tokens: int
    """Largest number of tokens per step."""
    hidden_size: int
    itemsize: int
    """Bytes per element."""
    is_bfloat16: bool = False
    """True if elements of 2 bytes are bfloat16, not float16."""


class Sender(Protocol):
    """Sending end of an edge, on the earlier stage. Called on the compute thread."""

    def mark_begin(self, step: int) -> None:
        """Note that the stage begins to compute a step, for a data mover that sends it later."""

    def send(self, step: int, hidden: "torch.Tensor") -> None:
        """Send the activations of a step.

        Args:
            step: number of the step.
            hidden: [tokens, hidden_size]. The caller may overwrite it once this returns; on a
                device, by work put into the stage's stream from then on.
        """

    def fail(self, step: int, error: str) -> None:
        """Send an error in place of the activations of a step."""

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later."""


class Receiver(Protocol):
    """Receiving end of an edge, on the later stage. Called on the compute thread."""

    @property
    def event(self) -> int:
        """Descriptor of an event that is readable once the next step has arrived."""

    def has_arrived(self, step: int) -> bool:
        """Return True if `receive` of the next step does not wait."""

    def receive(self, step: int, tokens: int) -> "torch.Tensor":
        """Return the activations [tokens, hidden_size] of a step; wait for them without CPU load.

        The caller may read and overwrite the tensor until the step has committed. On a device it is
        valid for work put into the stage's stream from then on.

        Raises:
            StepFailedError: an earlier stage sent an error.
            TransportError: the edge is broken.
            EdgeClosedError: `cancel` was called, before or meanwhile.
        """

    def check(self) -> None:
        """Raise TransportError if received activations may be invalid.

        Called after a device has computed with them.
        """

    def cancel(self) -> None:
        """End a waiting `receive` and all later ones with EdgeClosedError; called on any thread."""

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later.

        Tensors that `receive` returned keep their memory until they are freed.
        """
