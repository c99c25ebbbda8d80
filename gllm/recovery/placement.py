"""Placement: the workers and connections of an engine's stages for one start of the pipeline."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

LOCAL_NODE = "local"
"""Name of the node that runs the head."""


class RankName(NamedTuple):
    """Readable name of a rank of a stage: `stage 1`, or `stage 1 rank 0` with several ranks."""

    stage: int
    rank: int = 0
    num_ranks: int = 1

    def __str__(self) -> str:
        """Return the name in words."""
        return f"stage {self.stage}" + (f" rank {self.rank}" if self.num_ranks > 1 else "")

    @property
    def label(self) -> str:
        """Short name for titles of processes and names of files: `1`, or `1.0`."""
        return f"{self.stage}" + (f".{self.rank}" if self.num_ranks > 1 else "")


class WorkerPlacement(msgspec.Struct, frozen=True):
    """Process, node, stage and tensor-parallel rank of one worker."""

    sender: int
    """Id of the worker process, never used again within a run."""
    node: str
    """Name of the machine on which the worker runs."""
    stage: int
    rank: int = 0
    """Index among the workers of the stage."""


class EdgeSpec(msgspec.Struct, frozen=True):
    """Connection that carries activations from a worker of one stage to one of the next stage."""

    number: int
    """Index of the connection within the epoch."""
    source: int
    """Stage that sends."""
    target: int
    """Stage that receives."""
    source_rank: int = 0
    """Rank that sends."""
    target_rank: int = 0
    """Rank that receives."""
    transport: str = "auto"
    """Name of a transport, or auto: the two workers choose one by their devices."""

    @property
    def source_place(self) -> tuple[int, int]:
        """Stage and rank that send."""
        return self.source, self.source_rank

    @property
    def target_place(self) -> tuple[int, int]:
        """Stage and rank that receive."""
        return self.target, self.target_rank


class Placement(msgspec.Struct, frozen=True):
    """Layers of each stage, worker of each rank, and connections between them, for one epoch.

    An epoch is the time from a start of the pipeline until its next restart.

    Raises:
        ValueError: the parts do not fit together.
    """

    epoch: int
    layers: list[tuple[int, int]]
    """First layer of each stage and first layer after it."""
    workers: list[WorkerPlacement]
    """By stage, then by rank."""
    edges: list[EdgeSpec]
    """Connections in the order of their targets."""

    def __post_init__(self) -> None:
        """Check that each stage has ranks on one node, layers without gaps and its edges."""
        if self.epoch < 1:
            raise ValueError(f"epoch {self.epoch} is not positive")
        degrees = self.degrees
        places = [(stage, rank) for stage, size in enumerate(degrees) for rank in range(size)]
        if not all(degrees) or [(worker.stage, worker.rank) for worker in self.workers] != places:
            raise ValueError(
                f"the workers do not hold the places of {self.num_stages} stages in order, one each"
            )
        if len({worker.sender for worker in self.workers}) != len(self.workers):
            raise ValueError("a worker holds two places")
        if len({(worker.stage, worker.node) for worker in self.workers}) != self.num_stages:
            raise ValueError("the ranks of a stage are on several nodes")
        if any(end <= start for start, end in self.layers):
            raise ValueError(f"a stage has no layer: {self.layers}")
        if any(left[1] != right[0] for left, right in pairwise(self.layers)):
            raise ValueError(f"the layers have gaps or overlap: {self.layers}")
        ends = [(*edge.source_place, *edge.target_place) for edge in self.edges]
        if ends != edge_ends(degrees):
            raise ValueError("the edges do not connect each stage to the next one")

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.layers)

    @property
    def degrees(self) -> list[int]:
        """Number of ranks of each stage."""
        stages = [worker.stage for worker in self.workers]
        return [stages.count(stage) for stage in range(self.num_stages)]

    @property
    def node_stages(self) -> dict[str, list[int]]:
        """Stages of each node in order, by its name."""
        stages: dict[str, list[int]] = {}
        for worker in self.workers:
            own = stages.setdefault(worker.node, [])
            if worker.stage not in own:
                own.append(worker.stage)
        return stages

    @property
    def nodes(self) -> dict[tuple[int, int], str]:
        """Name of the node of each worker, by stage and rank."""
        return {(worker.stage, worker.rank): worker.node for worker in self.workers}

    @property
    def has_remote_edges(self) -> bool:
        """True if neighbouring stages are on different nodes."""
        return len(self.node_stages) > 1

    @property
    def senders(self) -> list[int]:
        """Ids of the worker processes, by stage, then by rank."""
        return [worker.sender for worker in self.workers]

    def workers_of(self, stage: int) -> list[WorkerPlacement]:
        """Return the workers of a stage, in the order of their ranks."""
        return [worker for worker in self.workers if worker.stage == stage]

    def workers_on(self, node: str) -> list[WorkerPlacement]:
        """Return the workers of a node, which share its cores and memory, in order."""
        return [worker for worker in self.workers if worker.node == node]

    def place_of(self, sender: int) -> WorkerPlacement | None:
        """Return the stage and rank of a worker; None if it has none."""
        return next((worker for worker in self.workers if worker.sender == sender), None)

    def name_of(self, sender: int) -> RankName | None:
        """Return the readable name of a worker's stage and rank; None if it has none."""
        place = self.place_of(sender)
        if place is None:
            return None
        return RankName(place.stage, place.rank, len(self.workers_of(place.stage)))


class RankWorker(msgspec.Struct, frozen=True):
    """Worker process for a rank of a stage: its id and its node."""

    sender: int
    """Id of the process."""
    node: str = LOCAL_NODE


def rank_names(degrees: Sequence[int]) -> list[RankName]:
    """Return a readable name for each rank of each stage, by stage, then by rank.

    Args:
        degrees: number of ranks of each stage.
    """
    return [
        RankName(stage, rank, num_ranks)
        for stage, num_ranks in enumerate(degrees)
        for rank in range(num_ranks)
    ]


def edge_ends(degrees: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return the connections between stages: source stage and rank, target stage and rank.

    All ranks of a stage have the same activations, so each rank of the next stage receives them
    from one of them: rank r from rank r modulo the number of ranks that send.

    Args:
        degrees: number of ranks of each stage.
    """
    return [
        (target - 1, rank % degrees[target - 1], target, rank)
        for target in range(1, len(degrees))
        for rank in range(degrees[target])
    ]


def make_placement(
    epoch: int,
    layers: Sequence[tuple[int, int]],
    slots: Sequence[RankWorker],
    degrees: Sequence[int] | None = None,
) -> Placement:
    """Assign the ranks of all stages to worker processes, and list the connections between them.

    Args:
        epoch: number of the pipeline's start, from 1.
        layers: first layer of each stage and first layer after it.
        slots: worker process for each rank, ordered by stage, then by rank.
        degrees: number of ranks of each stage; None for one each.

    Raises:
        ValueError: the layers have gaps, or the numbers of layers, degrees and slots do not fit.
    """
    degrees = [1] * len(layers) if degrees is None else degrees
    names = rank_names(degrees)
    if len(degrees) != len(layers) or len(names) != len(slots):
        raise ValueError(
            f"{len(slots)} workers cannot hold {len(layers)} stages with {list(degrees)} ranks"
        )
    workers = [
        WorkerPlacement(slot.sender, slot.node, name.stage, name.rank)
        for name, slot in zip(names, slots, strict=True)
    ]
    edges = [
        EdgeSpec(number, source, target, source_rank, target_rank)
        for number, (source, source_rank, target, target_rank) in enumerate(edge_ends(degrees))
    ]
    return Placement(epoch, list(layers), workers, edges)


def source_dials(source: str, source_address: str, target: str, target_address: str) -> bool:
    """Return True if the sending machine opens the TCP connection between two stages.

    Args:
        source: name of the machine that sends activations.
        source_address: HOST:PORT at which it accepts data connections; empty if it accepts none.
        target: name of the machine that receives.
        target_address: HOST:PORT at which that one accepts data connections; empty if it accepts
            none.

    Raises:
        ValueError: neither of them accepts connections.
    """
    if not source_address and not target_address:
        raise ValueError(
            f"neither node {source!r} nor node {target!r} accepts data connections, and their "
            "stages are neighbours: open --data-port on one of them, or forward a port to it and "
            "name that with --advertise HOST:PORT"
        )
    return bool(target_address)
