"""Planned changes of an engine's stages: other layers, nodes that drain, and nodes that join.

A change is prepared beside the generation that serves: workers for new stages are started, and all
workers of the next generation load the layers that they lack. Then the generation ends as in a
recovery, but no death counts, and the next one has its weights at once. What disturbs the
preparation ends it; the change is prepared again when the engine is ready.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gllm.recovery.actions import (
    Action,
    BeginChange,
    ChangeShape,
    DismissNode,
    PrepareLayers,
)
from gllm.recovery.node_layout import NodeShape
from gllm.recovery.node_pool import match_stages
from gllm.recovery.placement import LOCAL_NODE, Slot, make_placement, place_names
from gllm.recovery.records import Activity, RecoveryState, RetryRecord
from gllm.recovery.recovery_phases import RecoveryPhases

Extend = Callable[[NodeShape, Sequence[str], Sequence[int], bool], NodeShape | None]
"""Return a shape with further stages, given the present one, the node and the degree of each new
stage, and whether it has to be faster; None if it is not, or if a node has too little memory."""


@dataclass
class PlannedChange:
    """Change that is being prepared."""

    number: int
    """Counts the preparations of an engine's life."""
    kind: str
    """rebalanced, drained or joined."""
    shape: NodeShape
    """Stages from the next generation on."""
    cause: str
    """Description."""
    deadline: float
    """Time at which the change happens, whatever has been loaded."""
    reserved: dict[int, int] = field(default_factory=dict)
    """New place of each worker without a place, by sender."""
    outstanding: set[int] = field(default_factory=set)
    """Workers that still load layers."""


class PlannedChanges(RecoveryPhases):
    """Decides on planned changes, and prepares one at a time."""

    extend: Extend | None = None
    """Gives stages to nodes that join; None if they are spares only."""
    find_costliest: Callable[[Sequence[int]], int] | None = None
    """Returns the costliest of some stages; None if spares hold no layers."""
    uses_joined_nodes = False
    """True if nodes that join get stages where that is faster, also if no stage has been lost."""
    _change: PlannedChange | None = None
    _num_changes = 0
    _requested: tuple[NodeShape, str] | None = None
    """Other layers, and their cause."""

    def _start_changes(self) -> None:
        """Create the state of planned changes."""
        self.draining: set[str] = set()
        """Nodes that get no stages any more, and are dismissed once they have none."""
        self.drain_errors: dict[str, str] = {}
        """Reason for which a drain was ended, by node."""
        self._eager: set[str] = set()
        """Nodes that joined to get stages, not as spares."""
        self._unused: set[str] = set()
        """Nodes to which the present stages are not extended, by the last attempt."""
        self._before_change: NodeShape | None = None
        """Stages before a planned change whose generation has not been ready yet."""
        self._attempts = RetryRecord()
        """Preparations that were ended by the death of a worker without a stage."""
        self._preloads: dict[int, tuple[int, tuple[int, int], int]] = {}
        """Rank, layers and degree that each standby worker of a spare loads or has loaded."""

    @property
    def change_kind(self) -> str:
        """Kind of the change that is being prepared; empty for none."""
        return "" if self._change is None else self._change.kind

    def refuse_drain(self, node: str) -> str:
        """Return the reason for which a node cannot be drained; empty if it can."""
        if node in self.draining:
            return ""
        if node == LOCAL_NODE:
            return "the head has the API, so it cannot be drained: stop the engine instead"
        if self.state is not RecoveryState.READY:
            return f"the engine is {self.state}, and not ready"
        leaving = {*self.draining, node}
        if self._nodes.stages_on(node) and self._find_shape_without(leaving) is None:
            return f"the other nodes have no memory for the layers of node {node}"
        return ""

    def drain_node(self, node: str, now: float) -> list[Action]:
        """Let the stages of a living node move to other ones; then dismiss it.

        A node that is drained already stays so. `refuse_drain` has to permit it.
        """
        if self.is_over or not self._nodes.is_alive(node) or node in self.draining:
            return []
        self.draining.add(node)
        self._nodes.excluded = frozenset(self.draining)
        self.drain_errors.pop(node, None)
        self._attempts = RetryRecord()
        return [*self._end_preparation(), *self._advance(now)]

    def on_prepared(self, sender: int, number: int, now: float, error: str = "") -> list[Action]:
        """Handle the report that a worker has loaded its layers of a change, or loads them later.

        Args:
            sender: the worker.
            number: of the change.
            now: time in seconds.
            error: of a worker that cannot load them at all; then the change is given up.
        """
        actions: list[Action] = []
        if self._change is not None and self._change.number == number:
            self._change.outstanding.discard(sender)
            if error:
                self._drop_change(self._change, error)
                actions += self._end_preparation()
        return [*actions, *self._advance(now)]

    def on_preparation_failed(self, generation: int, now: float) -> list[Action]:
        """Let a change happen although a node could not prepare it."""
        if self._change is not None and generation == self.generation + 1:
            self._change.outstanding.clear()
        return self._advance(now)

    @property
    def _change_time(self) -> float:
        """Time at which something has to be done for a planned change."""
        if self.state is not RecoveryState.READY:
            return math.inf
        if self._change is not None:
            return self._change.deadline
        return self._attempts.retry_at if self._attempts.num_failures else math.inf

    def _advance_ready(self, now: float) -> list[Action]:
        """Start what is missing, and prepare or begin a planned change."""
        actions: list[Action] = [*self._dismiss_drained(), *self._preload_spares(now)]
        if self._change is None and self._attempts.retry_at <= now:
            actions += self._prepare_next(now)
        change = self._change
        if change is not None and (not change.outstanding or change.deadline <= now):
            actions += self._switch(change, now)
        return actions

    def _leave(self, cause: str, now: float) -> list[Action]:
        # A generation that ends by itself ends the preparation too.
        return [*super()._leave(cause, now), *self._end_preparation()]

    def _end_preparation(self) -> list[Action]:
        """End the preparation of a change; workers that were started for it end."""
        self._change = None
        return list(self._pool.release_reserved())

    def _on_reserved_lost(self, now: float) -> list[Action]:
        """End a preparation whose new worker has died; give the change up after some attempts."""
        self._attempts.on_failure(now, self._jitter, num_earlier=1)
        if self._attempts.num_failures > self._limits.max_restarts and self._change is not None:
            self._drop_change(self._change, "its new workers have died")
            self._attempts = RetryRecord()
        return self._end_preparation()

    def _drop_change(self, change: PlannedChange, reason: str) -> None:
        """Do not attempt a change again."""
        self._requested = None
        self._unused |= set(change.shape.nodes).difference(self.stage_nodes)
        if change.kind == "drained":
            self._end_drains(reason)

    def _end_drains(self, reason: str) -> None:
        """End the drains of nodes that still have stages."""
        for node in [each for each in self.draining if self._nodes.stages_on(each)]:
            self.draining.discard(node)
            self.drain_errors[node] = reason
        self._nodes.excluded = frozenset(self.draining)

    def _dismiss_drained(self) -> list[Action]:
        """Dismiss the draining nodes that have no stages, with their standby workers."""
        actions: list[Action] = []
        for node in sorted(self.draining):
            if not self._nodes.is_alive(node) or self._nodes.stages_on(node):
                continue
            if self._change is not None and node in self._change.shape.nodes:
                continue
            self._pool.remove_node(node)
            self._nodes.discard(node)
            self._forget_drain(node)
            self._pool.standby_nodes = self._nodes.alive
            actions.append(DismissNode(node, f"node {node} has been drained"))
        return actions

    def _revert_change(self, cause: str, now: float) -> list[Action]:
        """Return to the stages before a planned change, because the new ones cannot begin."""
        self._former_shape, self._before_change = self._before_change, None
        actions = self._restore_shape(cause, now)
        self._end_drains(cause)
        return [*actions, *self._advance(now)]

    def _is_new(self, node: str) -> bool:
        """Return True if a node has got its first stages by a change that is not ready yet."""
        return self._before_change is not None and node not in self._before_change.nodes

    def _on_death(
        self, place: int, activity: Activity, cause: str, now: float, is_poison: bool
    ) -> list[Action]:
        # No request has been computed by the new stages, and the ones before served.
        is_new = self._is_new(self._nodes.stage_nodes[self._names[place].stage])
        is_trial = self._before_change is not None and activity is Activity.ASSIGNED
        if is_trial or (is_new and activity is not Activity.CLOSING):
            return self._revert_change(cause, now)
        return super()._on_death(place, activity, cause, now, is_poison)

    def _on_node_gone(self, node: str) -> list[Action]:
        """Handle the loss of a node, which ends its drain and a preparation that needs it."""
        self._forget_drain(node)
        if not self._is_new(node):
            self._before_change = None
        change = self._change
        return [] if change is None or node not in change.shape.nodes else self._end_preparation()

    def _forget_drain(self, node: str) -> None:
        self.draining.discard(node)
        self.drain_errors.pop(node, None)
        self._eager.discard(node)
        self._nodes.excluded = frozenset(self.draining)

    def _prepare_next(self, now: float) -> list[Action]:
        """Begin to prepare the change that is due; drains are the first."""
        found = self._find_drain() or self._find_requested() or self._find_extension()
        if found is None:
            self._attempts = RetryRecord()
            return []
        kind, shape, cause = found
        self._num_changes += 1
        deadline = now + self._limits.phase_seconds
        change = self._change = PlannedChange(self._num_changes, kind, shape, cause, deadline)
        stages = match_stages(self.stage_nodes, shape.nodes)
        old = {stages[name.stage]: name.stage for name in self._names if name.stage in stages}
        workers = {
            (name.stage, name.rank): worker
            for name, worker in zip(self._names, self._pool.placed, strict=True)
        }
        actions: list[Action] = []
        slots = []
        for place, name in enumerate(place_names(shape.degrees)):
            node = shape.nodes[name.stage]
            worker = workers.get((old.get(name.stage, -1), name.rank))
            if worker is None:
                worker, spawned = self._pool.reserve(node)
                actions += spawned
                change.reserved[worker.sender] = place
            slots.append(Slot(worker.sender, worker.node))
        placement = make_placement(self.generation + 1, shape.layers, slots, shape.degrees)
        change.outstanding = set(placement.senders)
        return [*actions, PrepareLayers(change.number, placement, cause)]

    def _switch(self, change: PlannedChange, now: float) -> list[Action]:
        """End the generation, and give the next one the stages of a change."""
        self._change = self._requested = None
        self._attempts = RetryRecord()
        self._was_poisoned = False
        actions: list[Action] = [BeginChange(change.kind, change.cause)]
        actions += super()._leave(change.cause, now)
        self._former_shape = self._before_change = self._shape
        kills = self._change_shape(change.shape)
        self._pool.seat(change.reserved)
        self._unused.clear()
        return [*actions, ChangeShape(change.shape), *kills, *self._advance(now)]

    def _preload_spares(self, now: float) -> list[Action]:
        """Start the missing standby workers; those of spares load the costliest stage's layers."""
        stages = [stage for stage, node in enumerate(self.stage_nodes) if node != LOCAL_NODE]
        if not (self._limits.spare_preloads and self.find_costliest and stages):
            return [*self._pool.fill_standbys(now)]
        stage = self.find_costliest(stages)
        degree = self._degrees[stage]
        coming = set(self._change.shape.nodes) if self._change else set()
        idle = [node for node in self._nodes.spares if node not in coming]
        spares = self._nodes.fit(idle, degree)
        self._pool.num_preloading = dict.fromkeys(spares, degree)
        actions: list[Action] = [*self._pool.fill_standbys(now)]
        for node in spares:
            workers = self._pool.standbys_on(node)[:degree]
            told = [(rank, self._layers[stage], degree) for rank in range(len(workers))]
            known = [self._preloads.get(worker.sender) for worker in workers]
            if len(workers) < degree or known == told:
                continue
            self._preloads |= {w.sender: each for w, each in zip(workers, told, strict=True)}
            slots = [Slot(worker.sender, worker.node) for worker in self._pool.placed]
            begin = sum(self._degrees[:stage])
            slots[begin : begin + degree] = [Slot(each.sender, node) for each in workers]
            self._num_changes += 1
            placement = make_placement(self.generation, self._layers, slots, self._degrees)
            cause = f"spare node {node} holds the layers of stage {stage}"
            actions.append(PrepareLayers(self._num_changes, placement, cause, node))
        return actions

    def _find_drain(self) -> tuple[str, NodeShape, str] | None:
        """Return the change by which draining nodes lose their stages."""
        leaving = {node for node in self.draining if self._nodes.stages_on(node)}
        if not leaving:
            return None
        shape = self._find_shape_without(leaving)
        if shape is None:
            self._end_drains("the other nodes have no memory for its layers")
            return None
        return "drained", shape, f"{_list_nodes(leaving)} drained"

    def _find_shape_without(self, leaving: set[str]) -> NodeShape | None:
        """Return the stages without some nodes: on spares, or cut anew over the other nodes."""
        shape = self._shape
        stages = [stage for stage, node in enumerate(shape.nodes) if node in leaving]
        spares = self._nodes.choose_spares(stages, leaving)
        if spares is not None:
            nodes = list(shape.nodes)
            for stage, node in zip(stages, spares, strict=True):
                nodes[stage] = node
            return NodeShape(shape.layers, shape.degrees, nodes)
        survivors = [node for node in self._nodes.survivors if node not in leaving]
        return None if self._recut is None else self._recut(shape, survivors)

    def _find_requested(self) -> tuple[str, NodeShape, str] | None:
        """Return the change to the layers that were requested."""
        if self._requested is None:
            return None
        shape, cause = self._requested
        if (shape.nodes, shape.degrees) != (self.stage_nodes, self.degrees):
            self._requested = None
            return None
        return "rebalanced", shape, cause

    def _find_extension(self) -> tuple[str, NodeShape, str] | None:
        """Return the change by which nodes without stages get some."""
        nodes = [node for node in self._nodes.spares if node not in self._unused]
        if self.extend is None or not nodes:
            return None
        lost = Counter(self._first_degrees) - Counter(self._degrees)
        if len(self._degrees) < len(self._first_degrees) and lost:
            added = self._nodes.fill_nodes(nodes, sorted(lost.elements(), reverse=True))
            shape = self._extend_to(added, should_gain=False)
        else:
            eager = [node for node in nodes if self.uses_joined_nodes and node in self._eager]
            added = self._nodes.fill_nodes(eager, [self._degrees[-1]] * len(eager))
            shape = self._extend_to(added, should_gain=True)
        if shape is None:
            self._unused |= set(nodes)
            return None
        new = set(shape.nodes).difference(self.stage_nodes)
        return "joined", shape, f"{_list_nodes(new)} joined"

    def _extend_to(self, added: Sequence[tuple[str, int]], should_gain: bool) -> NodeShape | None:
        """Return the present stages and further ones; see Extend.

        added: node and degree of each further stage.
        """
        assert self.extend is not None, "nodes that join are spares"
        # Fewer new stages may fit where all of them do not.
        for count in range(len(added), 0, -1):
            nodes, degrees = (
                [each[0] for each in added[:count]],
                [each[1] for each in added[:count]],
            )
            if shape := self.extend(self._shape, nodes, degrees, should_gain):
                return shape
        return None


def _list_nodes(nodes: set[str]) -> str:
    """Return names of nodes in words."""
    names = ", ".join(sorted(nodes))
    return f"node {names}" if len(nodes) == 1 else f"nodes {names}"
