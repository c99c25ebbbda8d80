"""Memory shared by the ranks of a stage, which the parent creates anew for each epoch.

The workers of a stage get its descriptors with their assignments. This module imports no torch: the
parent creates regions before the workers open them (`gllm.transport.groups`).
"""

import os
from functools import partial

import msgspec

from gllm.transport.descriptors import create_descriptors


class Region(msgspec.Struct, frozen=True):
    """File descriptors of the shared memory in which a stage's ranks exchange tensors."""

    transport: str
    """A name of `gllm.transport.groups.GROUPS`, or AUTO to choose by the devices of the ranks."""
    descriptors: list[int]
    """Two anonymous files: the shared memory of the ranks, and the rendezvous store of NCCL."""

    def close(self) -> None:
        """Close the descriptors in this process."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class RegionLayout(msgspec.Struct, frozen=True):
    """Largest tensors that the tensor parallel ranks of a stage exchange in shared memory."""

    max_tokens: int
    """Largest number of tokens per step."""
    hidden_size: int
    vocab_rows: int
    """Largest number of vocabulary entries of one rank; 0 if the stage has no LM head."""


def create_region(name: str, transport: str = "auto") -> Region:
    """Create the shared memory for the tensor parallel ranks of one stage on this host.

    The files have no path. They are sent to the workers and vanish with the last process that has
    them open.

    Args:
        name: name of the memory files, shown by tools such as lsof.
        transport: a name of `gllm.transport.groups.GROUPS`, or `auto` to choose by the devices.

    Raises:
        OSError: The process has reached its limit of open descriptors; none stay open.
    """
    descriptors = create_descriptors(
        partial(os.memfd_create, name), partial(os.memfd_create, f"{name}-meeting")
    )
    return Region(transport, descriptors)
