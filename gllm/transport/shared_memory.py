"""Activations through memory that two processes of one host share; gllm/transport/ring.py has it.

The descriptors are sent, so nothing has a name in the file system, and nothing remains when both
processes are gone.
"""

import torch
from torch import Tensor

from gllm.transport.base import EdgeLayout
from gllm.transport.ring import Ring


class SlotRing(Ring):
    """Ring with a tensor view of each slot."""

    def __init__(self, descriptors: list[int], shape: EdgeLayout, dtype: torch.dtype) -> None:
        """Map the memory of an edge."""
        super().__init__(descriptors[0], descriptors[1], shape)
        self.dtype = dtype

    def tensor(self, step: int, tokens: int) -> Tensor:
        """Return the payload of a step's slot as [tokens, hidden_size]."""
        hidden, begin = self.shape.hidden_size, self.payload(step)
        flat = torch.frombuffer(self.memory, dtype=self.dtype, count=tokens * hidden, offset=begin)
        return flat.view(tokens, hidden)


class SharedMemorySender:
    """Sending end of a shared-memory edge."""

    def __init__(self, descriptors: list[int], shape: EdgeLayout, dtype: torch.dtype) -> None:
        """Open this end of an edge."""
        self._ring = SlotRing(descriptors, shape, dtype)

    def mark_begin(self, step: int) -> None:
        """Note that the stage begins to compute a step, for a data mover that sends it later."""
        self._ring.mark_begin(step)

    def send(self, step: int, hidden: Tensor) -> None:
        """Copy [tokens, hidden_size] to the step's slot and notify the receiver."""
        tokens = hidden.shape[0]
        self._ring.tensor(step, tokens).copy_(hidden)
        self._ring.signal(step, tokens)

    def fail(self, step: int, error: str) -> None:
        """Send an error in place of the activations."""
        self._ring.signal(step, 0, error)

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later."""
        self._ring.close()


class SharedMemoryReceiver:
    """Receiving end of a shared-memory edge."""

    def __init__(self, descriptors: list[int], shape: EdgeLayout, dtype: torch.dtype) -> None:
        """Open this end of an edge."""
        self._ring = SlotRing(descriptors, shape, dtype)

    @property
    def event(self) -> int:
        """Descriptor of an event that is readable once the next step has arrived."""
        return self._ring.event

    def has_arrived(self, step: int) -> bool:
        """Return True if `receive` of the next step does not wait."""
        return self._ring.has_arrived(step)

    def receive(self, step: int, tokens: int) -> Tensor:
        """Return the step's [tokens, hidden_size] in shared memory.

        Raises StepFailedError, TransportError.
        """
        self._ring.wait(step, tokens)
        return self._ring.tensor(step, tokens)

    def check(self) -> None:
        """Do nothing: the slot is complete before it is received."""

    def cancel(self) -> None:
        """End a waiting `receive` and all later ones with EdgeClosedError; called on any thread."""
        self._ring.cancel()

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later."""
        self._ring.close()
