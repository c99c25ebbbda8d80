"""Phases of an engine's life, from empty places to a generation that serves, and back.

`Recovery` handles the events and calls these phases; nothing else does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random

from gllm.recovery.actions import (
    Action,
    AssignGeneration,
    ChangeShape,
    ChooseLayers,
    DetachClient,
    GiveUp,
    InitializeCaches,
    KillWorker,
    MeasureWorkers,
    WarmUp,
)
from gllm.recovery.node_layout import NodeShape
from gllm.recovery.node_pool import NodePool, match_stages
from gllm.recovery.placement import LOCAL_NODE, Placement, Slot, make_placement, place_names
from gllm.recovery.records import (
    Activity,
    RecoveryLimits,
    RecoveryState,
    RetryRecord,
    WorkerRecord,
)
from gllm.recovery.worker_pool import WorkerPool

Recut = Callable[[NodeShape, Sequence[str]], NodeShape | None]
"""Return the stages on some of the nodes of a shape, which have to hold all layers; None if these
do not fit. The node of a vacant stage of the shape is an empty string."""


class RecoveryPhases:
    """State of an engine's life, and the actions that each phase begins with."""

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        limits: RecoveryLimits,
        jitter: Random,
        degrees: Sequence[int] | None = None,
        should_measure: bool = False,
        nodes: Sequence[str] | None = None,
        recut: Recut | None = None,
    ) -> None:
        """Create the state of an engine that has not started.

        Args:
            layers: first layer of each stage and first layer after it.
            limits: limits of a recovery.
            jitter: source of the random part of backoffs.
            degrees: number of ranks of each stage; None for one each.
            should_measure: divide the layers by measurements of the workers before the first
                generation.
            nodes: name of the node of each stage; None for the head's node. All are alive, and have
                room for exactly the workers of their stages.
            recut: divides the layers over the nodes that are left after a loss; None if they
                always wait for the lost ones.

        Raises:
            ValueError: stage 0 is not on the head's node.
        """
        self.state = RecoveryState.NEW
        self.placement: Placement | None = None
        """Placement of the current generation."""
        self.recovering_since: float | None = None
        """Time of the death that the engine recovers from; None if it has not been ready before,
        or is ready."""
        self.has_been_ready = False
        self.is_overdue = False
        """True if this recovery has taken longer than the timeout: requests are rejected."""
        self.generation = 0
        """Number of the current generation; 0 before the first."""
        self._layers = list(layers)
        self._degrees = [1] * len(self._layers) if degrees is None else list(degrees)
        self._first_degrees = list(self._degrees)
        """Degrees of the stages with which the engine starts."""
        self._names = place_names(self._degrees)
        self._limits = limits
        self._jitter = jitter
        self._recut = recut
        self._rejected_survivors: list[str] = []
        """Nodes on which the layers do not fit, by the last attempt."""
        self._former_shape: NodeShape | None = None
        """Stages before this recovery gave them to other nodes; None if it did not."""
        self.set_nodes(nodes or [LOCAL_NODE] * len(self._layers), should_measure)
        self._assignments = RetryRecord()
        """Generations that could not be assigned since the engine was ready."""
        self._connections = RetryRecord()
        """Generations whose workers could not reach each other since the engine was ready."""
        self._was_poisoned = False
        """True if a request ended the last generation."""
        self._has_begun_measuring = self._has_chosen_layers = False
        """Actions of the state MEASURING that have been returned."""
        self._loading_since = 0.0
        """Time at which the current generation began to load."""
        self._seconds_per_layer = 0.0
        """Longest time in which a generation has loaded, over the layers of its largest stage."""
        self._start_changes()

    @property
    def layers(self) -> list[tuple[int, int]]:
        """First layer of each stage and first layer after it, from the next generation on."""
        return list(self._layers)

    @property
    def vacant_nodes(self) -> list[str]:
        """Names of the lost nodes whose stages wait for a node."""
        return list(self._nodes.vacancies)

    @property
    def return_until(self) -> float:
        """Time until which the lost nodes are awaited; infinity if none is lost."""
        return self._nodes.return_until

    @property
    def degrees(self) -> list[int]:
        """Number of ranks of each stage, from the next generation on."""
        return list(self._degrees)

    def set_nodes(self, nodes: Sequence[str], should_measure: bool) -> None:
        """Set the nodes of the stages, before the start.

        Args:
            nodes: name of the node of each stage.
            should_measure: see `__init__`.

        Raises:
            ValueError: stage 0 is not on the head's node.
        """
        assert self.state is RecoveryState.NEW, "the engine has started"
        self._should_measure = should_measure
        self._nodes = NodePool(nodes, self._degrees)
        self._pool = WorkerPool(self._place_nodes(), self._limits, self._jitter)

    @property
    def stage_nodes(self) -> list[str]:
        """Name of the node of each stage; empty while its node is lost."""
        return self._nodes.living_nodes

    @property
    def is_over(self) -> bool:
        """True if the engine has given up or was stopped."""
        return self.state is RecoveryState.DEAD

    def _advance(self, now: float) -> list[Action]:
        """Do everything that the current state permits; return the actions."""
        actions: list[Action] = []
        if self.state is RecoveryState.FORMING:
            actions += self._fill_vacancies(now)
            actions += self._pool.fill_places(now)
            if self._pool.is_formed and self._assign_time <= now:
                actions += self._measure(now) if self._should_measure else [self._assign(now)]
        elif self.state is RecoveryState.MEASURING:
            actions += self._measure(now)
        elif self.state is RecoveryState.LOADING and self._pool.is_phase_finished:
            self._record_load(now)
            actions.append(InitializeCaches(self.generation))
            self._begin_phase(RecoveryState.INITIALIZING, now)
        elif self.state is RecoveryState.INITIALIZING and self._pool.is_phase_finished:
            actions.append(WarmUp(self.generation))
            self._begin_phase(RecoveryState.WARMING, now)
        elif self.state is RecoveryState.READY:
            # Only now, because the imports of a standby worker would slow down a recovery.
            actions += self._advance_ready(now)
        return actions

    def _start_changes(self) -> None:
        """Create the state of planned changes, which a subclass has."""

    def _advance_ready(self, now: float) -> list[Action]:
        """Start the missing standby workers; a subclass also prepares planned changes."""
        return [*self._pool.fill_standbys(now)]

    @property
    def _assign_time(self) -> float:
        """Earliest time of the next generation, once all places have workers."""
        return max(self._assignments.retry_at, self._connections.retry_at)

    def _fill_vacancies(self, now: float) -> list[Action]:
        """Give the stages of lost nodes to spares, or cut the layers over the nodes left."""
        actions: list[Action] = []
        former = NodeShape(self.layers, self.degrees, list(self._nodes.stage_nodes))
        if moved := self._nodes.fill_vacancies():
            for place, name in enumerate(self._names):
                if name.stage in moved:
                    self._pool.move_place(place, self._nodes.stage_nodes[name.stage])
            actions.append(ChangeShape(self._shape))
        if self._recut_time <= now:
            assert self._recut is not None
            survivors = self._nodes.survivors
            shape = self._recut(self._shape, survivors)
            if shape is None:
                self._rejected_survivors = survivors
            else:
                actions += [ChangeShape(shape), *self._change_shape(shape)]
        if actions and self._former_shape is None:
            self._former_shape = former
        return actions

    def _restore_shape(self, cause: str, now: float) -> list[Action]:
        """Return to the stages before other nodes got them, whose memory does not suffice.

        The stages of lost nodes wait for these again, or for nodes that have not been tried.

        Returns:
            The actions; none if the nodes are those before.
        """
        shape, self._former_shape = self._former_shape, None
        if shape is None:
            return []
        self._was_poisoned = False
        actions = self._leave(cause, now)
        before = self.stage_nodes
        self._nodes.restore(shape.nodes, shape.degrees, cause, now)
        kills = self._replace_places(shape, match_stages(before, self.stage_nodes))
        for place, name in enumerate(self._names):
            if name.stage in self._nodes.vacant_stages:
                self._pool.vacate(place)
        self._rejected_survivors = self._nodes.survivors
        return [*actions, ChangeShape(self._shape), *kills]

    @property
    def _recut_time(self) -> float:
        """Time at which the layers are cut over the nodes left; infinity if they are not."""
        if self._recut is None or self._nodes.survivors == self._rejected_survivors:
            return math.inf
        return self._nodes.return_until

    @property
    def _shape(self) -> NodeShape:
        return NodeShape(self.layers, self.degrees, self.stage_nodes)

    def _change_shape(self, shape: NodeShape) -> list[KillWorker]:
        """Replace the stages; workers of the same stage of a node remain, others are killed."""
        stages = match_stages(self.stage_nodes, shape.nodes)
        self._nodes.reshape(shape.nodes, shape.degrees)
        return self._replace_places(shape, stages)

    def _replace_places(self, shape: NodeShape, stages: Mapping[int, int]) -> list[KillWorker]:
        """Replace the places by those of the stages of a shape.

        stages: new index of each old stage that remains.
        """
        old_names = self._names
        self._layers, self._degrees = list(shape.layers), list(shape.degrees)
        self._names = place_names(self._degrees)
        new_places = {(name.stage, name.rank): place for place, name in enumerate(self._names)}
        moves = {
            place: new_places[stages[name.stage], name.rank]
            for place, name in enumerate(old_names)
            if (stages.get(name.stage), name.rank) in new_places
        }
        return self._pool.reshape(self._place_nodes(), moves)

    def _place_nodes(self) -> list[str]:
        """Return the name of the node of each place."""
        return [self._nodes.stage_nodes[name.stage] for name in place_names(self._degrees)]

    def _begin_phase(self, state: RecoveryState, now: float) -> None:
        self.state = state
        self._pool.begin_phase(now)

    def _finish_phase(self, sender: int, state: RecoveryState) -> WorkerRecord | None:
        """Note a worker's answer to a phase; return None if it was not expected."""
        return self._pool.finish_phase(sender) if self.state is state else None

    def _measure(self, now: float) -> list[Action]:
        """Let all workers measure at once, when none imports its modules any more."""
        if self.state is not RecoveryState.MEASURING:
            self._begin_phase(RecoveryState.MEASURING, now)
            self._has_begun_measuring = self._has_chosen_layers = False
        if self._pool.is_connected and not self._has_begun_measuring:
            self._has_begun_measuring = True
            return [MeasureWorkers(self._make_placement(self.generation + 1))]
        if self._pool.is_phase_finished and not self._has_chosen_layers:
            self._has_chosen_layers = True
            return [ChooseLayers()]
        return []

    def _make_placement(self, generation: int) -> Placement:
        slots = [Slot(worker.sender, worker.node) for worker in self._pool.placed]
        return make_placement(generation, self._layers, slots, self._degrees)

    def _assign(self, now: float) -> Action:
        """Begin the next generation; every place has a worker without an instance."""
        self.generation += 1
        self.placement = self._make_placement(self.generation)
        self._loading_since = now
        self._begin_phase(RecoveryState.LOADING, now)
        return AssignGeneration(self.placement)

    def _record_load(self, now: float) -> None:
        """Note the time of loading; generations whose workers keep weights load less."""
        seconds = now - self._loading_since
        num_layers = max(end - begin for begin, end in self._layers)
        self._seconds_per_layer = max(self._seconds_per_layer, seconds / num_layers)

    def _on_death(
        self, place: int, activity: Activity, cause: str, now: float, is_poison: bool
    ) -> list[Action]:
        """Count the death of a place and leave the generation, or give up if it was one too many.

        Args:
            place: index of the place.
            activity: of its worker before the death.
            cause: description of the death.
            now: time in seconds.
            is_poison: True if a request has caused it.
        """
        if activity is Activity.CLOSING:
            # The ranks of a stage compute a request together, so it may kill several of them.
            is_poison = is_poison or self._was_poisoned
        if not is_poison and not self._pool.count_death(place):
            return self._give_up(self._describe_restarts(cause))
        self._pool.delay_respawn(place, now)
        if self.state is RecoveryState.FORMING:
            return []
        self._was_poisoned = is_poison
        return self._leave(cause, now)

    def _leave(self, cause: str, now: float) -> list[Action]:
        """End the current generation after a death, or for a planned change."""
        actions: list[Action] = []
        if self.state is RecoveryState.READY:
            self.recovering_since = now
            actions.append(DetachClient(cause))
        self.state = RecoveryState.FORMING
        return [*actions, *self._pool.close_instances(self.generation, now)]

    def _give_up(self, cause: str) -> list[Action]:
        self.state = RecoveryState.DEAD
        return [GiveUp(cause)]

    def _describe_restarts(self, cause: str) -> str:
        """Return the cause of a death with the restarts that it follows."""
        if num_restarts := self._limits.max_restarts:
            cause += f"; restarts without a finished step before: {num_restarts}"
        return cause

    def _describe_vacancy(self) -> str:
        """Return the reason for which the engine cannot start without a lost node."""
        vacancy = self._nodes.oldest_vacancy
        assert vacancy is not None
        return (
            f"{vacancy.cause}; node {vacancy.node} did not return within "
            f"{self._limits.join_seconds:g} seconds, no spare node took its stages, and the other "
            "nodes cannot hold them"
        )
