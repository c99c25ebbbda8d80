"""Registry of transports. A transport is one file in this folder and one line of TRANSPORTS.

`FanOutSender` sends to several receivers.
"""

import importlib
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gllm.transport.base import EdgeLayout, OnTransportError, Receiver, Sender
from gllm.transport.edge import AUTO, Edge

if TYPE_CHECKING:
    import torch

    from gllm.transport.device_streams import DeviceRuntime, DeviceStream
    from gllm.transport.nccl import GroupFactory


class FanOutSender:
    """Sends the activations of each step to several ranks of the next stage; implements Sender."""

    def __init__(self, senders: Sequence[Sender]) -> None:
        """Create from other senders.

        senders: one per receiver; without any, activations are dropped.
        """
        self._senders = senders

    def mark_begin(self, step: int) -> None:
        """Record that the stage begins to compute a step.

        The data mover predicts from it when the next output is ready.
        """
        for sender in self._senders:
            sender.mark_begin(step)

    def send(self, step: int, hidden: "torch.Tensor") -> None:
        """Send the activations of a step."""
        for sender in self._senders:
            sender.send(step, hidden)

    def fail(self, step: int, error: str) -> None:
        """Send an error in place of the activations of a step."""
        for sender in self._senders:
            sender.fail(step, error)

    def close(self) -> None:
        """Free this end, its threads included; no other method runs at the same time or later."""
        for sender in self._senders:
            sender.close()


def join_senders(senders: Sequence[Sender]) -> Sender:
    """Return one Sender for all receivers of a rank: the only one, or a FanOutSender."""
    return senders[0] if len(senders) == 1 else FanOutSender(senders)


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
    create_nccl_group: "GroupFactory | None" = None,
) -> tuple[list[Receiver], list[list[Sender]]]:
    """Open this worker's connections to the previous and the next stage.

    With two ring buffers (--lanes 2), NCCL is not used: transfers of two communicators between the
    same GPUs may wait for each other.

    Args:
        incoming: connection from the previous stage; None on the first stage.
        outgoing: connections to the ranks of the next stage that receive from this worker.
        default: transport of connections with transport AUTO.
        shape: shape and dtype of activations, and number of step buffers.
        dtype: dtype of activations.
        device: device that computes the stage and its compute stream; None on a CPU.
        on_error: called if a connection fails on a background thread.
        is_trusted: True if NCCL, which encrypts nothing, may connect machines.
        is_cancelled: returns True to stop waiting for the worker of another machine.
        create_nccl_group: creates the process group of an NCCL connection, by default with NCCL.

    Returns:
        A receiver per ring buffer, none on the first stage; and for each outgoing connection a
        sender per ring buffer.

    Raises:
        EdgeClosedError: a connection was cancelled meanwhile.
    """
    common = (shape, dtype) if device is None else (shape, dtype, *device, on_error)
    edges = [*outgoing, *([] if incoming is None else [incoming])]
    num_lanes = max((edge.num_lanes for edge in edges), default=1)
    local = "host-staging" if default == "nccl" and num_lanes > 1 else default

    def open_as(transport: str, edge: Edge, end: int, lane: int = 0) -> Any:
        module, *classes = TRANSPORTS[transport]
        if device is not None:
            # NCCL between machines is opened on a thread of its own.
            device[0].bind_thread()
        open_class = getattr(importlib.import_module(module), classes[end])
        options: dict[str, Any] = {}
        if transport == "nccl" and create_nccl_group is not None:
            options["create_group"] = create_nccl_group
        return open_class(edge.lane_descriptors(lane), *common, **options)

    def open_first(edge: Edge, end: int) -> Any:
        if edge.transport != AUTO or not edge.is_remote:
            return open_as(local if edge.transport == AUTO else edge.transport, edge, end)
        from gllm.transport import probed_nccl
        from gllm.transport.log_store import open_log_store

        if default == "nccl":
            refusal = "" if is_trusted else probed_nccl.NOT_TRUSTED
            refusal = probed_nccl.SEVERAL_LANES if num_lanes > 1 else refusal
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

    def open_lanes(edge: Edge, end: int) -> list[Any]:
        transport = local if edge.transport == AUTO else edge.transport
        further = (open_as(transport, edge, end, lane) for lane in range(1, edge.num_lanes))
        return [open_first(edge, end), *further]

    receivers = [] if incoming is None else open_lanes(incoming, 0)
    return receivers, [open_lanes(edge, 1) for edge in outgoing]
