"""Transports by name: where both ends of an edge are found.

Owns the table. A transport is one file in this folder and one line here.
"""

import importlib
from typing import TYPE_CHECKING

from gllm.transport.base import EdgeShape, Receiver, Sender

if TYPE_CHECKING:
    import torch

TRANSPORTS = {
    "shared-memory": ("gllm.transport.shared_memory", "SharedMemoryReceiver", "SharedMemorySender"),
}


def open_edges(
    transport: str,
    incoming: list[int],
    outgoing: list[int],
    shape: EdgeShape,
    dtype: "torch.dtype",
) -> tuple[Receiver | None, Sender | None]:
    """A stage's two edges by their descriptors; none where the pipeline begins and ends."""
    module, receiver, sender = TRANSPORTS[transport]
    ends = vars(importlib.import_module(module))
    return (
        ends[receiver](incoming, shape, dtype) if incoming else None,
        ends[sender](outgoing, shape, dtype) if outgoing else None,
    )
