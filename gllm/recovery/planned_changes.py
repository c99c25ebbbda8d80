"""Planned changes of an engine's stages: other layers, nodes that drain, and nodes that join.

A change is prepared beside the epoch that serves: workers for new stages are started, and all
workers of the next epoch load the layers that they lack. Then `Recovery` ends the epoch
as after a death, but no death counts, and the next one has its weights at once. What disturbs the
preparation ends it; the change is prepared again when the engine is ready.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from gllm.recovery.actions import Action, DismissNode, PrepareLayers
from gllm.recovery.node_layout import NodeShape, match_stages
from gllm.recovery.placement import LOCAL_NODE, RankWorker, make_placement, rank_names
from gllm.recovery.records import RecoveryLimits, RecoveryState, RetryRecord, WorkerRecord
from gllm.recovery.stages import Stages
from gllm.recovery.worker_pool import WorkerPool

Extend = Callable[[NodeShape, Sequence[str], Sequence[int], bool], NodeShape | None]
"""Return a shape with further stages, given the present one, the node and the degree of each new
stage, and whether it has to be faster; None if it is not, or if a node has too little memory."""

FindCostliest = Callable[[Sequence[int]], int]
"""Return the costliest of some stages."""


@dataclass
class PlannedChange:
    """Change of layers or nodes of the stages whose weights are loaded while the engine serves."""

    number: int
    """Number of the preparation; counts up within an engine's life."""
    kind: str
    """rebalanced, drained or joined."""
    shape: NodeShape
    """Stages from the next epoch on."""
    cause: str
    """Description."""
    deadline: float
    """Time at which the change happens even if not all weights have been loaded."""
    reserved: dict[int, int] = field(default_factory=dict)
    """New (stage, rank) index of each worker that has none yet, by its id."""
    outstanding: set[int] = field(default_factory=set)
    """Workers that still load layers."""


class PlannedChanges:
    """Prepares changes of the stages, one at a time, and lets spare nodes load layers in advance.

    Changes are other layers, nodes that are drained, and nodes that have joined. Standby workers of
    spare nodes load the layers of the costliest stage, so that one can serve soon after the loss of
    another node.
    """

    def __init__(
        self,
        stages: Stages,
        pool: WorkerPool,
        limits: RecoveryLimits,
        jitter: Random,
    ) -> None:
        """Create the state of an engine without a planned change.

        Args:
            stages: stages and nodes of the engine.
            pool: worker processes of the engine.
            limits: limits of a recovery.
            jitter: source of the random part of retry delays.
        """
        self.draining = stages.excluded
        """Nodes that get no stages any more, and are dismissed once they have none."""
        self.drain_errors: dict[str, str] = {}
        """Reason for which a drain was ended, by node."""
        self._stages = stages
        self._pool = pool
        self._limits = limits
        self._jitter = jitter
        self._numbers = count(1)
        self._change: PlannedChange | None = None
        self._requested: tuple[NodeShape, str] | None = None
        """Other layers, and their cause."""
        self._eager: set[str] = set()
        """Nodes that joined to get stages, not as spares."""
        self._unused: set[str] = set()
        """Nodes to which the present stages are not extended, by the last attempt."""
        self._loads: dict[int, tuple[int, tuple[int, int], int]] = {}
        """Rank, layers and degree that each standby worker of a spare loads or has loaded."""
        self._maps: dict[int, list[tuple[int, tuple[int, int], int]]] = {}
        """Rank, layers and degree of each worker for which a standby worker maps the weights."""
        self._attempts = RetryRecord()
        """Preparations that were ended by the death of a worker without a stage."""

    @property
    def kind(self) -> str:
        """Kind of the change that is being prepared; empty for none."""
        return "" if self._change is None else self._change.kind

    @property
    def coming_nodes(self) -> Collection[str]:
        """Nodes with stages after the change that is being prepared."""
        return () if self._change is None else self._change.shape.nodes

    @property
    def is_idle(self) -> bool:
        """True if no change is due and no other machine can get stages."""
        is_single = len(self._stages.capacities) == 1 and not self.draining
        is_due = self._requested is not None or self._change is not None
        return is_single and not is_due and not self._attempts.num_failures

    @property
    def next_time(self) -> float:
        """Time at which a change has to be prepared or to happen."""
        if self._change is not None:
            return self._change.deadline
        return self._attempts.retry_at if self._attempts.num_failures else math.inf

    def request(self, shape: NodeShape, cause: str) -> None:
        """Request other layers."""
        self._requested = shape, cause

    def refuse_drain(self, node: str, state: RecoveryState) -> str:
        """Return the reason for which a node cannot be drained; empty if it can."""
        if node in self.draining:
            return ""
        if node == LOCAL_NODE:
            return "the head has the API, so it cannot be drained: stop the engine instead"
        if state is not RecoveryState.READY:
            return f"the engine is {state}, and not ready"
        leaving = {*self.draining, node}
        if self._stages.stages_on(node) and self._stages.find_shape_without(leaving) is None:
            return f"the other nodes have no memory for the layers of node {node}"
        return ""

    def drain(self, node: str) -> list[Action]:
        """Start to move the stages of a connected node to other nodes."""
        self.draining.add(node)
        self.drain_errors.pop(node, None)
        self._attempts = RetryRecord()
        return self.end_preparation()

    def end_drains(self, reason: str) -> None:
        """End the drains of nodes that still have stages."""
        for node in [leaving for leaving in self.draining if self._stages.stages_on(leaving)]:
            self.draining.discard(node)
            self.drain_errors[node] = reason

    def dismiss_drained(self) -> list[Action]:
        """Dismiss the draining nodes that have no stages, with their standby workers."""
        actions: list[Action] = []
        for node in sorted(self.draining):
            is_empty = self._stages.is_alive(node) and not self._stages.stages_on(node)
            if is_empty and node not in self.coming_nodes:
                self._stages.discard_node(node)
                self._forget_node(node)
                actions.append(DismissNode(node, f"node {node} has been drained"))
        return actions

    def on_node_joined(self, node: str, is_spare: bool) -> None:
        """Handle a node that has joined and may receive stages."""
        self._unused.clear()
        if not is_spare:
            self._eager.add(node)

    def on_node_gone(self, node: str) -> list[Action]:
        """Handle the loss of a node, which ends its drain and a preparation that involves it."""
        self._forget_node(node)
        return self.end_preparation() if node in self.coming_nodes else []

    def on_prepared(self, sender: int, number: int, error: str) -> list[Action]:
        """Handle a worker's report that its weights for a change are loaded or will be later.

        Args:
            sender: id of the worker.
            number: number of the change.
            error: reason of a worker that cannot load them at all, which ends the change; else
                empty.
        """
        if self._change is None or self._change.number != number:
            return []
        self._change.outstanding.discard(sender)
        if not error:
            return []
        self._drop_change(self._change, error)
        return self.end_preparation()

    def on_preparation_failed(self) -> None:
        """Let the change happen although a node could not prepare it."""
        if self._change is not None:
            self._change.outstanding.clear()

    def on_reserved_lost(self, now: float) -> list[Action]:
        """End a preparation whose new worker has died; give the change up after some attempts."""
        self._attempts.on_failure(now, self._jitter, num_earlier=1)
        if self._attempts.num_failures > self._limits.max_restarts and self._change is not None:
            self._drop_change(self._change, "its new workers have died")
            self._attempts = RetryRecord()
        return self.end_preparation()

    def end_preparation(self) -> list[Action]:
        """End the preparation of a change; workers that were started for it end."""
        self._change = None
        return list(self._pool.release_reserved())

    def prepare(
        self, epoch: int, extend: Extend | None, uses_joined_nodes: bool, now: float
    ) -> list[Action]:
        """Begin to prepare the change that is due, if none is; drains are the first.

        Args:
            epoch: number of the current epoch.
            extend: gives stages to nodes that join; None if they are spares only.
            uses_joined_nodes: give stages to nodes that join where that is faster, also if no stage
                has been lost.
            now: time in seconds.
        """
        if self._change is not None or self._attempts.retry_at > now:
            return []
        found = self._find_drain() or self._find_requested()
        if found is None and extend is not None:
            found = self._find_extension(extend, uses_joined_nodes)
        if found is None:
            self._attempts = RetryRecord()
            return []
        kind, shape, cause = found
        deadline = now + self._limits.phase_seconds
        self._change = PlannedChange(next(self._numbers), kind, shape, cause, deadline)
        return self._start_preparation(self._change, epoch)

    def fill_standbys(
        self, epoch: int, find_costliest: FindCostliest | None, now: float
    ) -> list[Action]:
        """Start missing standby workers, and let them load or map layers in advance.

        Those of spare nodes load the costliest stage. Those of other nodes may map all stages.

        Args:
            epoch: number of the pipeline's start.
            find_costliest: chooses the stage whose layers are loaded; None to load none.
            now: time in seconds.
        """
        stage_nodes = enumerate(self._stages.living_nodes)
        stages = [stage for stage, node in stage_nodes if node != LOCAL_NODE]
        if find_costliest is None or not stages:
            return [*self._pool.fill_standbys(now), *self._map_weights(epoch)]
        stage = find_costliest(stages)
        degree = self._stages.degrees[stage]
        idle = [node for node in self._stages.spares if node not in self.coming_nodes]
        spares = self._stages.fit(idle, degree)
        self._pool.num_preloading = dict.fromkeys(spares, degree)
        actions: list[Action] = [*self._pool.fill_standbys(now)]
        for node in spares:
            workers = self._pool.standbys_on(node)[:degree]
            if len(workers) == degree and self._note_loads(workers, stage):
                actions.append(self._preload(node, workers, stage, epoch))
        return [*actions, *self._map_weights(epoch)]

    def pop_due(self, now: float) -> PlannedChange | None:
        """Remove and return the change if all have loaded or its deadline has passed; else None."""
        change = self._change
        if change is None or (change.outstanding and change.deadline > now):
            return None
        self._change = self._requested = None
        self._attempts = RetryRecord()
        self._unused.clear()
        return change

    def _start_preparation(self, change: PlannedChange, epoch: int) -> list[Action]:
        """Reserve the workers of new places, and let all workers of the change load."""
        names, shape = self._stages.names, change.shape
        stages = match_stages(self._stages.living_nodes, shape.nodes)
        old = {stages[name.stage]: name.stage for name in names if name.stage in stages}
        workers = {
            (name.stage, name.rank): worker
            for name, worker in zip(names, self._pool.placed, strict=True)
        }
        actions: list[Action] = []
        slots = []
        for place, name in enumerate(rank_names(shape.degrees)):
            worker = workers.get((old.get(name.stage, -1), name.rank))
            if worker is None:
                worker, spawned = self._pool.reserve(shape.nodes[name.stage])
                actions += spawned
                change.reserved[worker.sender] = place
            slots.append(RankWorker(worker.sender, worker.node))
        placement = make_placement(epoch + 1, shape.layers, slots, shape.degrees)
        change.outstanding = set(placement.senders)
        return [*actions, PrepareLayers(change.number, placement, change.cause)]

    def _map_weights(self, epoch: int) -> list[Action]:
        """Let standby workers map the weights of all workers of their node, where that is wanted.

        They wait until they have connected: a message to a process that imports its modules could
        only be buffered.
        """
        actions: list[Action] = []
        if not self._limits.standbys_map:
            return actions
        layers, degrees, nodes = self._stages.layers, self._stages.degrees, self._stages.stage_nodes
        slots = [RankWorker(worker.sender, worker.node) for worker in self._pool.placed]
        for node in dict.fromkeys(nodes):
            maps = [
                (name.rank, layers[name.stage], degrees[name.stage])
                for name in self._stages.names
                if nodes[name.stage] == node
            ]
            for worker in self._pool.standbys_on(node):
                if not worker.has_connected or self._maps.get(worker.sender) == maps:
                    continue
                self._maps[worker.sender] = maps
                placement = make_placement(epoch, layers, slots, degrees)
                cause = f"standby worker {worker.sender} maps the weights of its node"
                number = next(self._numbers)
                actions.append(PrepareLayers(number, placement, cause, node, worker.sender))
        return actions

    def _note_loads(self, workers: Sequence[WorkerRecord], stage: int) -> bool:
        """Note that workers load the layers of a stage; return False if they have them already."""
        layers = self._stages.layers[stage]
        loads = [(rank, layers, len(workers)) for rank in range(len(workers))]
        if [self._loads.get(worker.sender) for worker in workers] == loads:
            return False
        self._loads |= {worker.sender: load for worker, load in zip(workers, loads, strict=True)}
        return True

    def _preload(
        self, node: str, workers: Sequence[WorkerRecord], stage: int, epoch: int
    ) -> Action:
        """Let workers of a node load a stage, as if they had its places."""
        degrees = self._stages.degrees
        slots = [RankWorker(worker.sender, worker.node) for worker in self._pool.placed]
        begin = sum(degrees[:stage])
        slots[begin : begin + degrees[stage]] = [
            RankWorker(worker.sender, node) for worker in workers
        ]
        placement = make_placement(epoch, self._stages.layers, slots, degrees)
        cause = f"spare node {node} holds the layers of stage {stage}"
        return PrepareLayers(next(self._numbers), placement, cause, node)

    def _drop_change(self, change: PlannedChange, reason: str) -> None:
        """Do not attempt a change again."""
        self._requested = None
        self._unused |= set(change.shape.nodes).difference(self._stages.living_nodes)
        if change.kind == "drained":
            self.end_drains(reason)

    def _forget_node(self, node: str) -> None:
        self.draining.discard(node)
        self.drain_errors.pop(node, None)
        self._eager.discard(node)

    def _find_drain(self) -> tuple[str, NodeShape, str] | None:
        """Return the change by which draining nodes lose their stages."""
        leaving = {node for node in self.draining if self._stages.stages_on(node)}
        if not leaving:
            return None
        shape = self._stages.find_shape_without(leaving)
        if shape is None:
            self.end_drains("the other nodes have no memory for its layers")
            return None
        return "drained", shape, f"{_list_nodes(leaving)} drained"

    def _find_requested(self) -> tuple[str, NodeShape, str] | None:
        """Return the change to the layers that were requested."""
        if self._requested is None:
            return None
        shape, cause = self._requested
        if (shape.nodes, shape.degrees) != (self._stages.living_nodes, self._stages.degrees):
            self._requested = None
            return None
        return "rebalanced", shape, cause

    def _find_extension(
        self, extend: Extend, uses_joined_nodes: bool
    ) -> tuple[str, NodeShape, str] | None:
        """Return the change by which nodes without stages get some."""
        nodes = [node for node in self._stages.spares if node not in self._unused]
        if not nodes:
            return None
        if lost := self._stages.lost_degrees:
            added = self._stages.fill_nodes(nodes, lost)
        else:
            eager = [node for node in nodes if uses_joined_nodes and node in self._eager]
            added = self._stages.fill_nodes(eager, [self._stages.degrees[-1]] * len(eager))
        shape = _extend_to(self._stages.shape, added, extend, should_gain=not lost)
        if shape is None:
            self._unused |= set(nodes)
            return None
        new = set(shape.nodes).difference(self._stages.living_nodes)
        return "joined", shape, f"{_list_nodes(new)} joined"


def _extend_to(
    shape: NodeShape, added: Sequence[tuple[str, int]], extend: Extend, should_gain: bool
) -> NodeShape | None:
    """Return a shape with further stages, as many of them as possible; see Extend.

    added: node and degree of each further stage.
    """
    # Fewer new stages may fit where all of them do not.
    for number in range(len(added), 0, -1):
        nodes = [node for node, _ in added[:number]]
        degrees = [degree for _, degree in added[:number]]
        if extended := extend(shape, nodes, degrees, should_gain):
            return extended
    return None


def _list_nodes(nodes: set[str]) -> str:
    """Return names of nodes in words."""
    names = ", ".join(sorted(nodes))
    return f"node {names}" if len(nodes) == 1 else f"nodes {names}"
