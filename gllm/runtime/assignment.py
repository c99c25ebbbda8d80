"""Messages of the parent to a worker over their pair of sockets: its identity and its stage.

The identity comes once, an assignment for each generation in which the worker has a place. This
module imports no torch, because the parent does not.
"""

import os
from collections.abc import Sequence

import msgspec

from gllm.cluster.placement import Placement, WorkerPlacement
from gllm.config.engine import EngineConfig
from gllm.observability.logs import LogConfig
from gllm.transport.edge import Edge


class WorkerIdentity(msgspec.Struct, frozen=True, tag=True):
    """First message to a worker process."""

    run: int
    """64 random bits per start of the parent."""
    sender: int
    """Identity of the process, never used again within a run."""
    hub_address: str
    """Address of the parent's hub."""
    logs: LogConfig


class StageAssignment(msgspec.Struct, frozen=True, tag=True):
    """Everything that a worker needs to know to run a stage during one generation."""

    placement: Placement
    sender: int
    """Identity of the worker, which has a place in the placement."""
    config: EngineConfig
    """With max_model_len resolved."""
    model_folder: str
    driver_address: str
    """Address that the driver of the generation binds."""
    incoming: Edge | None = None
    """Edge from the previous stage; None on the first."""
    outgoing: Edge | None = None
    """Edge to the next stage; None on the last."""
    plan_record: int | None = None
    """Descriptor of the file in which the driver records the plans in flight; None elsewhere."""
    restart_cause: str = ""
    """Reason for which the previous generation ended; empty in the first one."""
    num_resumed_requests: int = 0
    """Requests that will be submitted again."""
    output_lengths: dict[int, list[int]] = {}
    """Output lengths of earlier generations, by class, for the scheduler; empty elsewhere."""

    @property
    def place(self) -> WorkerPlacement:
        """Place of the worker."""
        return next(each for each in self.placement.workers if each.sender == self.sender)

    @property
    def stage(self) -> int:
        """Index of the stage."""
        return self.place.stage

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.placement.num_stages

    @property
    def layers(self) -> tuple[int, int]:
        """First layer of the stage and first layer of the next one."""
        return self.placement.layers[self.stage]

    @property
    def layer_counts(self) -> list[int]:
        """Number of layers of every stage."""
        return [end - begin for begin, end in self.placement.layers]

    @property
    def descriptors(self) -> list[int]:
        """All descriptors: of both edges, then of the plan record."""
        edges = [edge for edge in (self.incoming, self.outgoing) if edge is not None]
        own = [] if self.plan_record is None else [self.plan_record]
        return [*(each for edge in edges for each in edge.descriptors), *own]

    def close_descriptors(self) -> None:
        """Close all descriptors in this process."""
        for descriptor in self.descriptors:
            os.close(descriptor)


ParentMessage = WorkerIdentity | StageAssignment
"""Every message that a worker may receive from its parent over their pair."""

_decoder: msgspec.json.Decoder[ParentMessage] = msgspec.json.Decoder(ParentMessage)


def encode_parent_message(message: ParentMessage) -> tuple[bytes, list[int]]:
    """Return the payload of a message and the descriptors that travel with it."""
    descriptors = message.descriptors if isinstance(message, StageAssignment) else []
    return msgspec.json.encode(message), descriptors


def decode_parent_message(payload: bytes, descriptors: Sequence[int]) -> ParentMessage:
    """Return a message with the receiver's descriptors in place of the sender's.

    Raises:
        msgspec.DecodeError: the payload is no valid message.
        ValueError: the number of descriptors is wrong.
    """
    message = _decoder.decode(payload)
    received = dict(zip(encode_parent_message(message)[1], descriptors, strict=True))
    if isinstance(message, WorkerIdentity):
        return message

    def replace_edge(edge: Edge | None) -> Edge | None:
        if edge is None:
            return None
        own = [received[each] for each in edge.descriptors]
        return msgspec.structs.replace(edge, descriptors=own)

    return msgspec.structs.replace(
        message,
        incoming=replace_edge(message.incoming),
        outgoing=replace_edge(message.outgoing),
        plan_record=None if message.plan_record is None else received[message.plan_record],
    )
