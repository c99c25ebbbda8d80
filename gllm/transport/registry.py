"""Registry of transports. A transport is one file in this folder and one line of TRANSPORTS."""

import importlib
from collections.abc import Callable, Sequence
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


def open_edges(
    incoming: Edge | None,
    outgoing: Sequence[Edge],
    default: str,
    shape: EdgeLayout,
    dtype: "torch.dtype",
    device: "tuple[DeviceRuntime, DeviceStream] | None" = None,
    on_error: OnTransportError = lambda error: None,
    is_trusted: bool = False,
    is_cancelled: Callable[[], bool] = lambda: False,
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
        is_trusted: True if NCCL, which encrypts nothing, may connect machines.
        is_cancelled: asked while the worker of another machine is awaited.

    Raises:
        EdgeClosedError: an edge was cancelled meanwhile.
    """
    common = (shape, dtype) if device is None else (shape, dtype, *device, on_error)

    def open_as(transport: str, edge: Edge, end: int) -> Any:
        module, *classes = TRANSPORTS[transport]
        if device is not None:
            # NCCL between machines is opened on a thread of its own.
            device[0].bind_thread()
        return getattr(importlib.import_module(module), classes[end])(edge.descriptors, *common)

    def open_end(edge: Edge, end: int) -> Any:
        if edge.transport != AUTO or not edge.is_remote:
            return open_as(default if edge.transport == AUTO else edge.transport, edge, end)
        from gllm.transport import probed_nccl
        from gllm.transport.log_store import open_log_store

        if default == "nccl":
            refusal = "" if is_trusted else probed_nccl.NOT_TRUSTED
        else:
            refusal = probed_nccl.NO_GPU if device is None else probed_nccl.SHARED_GPU
        return probed_nccl.open_remote_end(
            open_log_store(edge.descriptors, is_cancelled),
            # SENDER_RANK is 0, and the receiver is the first end in TRANSPORTS.
            1 - end,
            refusal,
            lambda: open_as("nccl", edge, end),
            lambda: open_as("host-staging" if default == "nccl" else default, edge, end),
        )

    receiver = None if incoming is None else open_end(incoming, 0)
    return receiver, [open_end(edge, 1) for edge in outgoing]
