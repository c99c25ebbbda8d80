"""Registry of transports. A transport is one file in this folder and one line of TRANSPORTS."""

import importlib
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gllm.transport.base import EdgeLayout, OnTransportError, Receiver, Sender
from gllm.transport.edge import AUTO, Edge

if TYPE_CHECKING:
    import torch

    from gllm.transport.device_streams import DeviceRuntime, DeviceStream


TRANSPORTS = MappingProxyType(
    {
        "host-staging": ("gllm.transport.host_staging", "HostStagingReceiver", "HostStagingSender"),
        "nccl": ("gllm.transport.nccl", "NcclReceiver", "NcclSender"),
        "shared-memory": (
            "gllm.transport.shared_memory",
            "SharedMemoryReceiver",
            "SharedMemorySender",
        ),
    }
)
"""Transports to their module, receiver and sender, imported on first use."""


def choose_transport(edge: Edge, default: str) -> str:
    """Return the name of an edge's transport.

    default: transport of an edge that leaves the choice to the workers.
    """
    if edge.transport != AUTO:
        return edge.transport
    # NCCL encrypts nothing and needs ports of its own: it leaves the machine only where the head
    # has chosen it.
    return "host-staging" if edge.is_remote and default == "nccl" else default


def open_edges(
    incoming: Edge | None,
    outgoing: Sequence[Edge],
    default: str,
    shape: EdgeLayout,
    dtype: "torch.dtype",
    device: "tuple[DeviceRuntime, DeviceStream] | None" = None,
    on_error: OnTransportError = lambda error: None,
) -> tuple[Receiver | None, list[Sender]]:
    """Open this worker's ends of its edges.

    Args:
        incoming: edge from the previous stage; None on the first stage.
        outgoing: edges to the ranks of the next stage that receive from this worker.
        default: transport of an edge that leaves the choice to the workers.
        shape: largest steps that the edges carry.
        dtype: of activations.
        device: the device that computes the stage and its compute stream; None on a CPU.
        on_error: called if an edge fails on a background thread.
    """
    common = (shape, dtype) if device is None else (shape, dtype, *device, on_error)

    def open_end(edge: Edge, end: int) -> Any:
        module, *classes = TRANSPORTS[choose_transport(edge, default)]
        return getattr(importlib.import_module(module), classes[end])(edge.descriptors, *common)

    receiver = None if incoming is None else open_end(incoming, 0)
    return receiver, [open_end(edge, 1) for edge in outgoing]
