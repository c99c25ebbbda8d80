"""Transports by name: where both ends of an edge are found.

Owns the table. A transport is one file in this folder and one line here.
"""

import importlib
from typing import TYPE_CHECKING

from gllm.transport.base import EdgeShape, OnFault, Receiver, Sender

if TYPE_CHECKING:
    import torch

    from gllm.transport.device_streams import Queues, Stream

TRANSPORTS = {
    "host-staging": ("gllm.transport.host_staging", "HostStagingReceiver", "HostStagingSender"),
    "nccl": ("gllm.transport.nccl", "NcclReceiver", "NcclSender"),
    "shared-memory": ("gllm.transport.shared_memory", "SharedMemoryReceiver", "SharedMemorySender"),
}


def open_edges(
    transport: str,
    incoming: list[int],
    outgoing: list[int],
    shape: EdgeShape,
    dtype: "torch.dtype",
    device: "tuple[Queues, Stream] | None" = None,
    on_fault: OnFault = lambda error: None,
) -> tuple[Receiver | None, Sender | None]:
    """A stage's two edges by their descriptors; none where the pipeline begins and ends.

    device: what computes the stage, and the stream that it computes in; None on a CPU.
    on_fault: called where an edge breaks on a thread of its own.
    """
    module, receiver, sender = TRANSPORTS[transport]
    ends = vars(importlib.import_module(module))
    common = (shape, dtype) if device is None else (shape, dtype, *device, on_fault)
    return (
        ends[receiver](incoming, *common) if incoming else None,
        ends[sender](outgoing, *common) if outgoing else None,
    )
