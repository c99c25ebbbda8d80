"""Layers that spare nodes hold, so that one can serve soon after the loss of another node."""

from collections.abc import Callable, Collection, Iterator, Sequence

from gllm.recovery.actions import Action, PrepareLayers
from gllm.recovery.node_pool import NodePool
from gllm.recovery.placement import LOCAL_NODE, Slot, make_placement
from gllm.recovery.records import WorkerRecord
from gllm.recovery.stages import Stages
from gllm.recovery.worker_pool import WorkerPool

FindCostliest = Callable[[Sequence[int]], int]
"""Return the costliest of some stages."""


class SparePreloads:
    """Lets standby workers of spares load the layers of the costliest stage."""

    def __init__(
        self, stages: Stages, nodes: NodePool, pool: WorkerPool, numbers: Iterator[int]
    ) -> None:
        """Create the state of spares that hold nothing.

        Args:
            stages: stages of the engine.
            nodes: its nodes, spares included.
            pool: its workers.
            numbers: numbers of preparations.
        """
        self._stages = stages
        self._nodes = nodes
        self._pool = pool
        self._numbers = numbers
        self._loads: dict[int, tuple[int, tuple[int, int], int]] = {}
        """Rank, layers and degree that each standby worker of a spare loads or has loaded."""

    def advance(
        self,
        generation: int,
        excluded: Collection[str],
        find_costliest: FindCostliest | None,
        now: float,
    ) -> list[Action]:
        """Start the missing standby workers, and let those of spares load.

        Args:
            generation: number of the current generation.
            excluded: spares that get stages by a planned change.
            find_costliest: chooses the stage; None if spares hold no layers.
            now: time in seconds.
        """
        stage_nodes = enumerate(self._nodes.living_nodes)
        stages = [stage for stage, node in stage_nodes if node != LOCAL_NODE]
        if find_costliest is None or not stages:
            return [*self._pool.fill_standbys(now)]
        stage = find_costliest(stages)
        degree = self._stages.degrees[stage]
        idle = [node for node in self._nodes.spares if node not in excluded]
        spares = self._nodes.fit(idle, degree)
        self._pool.num_preloading = dict.fromkeys(spares, degree)
        actions: list[Action] = [*self._pool.fill_standbys(now)]
        for node in spares:
            workers = self._pool.standbys_on(node)[:degree]
            if len(workers) == degree and self._note_loads(workers, stage):
                actions.append(self._prepare(node, workers, stage, generation))
        return actions

    def _note_loads(self, workers: Sequence[WorkerRecord], stage: int) -> bool:
        """Note that workers load the layers of a stage; return False if they have them already."""
        layers = self._stages.layers[stage]
        loads = [(rank, layers, len(workers)) for rank in range(len(workers))]
        if [self._loads.get(worker.sender) for worker in workers] == loads:
            return False
        self._loads |= {worker.sender: load for worker, load in zip(workers, loads, strict=True)}
        return True

    def _prepare(
        self, node: str, workers: Sequence[WorkerRecord], stage: int, generation: int
    ) -> Action:
        """Let workers of a node load a stage, as if they had its places."""
        degrees = self._stages.degrees
        slots = [Slot(worker.sender, worker.node) for worker in self._pool.placed]
        begin = sum(degrees[:stage])
        slots[begin : begin + degrees[stage]] = [Slot(worker.sender, node) for worker in workers]
        placement = make_placement(generation, self._stages.layers, slots, degrees)
        cause = f"spare node {node} holds the layers of stage {stage}"
        return PrepareLayers(next(self._numbers), placement, cause, node)
