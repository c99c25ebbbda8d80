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
    """A step failed on an earlier pipeline stage; the sequences of the step end with this error."""


class TransportError(Exception):
    """A transfer of activations between stages failed or had an unexpected step, shape or dtype.

    The pipeline cannot continue.
    """


class EdgeClosedError(Exception):
    """This process has cancelled the connection between two stages, because the engine restarts."""


OnTransportError = Callable[[BaseException], None]
"""Reports, from any thread, why an edge is broken."""


class EdgeLayout(msgspec.Struct, frozen=True):
    """Shape and dtype of the activations sent between two stages, and number of step buffers."""

    slots: int
    """Number of buffers, one per step in flight: the largest number of steps in flight, plus one if
    a stage has several ranks.

    A buffer is reused only after its previous step has committed, and with several ranks also the
    step after that one."""
    max_tokens: int
    """Largest number of tokens per step."""
    hidden_size: int
    itemsize: int
    """Bytes per element."""
    is_bfloat16: bool = False
    """True if elements of 2 bytes are bfloat16, not float16."""


class Sender(Protocol):
    """Interface of the sending end of a pipeline edge, which sends activations to the next stage.

    Its methods are called on the compute thread.
    """

    def mark_begin(self, step: int) -> None:
        """Record that the stage begins to compute a step.

        The data mover predicts from it when the next output is ready.
        """

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
    """Interface of the receiving end of a pipeline edge, which waits for activations.

    They come from the previous stage. Methods are called on the compute thread, except `cancel`.
    """

    @property
    def event(self) -> int:
        """File descriptor (eventfd) that becomes readable once the next step has arrived."""

    def has_arrived(self, step: int) -> bool:
        """Return True if `receive` for the next step returns without waiting."""

    def receive(self, step: int, tokens: int) -> "torch.Tensor":
        """Wait for the activations of a step and return them, [tokens, hidden_size].

        The thread sleeps while it waits. The caller may read and overwrite the tensor until the
        step has committed. On a device it is valid for work put into the stage's stream from then
        on.

        Raises:
            StepFailedError: an earlier stage sent an error.
            TransportError: the connection is broken.
            EdgeClosedError: `cancel` was called, before or meanwhile.
        """

    def check(self) -> None:
        """Raise TransportError if received activations may be invalid.

        Called once the device has computed with them.
        """

    def cancel(self) -> None:
        """End a waiting `receive` and all later ones with EdgeClosedError; called on any thread."""

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later.

        Tensors that `receive` returned keep their memory until they are freed.
        """
