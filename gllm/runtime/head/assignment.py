"""Assignments of an epoch, to a machine and to its workers.

A worker gets its identity once, over the pair of sockets that it has with its parent, and an
assignment for each epoch in which it has a place. This module imports no torch, because the
parent does not.
"""

import os
from collections.abc import Sequence

import msgspec

from gllm.config.engine import EngineConfig
from gllm.observability.logs import LogConfig
from gllm.recovery.placement import Placement, RankName, WorkerPlacement
from gllm.runtime.worker.device import threads_per_worker
from gllm.scheduler.config import SchedulerConfig
from gllm.transport.edge import Edge
from gllm.transport.link.commands import LinkPeer
from gllm.transport.region import Region


class WorkerIdentity(msgspec.Struct, frozen=True, tag=True):
    """First message to a new worker process: its number, the head's address and the log options."""

    run: int
    """64 random bits per start of the parent."""
    sender: int
    """Identity of the process, never used again within a run."""
    hub_address: str
    """Address of the parent's hub."""
    logs: LogConfig


def has_tcp_edges(config: EngineConfig, placement: Placement) -> bool:
    """Return True if stages on different machines exchange activations by TCP instead of NCCL."""
    return placement.has_remote_edges and not config.trusted_network


def resolve_scheduler(
    config: EngineConfig,
    placement: Placement,
    num_blocks: int | None = None,
    num_state_slots: int = 0,
) -> SchedulerConfig:
    """Return the scheduler's configuration with all automatic values filled in.

    Args:
        config: configuration of the engine, with max_model_len resolved.
        placement: assignment of the stages' workers to machines.
        num_blocks: KV blocks on each stage; None as long as the number is not known.
        num_state_slots: state slots on each stage; 0 without recurrent layers, or as long as the
            number is not known.

    Raises:
        ValueError: the KV cache cannot hold one sequence of full length.
    """
    scheduler, max_model_len = config.scheduler, config.max_model_len
    assert max_model_len is not None
    if num_blocks is None:
        num_blocks = -(-max_model_len // scheduler.block_size)
    return scheduler.resolve(
        placement.num_stages,
        num_blocks,
        max_model_len,
        has_tcp_edges(config, placement),
        max(placement.degrees),
        num_state_slots,
    )


class NodeAssignment(msgspec.Struct, frozen=True):
    """Stages that one machine runs until the next recovery, with configuration and connections."""

    placement: Placement
    """Workers of all machines."""
    config: EngineConfig
    """With max_model_len resolved."""
    restart_cause: str = ""
    """Reason for which the previous epoch ended; empty in the first one."""
    num_resumed_requests: int = 0
    """Requests that will be submitted again."""
    is_probe: bool = False
    """True if the workers only measure their speed; the layers are preliminary."""
    change: int = 0
    """Number of the planned change for which the workers only load layers; 0 for none."""
    standby: int = 0
    """Standby worker that maps the weights of all workers of its machine, of which it will replace
    one; it has the number `change` too. 0 for an assignment to the workers of the placement."""
    keeps_kv_cache: bool = False
    """True if the workers may use the KV caches of their predecessors in the same places."""
    peers: dict[str, LinkPeer] = {}
    """Data connections of all machines of the placement by name; empty if it has only one."""

    @property
    def num_lanes(self) -> int:
        """Queues per connection between stages: 2 if decode steps may overtake prefill steps."""
        placement, scheduler = self.placement, self.config.scheduler
        is_tcp = has_tcp_edges(self.config, placement)
        return scheduler.count_lanes(placement.num_stages, is_tcp, max(placement.degrees))


class StageAssignment(msgspec.Struct, frozen=True, tag=True):
    """Stage that one worker runs until the next recovery: options, connections, model files."""

    placement: Placement
    sender: int
    """Number of the worker, by which the placement and messages identify it."""
    config: EngineConfig
    """With max_model_len resolved."""
    model_folder: str
    driver_address: str
    """Address on which the driver listens for the other workers."""
    incoming: Edge | None = None
    """Connection from a worker of the previous stage; None on the first stage."""
    outgoing: list[Edge] = []
    """Connections to workers of the next stage, by their ranks."""
    region: Region | None = None
    """Memory that the ranks of the stage share; None where the stage has one rank."""
    plan_record: int | None = None
    """Descriptor of the file in which the driver records the plans in flight; None elsewhere."""
    kv_memory: int | None = None
    """Descriptor of an empty file for the KV cache, which the `gllm-link` process maps too; None
    for memory of the worker alone."""
    kv_file: int | None = None
    """Descriptor of the file for the KV cache that outlives the worker (worker/kv_file.py); None
    where no recovery uses it."""
    hash_file: int | None = None
    """Descriptor of the file with the hashes of the blocks (driver/hash_file.py); None in workers
    without the driver."""
    restart_cause: str = ""
    """Reason for which the previous epoch ended; empty in the first one."""
    num_resumed_requests: int = 0
    """Requests that will be submitted again."""
    output_lengths: dict[int, list[int]] = {}
    """Observed output lengths in tokens by request class, from before the last recovery, for the
    scheduler; empty in workers without it."""
    is_probe: bool = False
    """True if the worker only measures its speed; the layers are preliminary, and there are no
    descriptors and no driver."""
    change: int = 0
    """Number of the planned change of the layers' division for which the worker only loads layers,
    while it still computes its present stage, without descriptors and driver; 0 for none."""
    replaceable: list[int] = []
    """Workers of the placement whose weights a standby worker maps, as it will replace one of
    them; empty in an assignment to a worker of the placement."""

    @property
    def place(self) -> WorkerPlacement:
        """Stage and rank of the worker, with its machine."""
        return next(worker for worker in self.placement.workers if worker.sender == self.sender)

    @property
    def stage(self) -> int:
        """Index of the stage."""
        return self.place.stage

    @property
    def rank(self) -> int:
        """Index among the workers of the stage."""
        return self.place.rank

    @property
    def num_ranks(self) -> int:
        """Number of workers of the stage."""
        return self.degrees[self.stage]

    @property
    def degrees(self) -> list[int]:
        """Number of workers of each stage."""
        return self.placement.degrees

    @property
    def name(self) -> RankName:
        """Name of the worker's stage and rank for logs."""
        return RankName(self.stage, self.rank, self.num_ranks)

    @property
    def has_driver(self) -> bool:
        """True if the driver of the epoch runs in this worker, the first rank of stage 0."""
        return (self.stage, self.rank) == (0, 0)

    @property
    def local_index(self) -> int:
        """Index among the workers of the same machine."""
        return self.placement.workers_on(self.place.node).index(self.place)

    @property
    def machine(self) -> int:
        """Index of the worker's machine in the order of the stages; 0 is the driver's."""
        return list(self.placement.node_stages).index(self.place.node)

    @property
    def num_local_workers(self) -> int:
        """Number of workers of the same machine, which share its cores, memory and GPUs."""
        return len(self.placement.workers_on(self.place.node))

    @property
    def num_threads(self) -> int:
        """Compute threads of the worker."""
        return threads_per_worker(self.config.threads, self.num_local_workers)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.placement.num_stages

    @property
    def has_tcp_edges(self) -> bool:
        """True if stages on different machines are connected by TCP."""
        return has_tcp_edges(self.config, self.placement)

    def resolve_scheduler(
        self, num_blocks: int | None = None, num_state_slots: int = 0
    ) -> SchedulerConfig:
        """Return the scheduler's configuration for this epoch."""
        return resolve_scheduler(self.config, self.placement, num_blocks, num_state_slots)

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
        """All descriptors in order: connections, memory of ranks, plan record, KV caches."""
        incoming = [] if self.incoming is None else [self.incoming]
        region = [] if self.region is None else [self.region]
        own = [
            descriptor
            for descriptor in (self.plan_record, self.kv_memory, self.kv_file, self.hash_file)
            if descriptor is not None
        ]
        shared: list[Edge | Region] = [*incoming, *self.outgoing, *region]
        return [*(descriptor for files in shared for descriptor in files.descriptors), *own]

    def close_descriptors(self) -> None:
        """Close all descriptors in this process."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class KvMoverConnection(msgspec.Struct, frozen=True, tag=True):
    """Tells the driver's worker how to reach the process that transfers KV blocks between engines.

    It is sent once per start of that process.
    """

    sender: int
    """Worker with the driver."""
    epoch: int
    descriptor: int
    """Descriptor of the driver's end of a DescriptorChannel to the process."""


ParentMessage = WorkerIdentity | StageAssignment | KvMoverConnection
"""Every message that a worker may receive from its parent over their pair."""

_decoder: msgspec.json.Decoder[ParentMessage] = msgspec.json.Decoder(ParentMessage)

_node_decoder: msgspec.json.Decoder[NodeAssignment] = msgspec.json.Decoder(NodeAssignment)


def encode_node_assignment(assignment: NodeAssignment) -> bytes:
    """Encode a `NodeAssignment` as the content of an AssignStages message to an agent."""
    return msgspec.json.encode(assignment)


def decode_node_assignment(content: bytes) -> NodeAssignment:
    """Decode the `NodeAssignment` in the content of an AssignStages message.

    Raises:
        msgspec.DecodeError: the content is not a valid assignment.
    """
    return _node_decoder.decode(content)


def encode_parent_message(message: ParentMessage) -> tuple[bytes, list[int]]:
    """Encode a message of the head to a worker: its bytes, and the descriptors sent with them."""
    descriptors: list[int] = []
    match message:
        case StageAssignment():
            descriptors = message.descriptors
        case KvMoverConnection():
            descriptors = [message.descriptor]
    return msgspec.json.encode(message), descriptors


def decode_parent_message(payload: bytes, descriptors: Sequence[int]) -> ParentMessage:
    """Decode a message of the head to a worker, and insert the file descriptors received with it.

    Raises:
        msgspec.DecodeError: the payload is not a valid message.
        ValueError: the number of descriptors is wrong.
    """
    message = _decoder.decode(payload)
    received = dict(zip(encode_parent_message(message)[1], descriptors, strict=True))
    if isinstance(message, WorkerIdentity):
        return message
    if isinstance(message, KvMoverConnection):
        return KvMoverConnection(message.sender, message.epoch, received[message.descriptor])

    def receive(descriptors: list[int]) -> list[int]:
        return [received[number] for number in descriptors]

    def receive_file(descriptor: int | None) -> int | None:
        return None if descriptor is None else received[descriptor]

    replace = msgspec.structs.replace
    incoming, region = message.incoming, message.region
    return replace(
        message,
        incoming=incoming and replace(incoming, descriptors=receive(incoming.descriptors)),
        outgoing=[replace(e, descriptors=receive(e.descriptors)) for e in message.outgoing],
        region=region and replace(region, descriptors=receive(region.descriptors)),
        plan_record=receive_file(message.plan_record),
        kv_memory=receive_file(message.kv_memory),
        kv_file=receive_file(message.kv_file),
        hash_file=receive_file(message.hash_file),
    )
