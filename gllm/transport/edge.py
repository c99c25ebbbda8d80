"""Edges between neighbouring stages, which the parent creates anew for each epoch.

The workers on both sides get their descriptors with their assignments. This module imports no
torch: the parent creates the edges before the workers open them.
"""

import os
from functools import partial

import msgspec

from gllm.transport.descriptors import create_descriptors

AUTO = "auto"
"""Transport of an edge that is chosen by the devices of the two stages."""
LOCAL_DESCRIPTORS = 3
"""Descriptors of an edge of one lane within a machine."""
RING_DESCRIPTORS = 2
"""Descriptors of a ring: its memory and its event."""


class Edge(msgspec.Struct, frozen=True):
    """Transport and file descriptors of the connection from one rank to a rank of the next stage.

    The parent process creates it and sends it to both workers, which open it with `open_edges`.
    """

    transport: str
    """A name of `gllm.transport.registry.TRANSPORTS`, or AUTO."""
    addresses: list[str]
    """Network addresses of both ends; empty where both stages run on one host."""
    descriptors: list[int]
    """File descriptors, in this order: memory of the ring buffer, eventfd that counts steps, file
    for the rendezvous of NCCL.

    Between machines, the rendezvous file is this worker's log (rendezvous_log.py), followed by the
    copy of the other worker's log and the eventfd of this worker's log. Last come the memory and
    the eventfd of a second ring buffer."""
    is_remote: bool = False
    """True if the other stage is on another machine, so that a data mover reads or writes the
    memory."""
    num_lanes: int = 1
    """Number of ring buffers: 2 if decode steps may overtake prefill steps (--lanes 2), otherwise
    1."""

    def lane_descriptors(self, lane: int) -> list[int]:
        """Return the descriptors of one ring buffer in the form of an `Edge` with a single one."""
        common = len(self.descriptors) - RING_DESCRIPTORS * (self.num_lanes - 1)
        if not lane:
            return self.descriptors[:common]
        begin = common + RING_DESCRIPTORS * (lane - 1)
        ring = self.descriptors[begin : begin + RING_DESCRIPTORS]
        return ring + self.descriptors[RING_DESCRIPTORS:common]

    def close(self) -> None:
        """Close the descriptors in this process."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def create_edge(
    name: str, transport: str = AUTO, is_remote: bool = False, num_lanes: int = 1
) -> Edge:
    """Create the shared memory and events to send activations between two local processes.

    The files have no path. They are sent to the workers and vanish with the last process that has
    them open.

    Args:
        name: name of the memory files, shown by tools such as lsof.
        transport: a name of `gllm.transport.registry.TRANSPORTS`, or AUTO to choose by the devices.
        is_remote: True if the next or previous stage is on another machine, so that one of the two
            processes is the data mover (`gllm-link`).
        num_lanes: number of ring buffers: 2 if decode steps may overtake prefill steps.

    Raises:
        OSError: The process has reached its limit of open descriptors; none stay open.
    """
    create_event = partial(os.eventfd, 0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
    create = [
        partial(os.memfd_create, name),
        create_event,
        partial(os.memfd_create, f"{name}-meeting"),
    ]
    if is_remote:
        create += [partial(os.memfd_create, f"{name}-peer"), partial(os.eventfd, 0)]
    for lane in range(1, num_lanes):
        create += [partial(os.memfd_create, f"{name}-lane-{lane}"), create_event]
    return Edge(transport, [], create_descriptors(*create), is_remote, num_lanes)
