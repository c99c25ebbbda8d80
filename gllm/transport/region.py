"""Memory shared by the ranks of a stage, which the parent creates anew for each epoch.

The workers of a stage get its descriptors with their assignments. This module imports no torch: the
parent creates regions before the workers open them (`gllm.transport.groups`).
"""

import os
from functools import partial

import msgspec

from gllm.transport.descriptors import create_descriptors


class Region(msgspec.Struct, frozen=True):
    """Descriptors of the memory that the ranks of a stage share."""

    transport: str
    """A name of `gllm.transport.groups.GROUPS`, or AUTO: by the devices of the ranks."""
    descriptors: list[int]
    """Two anonymous files: the memory of the ranks' parts, and the store of a process group."""

    def close(self) -> None:
        """Close the descriptors in this process."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class RegionLayout(msgspec.Struct, frozen=True):
    """Capacity of a region."""

    max_tokens: int
    """Largest number of tokens per step."""
    hidden_size: int
    vocab_rows: int
    """Largest part of the vocabulary that one rank has; 0 where the stage has no head."""


def create_region(name: str, transport: str = "auto") -> Region:
    """Create a region for the ranks of one stage on this host.

    Its files have no path. They are sent to the workers and vanish with the last process that
    holds them.

    Raises:
        OSError: This process has no more descriptors; those of the region are closed again.
    """
    descriptors = create_descriptors(
        partial(os.memfd_create, name), partial(os.memfd_create, f"{name}-meeting")
    )
    return Region(transport, descriptors)
