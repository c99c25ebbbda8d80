"""Activations through memory that two processes of one host share; gllm/transport/ring.py has it.

The descriptors are sent, so nothing has a name in the file system, and nothing remains when both
processes are gone.
"""

import torch
from torch import Tensor

from gllm.transport.base import EdgeLayout
from gllm.transport.ring import Ring


class SlotRing(Ring):
    """Ring buffer in shared memory with a tensor view of each step's activations."""

    def __init__(self, descriptors: list[int], shape: EdgeLayout, dtype: torch.dtype) -> None:
        """Map the memory of an edge."""
        super().__init__(descriptors[0], descriptors[1], shape)
        self.dtype = dtype

    def tensor(self, step: int, tokens: int) -> Tensor:
        """Return the activations in a step's buffer as a tensor [tokens, hidden_size]."""
        hidden, begin = self.shape.hidden_size, self.payload(step)
        flat = torch.frombuffer(self.memory, dtype=self.dtype, count=tokens * hidden, offset=begin)
        return flat.view(tokens, hidden)


class SharedMemorySender(SlotRing):
    """Sends activations to a process of the same host through shared memory; implements Sender."""

    def send(self, step: int, hidden: Tensor) -> None:
        """Copy [tokens, hidden_size] to the step's buffer and notify the receiver."""
        tokens = hidden.shape[0]
        self.tensor(step, tokens).copy_(hidden)
        self.signal(step, tokens)

    def fail(self, step: int, error: str) -> None:
        """Send an error in place of the activations."""
        self.signal(step, 0, error)


class SharedMemoryReceiver(SlotRing):
    """Receives activations from a local process through shared memory; implements Receiver."""

    def receive(self, step: int, tokens: int) -> Tensor:
        """Return the step's [tokens, hidden_size] in shared memory.

        Raises StepFailedError, TransportError.
        """
        self.wait(step, tokens)
        return self.tensor(step, tokens)

    def check(self) -> None:
        """Do nothing: the slot is complete before it is received."""
