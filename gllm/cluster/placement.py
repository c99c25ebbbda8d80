"""Placement: the workers that hold an engine's layers during one generation.

An engine's life is a row of generations. Each has one placement and one scheduler; every change of
the workers is the next generation.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

LOCAL_NODE = "local"
"""Name of the node that runs the head."""


class WorkerPlacement(msgspec.Struct, frozen=True):
    """Place of one worker."""

    sender: int
    """Identity of the worker process, never used again within a run."""
    node: str
    """Name of the machine on which the worker runs."""
    stage: int
    rank: int = 0
    """Index among the workers of the stage."""
    threads: int | None = None
    """Compute threads; None for an equal share of the cores."""


class EdgeSpec(msgspec.Struct, frozen=True):
    """Edge between two neighbouring stages, before its files exist."""

    number: int
    """Index of the edge within the generation."""
    source: int
    """Stage that sends."""
    target: int
    """Stage that receives."""
    transport: str = "auto"
    """Name of a transport, or auto: the two workers choose by their devices."""


class Placement(msgspec.Struct, frozen=True):
    """Layers, workers and edges of one generation.

    Raises:
        ValueError: the parts do not fit together.
    """

    generation: int
    layers: list[tuple[int, int]]
    """First layer of each stage and first layer after it."""
    workers: list[WorkerPlacement]
    """In the order of their stages."""
    edges: list[EdgeSpec]

    def __post_init__(self) -> None:
        """Check that each stage has one worker, layers without gaps and edges to its neighbours."""
        stages = list(range(len(self.layers)))
        if self.generation < 1:
            raise ValueError(f"generation {self.generation} is not positive")
        if [worker.stage for worker in self.workers] != stages:
            raise ValueError(f"the workers do not hold the stages {stages}, one each")
        if len({worker.sender for worker in self.workers}) != len(self.workers):
            raise ValueError("a worker holds two places")
        if any(end <= start for start, end in self.layers):
            raise ValueError(f"a stage has no layer: {self.layers}")
        if any(left[1] != right[0] for left, right in pairwise(self.layers)):
            raise ValueError(f"the layers have gaps or overlap: {self.layers}")
        if [(edge.source, edge.target) for edge in self.edges] != list(pairwise(stages)):
            raise ValueError("the edges do not connect each stage to the next one")

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.layers)

    @property
    def senders(self) -> list[int]:
        """Senders of the workers, in the order of their stages."""
        return [worker.sender for worker in self.workers]

    def worker_of(self, stage: int) -> WorkerPlacement:
        """Return the worker of a stage."""
        return self.workers[stage]

    def stage_of(self, sender: int) -> int | None:
        """Return the stage of a worker; None if the worker has no place."""
        return next((worker.stage for worker in self.workers if worker.sender == sender), None)


class Slot(msgspec.Struct, frozen=True):
    """Worker that can take a place."""

    sender: int
    node: str = LOCAL_NODE
    threads: int | None = None


def make_placement(
    generation: int, layers: Sequence[tuple[int, int]], slots: Sequence[Slot]
) -> Placement:
    """Return the placement of the layers on one worker per stage.

    Args:
        generation: number of the generation, from 1.
        layers: first layer of each stage and first layer after it.
        slots: worker of each stage.

    Raises:
        ValueError: the layers have gaps, or their number is not that of the slots.
    """
    workers = [
        WorkerPlacement(slot.sender, slot.node, stage, threads=slot.threads)
        for stage, slot in enumerate(slots)
    ]
    edges = [EdgeSpec(stage, stage, stage + 1) for stage in range(len(layers) - 1)]
    return Placement(generation, list(layers), workers, edges)
