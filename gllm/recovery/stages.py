"""Stages of an engine: the layers, ranks and node of each, and their changes.

A change of the stages keeps the workers whose stage remains on its node. The stages before a change
are remembered until the new ones have served, because the new nodes may prove too small.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from gllm.recovery.actions import Action, ChangeShape, KillWorker
from gllm.recovery.node_layout import NodeShape
from gllm.recovery.node_pool import NodePool, match_stages
from gllm.recovery.placement import Placement, Slot, make_placement, place_names
from gllm.recovery.records import WorkerRecord
from gllm.recovery.worker_pool import WorkerPool

Recut = Callable[[NodeShape, Sequence[str]], NodeShape | None]
"""Return the stages on some of the nodes of a shape, which have to hold all layers; None if these
do not fit. The node of a vacant stage of the shape is an empty string."""


class Stages:
    """The stages from the next generation on, with the pools of their nodes and workers."""

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        degrees: Sequence[int],
        nodes: NodePool,
        pool: WorkerPool,
        recut: Recut | None,
    ) -> None:
        """Create the stages of an engine that has not started.

        Args:
            layers: first layer of each stage and first layer after it.
            degrees: number of ranks of each stage.
            nodes: nodes of the stages.
            pool: workers of the stages.
            recut: divides the layers over the nodes that are left after a loss; None if they
                always wait for the lost ones.
        """
        self.layers = list(layers)
        self.degrees = list(degrees)
        self.names = place_names(self.degrees)
        """Stage and rank of each place."""
        self.is_trial = False
        """True if the stages result from a planned change, and have not served yet."""
        self._first_degrees = list(degrees)
        """Degrees of the stages with which the engine starts."""
        self._nodes = nodes
        self._pool = pool
        self._recut = recut
        self._rejected_survivors: list[str] = []
        """Nodes on which the layers do not fit, by the last attempt."""
        self._former: NodeShape | None = None
        """Stages that served last, if other nodes have got some since."""

    @property
    def shape(self) -> NodeShape:
        """The stages; the node of a vacant one is an empty string."""
        return NodeShape(list(self.layers), list(self.degrees), self._nodes.living_nodes)

    @property
    def has_former(self) -> bool:
        """True if stages have changed since the engine last served, so that `restore` can help."""
        return self._former is not None

    @property
    def lost_degrees(self) -> list[int]:
        """Degrees of the stages that the engine has had at its start and lacks, largest first."""
        if len(self.degrees) >= len(self._first_degrees):
            return []
        lost = Counter(self._first_degrees) - Counter(self.degrees)
        return sorted(lost.elements(), reverse=True)

    @property
    def recut_time(self) -> float:
        """Time at which the layers are cut over the nodes left; infinity if they are not."""
        if self._recut is None or self._nodes.survivors == self._rejected_survivors:
            return math.inf
        return self._nodes.return_until

    def is_new(self, node: str) -> bool:
        """Return True if a node has got its first stages by a change that has not served yet."""
        return self.is_trial and self._former is not None and node not in self._former.nodes

    def node_of(self, place: int) -> str:
        """Return the name of the node of a place; of a vacant place, the lost one."""
        return self._nodes.stage_nodes[self.names[place].stage]

    def count_layers(self, stages: Sequence[int]) -> int:
        """Return the number of layers of some stages."""
        return sum(end - begin for begin, end in (self.layers[stage] for stage in stages))

    def make_placement(self, generation: int) -> Placement:
        """Return the placement of a generation with the present workers."""
        slots = [Slot(worker.sender, worker.node) for worker in self._pool.placed]
        return make_placement(generation, self.layers, slots, self.degrees)

    def fill_vacancies(self, now: float) -> list[Action]:
        """Give the stages of lost nodes to spares, or cut the layers over the nodes left."""
        actions: list[Action] = []
        former = NodeShape(list(self.layers), list(self.degrees), list(self._nodes.stage_nodes))
        if moved := self._nodes.fill_vacancies():
            self._move_places(moved)
            actions.append(ChangeShape(self.shape))
        if self.recut_time <= now:
            assert self._recut is not None
            survivors = self._nodes.survivors
            shape = self._recut(self.shape, survivors)
            if shape is None:
                self._rejected_survivors = survivors
            else:
                actions += [ChangeShape(shape), *self._replace(shape)]
        if actions and self._former is None:
            self._former = former
        return actions

    def allow_recut(self) -> None:
        """Attempt to cut the layers again, also over nodes on which they did not fit."""
        self._rejected_survivors = []

    def try_shape(self, shape: NodeShape) -> list[KillWorker]:
        """Replace the stages by those of a planned change, until `confirm` or `restore`."""
        self._former, self.is_trial = self.shape, True
        return self._replace(shape)

    def confirm(self) -> None:
        """Keep the stages, because they serve."""
        self._former, self.is_trial = None, False

    def restore(self, cause: str, now: float) -> list[Action]:
        """Return to the stages that served last, because the present ones cannot.

        The stages of lost nodes wait for these again, or for nodes that have not been tried.
        """
        shape, self._former, self.is_trial = self._former, None, False
        assert shape is not None, "the stages are those that served last"
        before = self._nodes.living_nodes
        self._nodes.restore(shape.nodes, shape.degrees, cause, now)
        kills = self._replace_places(shape, match_stages(before, self._nodes.living_nodes))
        for place, name in enumerate(self.names):
            if name.stage in self._nodes.vacant_stages:
                self._pool.vacate(place)
        self._rejected_survivors = self._nodes.survivors
        return [ChangeShape(self.shape), *kills]

    def add_node(self, node: str, capacity: int, workers: Sequence[int]) -> list[KillWorker]:
        """Add a node, which gets its former stages back if no other node has got them.

        Args:
            node: its name.
            capacity: workers that it can have.
            workers: living workers of an earlier session, whose instances are closed.

        Returns:
            The kills of the workers that are not wanted.
        """
        wanted = self._nodes.wanted_workers(node, capacity, workers)
        if vacancy := self._nodes.add(node, capacity):
            self._move_places(vacancy.stages)
            for sender, place in wanted.items():
                self._pool.restore(sender, place)
        self._pool.standby_nodes = self._nodes.alive
        cause = "its stage has got another worker"
        return [KillWorker(sender, cause) for sender in workers if sender not in wanted]

    def remove_node(
        self, node: str, cause: str, now: float, return_seconds: float
    ) -> tuple[list[int], list[WorkerRecord]]:
        """Remove a lost node with its workers.

        Args:
            node: its name.
            cause: description of the loss.
            now: time in seconds.
            return_seconds: time for which its stages wait for it.

        Returns:
            The stages that are vacant by it, and its workers.
        """
        if not self.is_new(node):
            self.is_trial = False
        gone = self._pool.remove_node(node)
        workers = {worker.sender: worker.place for worker in gone if worker.place is not None}
        returning = {worker.sender: workers[worker.sender] for worker in gone if worker.may_return}
        stages = self._nodes.remove(node, returning, cause, now, return_seconds)
        self._pool.standby_nodes = self._nodes.alive
        return stages, gone

    def discard_node(self, node: str) -> None:
        """Remove a living node that has no stages, with its standby workers."""
        self._pool.remove_node(node)
        self._nodes.discard(node)
        self._pool.standby_nodes = self._nodes.alive

    def find_shape_without(self, leaving: Collection[str]) -> NodeShape | None:
        """Return the stages without some nodes: on spares, or cut anew over the other nodes."""
        shape = self.shape
        stages = [stage for stage, node in enumerate(shape.nodes) if node in leaving]
        spares = self._nodes.choose_spares(stages, leaving)
        if spares is not None:
            nodes = list(shape.nodes)
            for stage, node in zip(stages, spares, strict=True):
                nodes[stage] = node
            return NodeShape(shape.layers, shape.degrees, nodes)
        survivors = [node for node in self._nodes.survivors if node not in leaving]
        return None if self._recut is None else self._recut(shape, survivors)

    def _move_places(self, stages: Collection[int]) -> None:
        """Note the living nodes of places of some stages that were vacant."""
        for place, name in enumerate(self.names):
            if name.stage in stages:
                self._pool.move_place(place, self._nodes.stage_nodes[name.stage])

    def _replace(self, shape: NodeShape) -> list[KillWorker]:
        """Replace the stages; workers of the same stage of a node remain, others are killed."""
        stages = match_stages(self._nodes.living_nodes, shape.nodes)
        self._nodes.reshape(shape.nodes, shape.degrees)
        return self._replace_places(shape, stages)

    def _replace_places(self, shape: NodeShape, stages: Mapping[int, int]) -> list[KillWorker]:
        """Replace the places by those of the stages of a shape.

        stages: new index of each old stage that remains.
        """
        old_names = self.names
        self.layers, self.degrees = list(shape.layers), list(shape.degrees)
        self.names = place_names(self.degrees)
        new_places = {(name.stage, name.rank): place for place, name in enumerate(self.names)}
        moves = {
            place: new_places[stages[name.stage], name.rank]
            for place, name in enumerate(old_names)
            if (stages.get(name.stage), name.rank) in new_places
        }
        nodes = [self.node_of(place) for place in range(len(self.names))]
        return self._pool.reshape(nodes, moves)
