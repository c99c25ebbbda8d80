"""Stages of an engine: the layers, ranks and node of each, the nodes, and their changes.

A change of the stages keeps the workers whose stage remains on its node. The stages before a change
are remembered until the new ones have served, because the new nodes may prove too small.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from gllm.recovery.actions import Action, ChangeShape, KillWorker
from gllm.recovery.node_layout import NodeShape, match_stages
from gllm.recovery.placement import LOCAL_NODE, Placement, RankWorker, make_placement, rank_names
from gllm.recovery.records import WorkerRecord
from gllm.recovery.worker_pool import WorkerPool

MIN_RETURN_SECONDS = 10.0
"""Shortest wait for a lost node: a manager starts a process again within this time, and a machine
that returns in time costs one pause instead of two."""


Repartition = Callable[[NodeShape, Sequence[str]], NodeShape | None]
"""Return the stages on some of the nodes of a shape, which have to hold all layers; None if these
do not fit. The node of a vacant stage of the shape is an empty string."""


@dataclass(frozen=True, slots=True)
class Vacancy:
    """Stages that have no node since theirs was lost, and how long they wait for its return."""

    node: str
    """The lost node."""
    stages: list[int]
    workers: Mapping[int, int]
    """Index of the (stage, rank) of each worker process of the node that may return with it, by its
    id."""
    cause: str
    since: float
    """Time of the loss."""
    return_until: float
    """Time until which only the same node or a spare gets the stages."""


class Stages:
    """Layers, ranks and nodes of the pipeline's stages, also after lost nodes and planned changes.

    The stages are those of the pipeline's next start. The connected nodes, with and without stages,
    are listed too.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        degrees: Sequence[int],
        nodes: Sequence[str],
        pool: WorkerPool,
        repartition: Repartition | None,
    ) -> None:
        """Create the stages of an engine that has not started, and whose nodes are all alive.

        Args:
            layers: first layer of each stage and first layer after it.
            degrees: number of ranks of each stage.
            nodes: name of the node of each stage.
            pool: workers of the stages.
            repartition: divides the layers over the nodes that are left after a loss; None if they
                always wait for the lost ones.

        Raises:
            ValueError: the first stage is not on the head's node.
        """
        self.layers = list(layers)
        self.degrees = list(degrees)
        self.names = rank_names(self.degrees)
        """Stage and rank of each place."""
        self.stage_nodes = list(nodes)
        """Name of the node of each stage; of a vacant stage, the lost one."""
        self.vacancies: dict[str, Vacancy] = {}
        """By the name of the lost node."""
        self.excluded: set[str] = set()
        """Nodes that get no further stages."""
        self.is_trial = False
        """True if the stages result from a planned change, and have not served yet."""
        self._first_degrees = list(degrees)
        """Degrees of the stages with which the engine starts."""
        self._pool = pool
        self._repartition = repartition
        self._rejected_survivors: list[str] = []
        """Nodes on which the layers do not fit, by the last attempt."""
        self._former: NodeShape | None = None
        """Stages that served last, if other nodes have got some since."""
        if len(self.stage_nodes) != len(self.degrees) or self.stage_nodes[0] != LOCAL_NODE:
            raise ValueError(f"stage 0 has to be on the head's node: {self.stage_nodes}")
        self.capacities = {
            node: self._count_ranks(self.stages_on(node)) for node in self.stage_nodes
        }
        """Workers that each living node can have, in the order of joining."""

    @property
    def shape(self) -> NodeShape:
        """The stages; the node of a vacant one is an empty string."""
        return NodeShape(list(self.layers), list(self.degrees), self.living_nodes)

    @property
    def alive(self) -> list[str]:
        """Names of the connected nodes, the head's first."""
        return list(self.capacities)

    @property
    def spares(self) -> list[str]:
        """Names of the connected nodes without stages, in the order of joining."""
        return [
            node
            for node in self.capacities
            if not self.stages_on(node) and node not in self.excluded
        ]

    @property
    def survivors(self) -> list[str]:
        """Names of the connected nodes with stages, in the order of their stages."""
        return [node for node in dict.fromkeys(self.living_nodes) if node]

    @property
    def living_nodes(self) -> list[str]:
        """Name of the node of each stage; empty for a vacant stage."""
        vacant = self.vacant_stages
        return ["" if i in vacant else node for i, node in enumerate(self.stage_nodes)]

    @property
    def vacant_stages(self) -> set[int]:
        """Stages whose node is lost."""
        return {stage for vacancy in self.vacancies.values() for stage in vacancy.stages}

    @property
    def return_until(self) -> float:
        """Time until which stages of lost nodes wait, before layers are partitioned again."""
        return max((vacancy.return_until for vacancy in self.vacancies.values()), default=math.inf)

    @property
    def oldest_vacancy(self) -> Vacancy | None:
        """The stages that have waited longest for a node; None if there are none."""
        return min(self.vacancies.values(), key=lambda vacancy: vacancy.since, default=None)

    @property
    def has_former(self) -> bool:
        """True if the stages have changed since the engine last served; see `restore`."""
        return self._former is not None

    @property
    def lost_degrees(self) -> list[int]:
        """Degrees of the stages that the engine has had at its start and lacks, largest first."""
        if len(self.degrees) >= len(self._first_degrees):
            return []
        lost = Counter(self._first_degrees) - Counter(self.degrees)
        return sorted(lost.elements(), reverse=True)

    @property
    def repartition_time(self) -> float:
        """Time at which the layers are partitioned over the remaining nodes; infinity for never."""
        if self._repartition is None or self.survivors == self._rejected_survivors:
            return math.inf
        return self.return_until

    def is_alive(self, node: str) -> bool:
        """Return True if a node has joined and was not lost since."""
        return node in self.capacities

    def is_new(self, node: str) -> bool:
        """Return True if a node has got its first stages by a change that has not served yet."""
        return self.is_trial and self._former is not None and node not in self._former.nodes

    def node_of(self, place: int) -> str:
        """Return the name of the node of a rank, by its index; the lost one if it has none now."""
        return self.stage_nodes[self.names[place].stage]

    def count_layers(self, stages: Sequence[int]) -> int:
        """Return the number of layers of some stages."""
        return sum(end - begin for begin, end in (self.layers[stage] for stage in stages))

    def make_placement(self, epoch: int) -> Placement:
        """Return the placement of an epoch with the present workers."""
        slots = [RankWorker(worker.sender, worker.node) for worker in self._pool.placed]
        return make_placement(epoch, self.layers, slots, self.degrees)

    def stages_on(self, node: str) -> list[int]:
        """Return the stages of a connected node."""
        return [i for i, own in enumerate(self.living_nodes) if own == node]

    def returning_workers(self, node: str, capacity: int, workers: Sequence[int]) -> dict[int, int]:
        """Return the rank for each surviving worker that a node may keep when it joins again.

        Args:
            node: name of the node.
            capacity: number of workers that it can have.
            workers: ids of its surviving workers.

        Returns:
            Index of the (stage, rank), by id of the worker.
        """
        if not self._can_return(node, capacity):
            return {}
        places = self.vacancies[node].workers
        return {sender: places[sender] for sender in workers if sender in places}

    def fill_vacancies(self, now: float) -> list[Action]:
        """Move the stages of lost nodes to spares, or partition the layers anew.

        Spares get the stages of a lost node if they can have all of them.
        """
        actions: list[Action] = []
        former = NodeShape(list(self.layers), list(self.degrees), list(self.stage_nodes))
        moved: list[int] = []
        for vacancy in sorted(self.vacancies.values(), key=lambda vacancy: vacancy.stages):
            nodes = self.choose_spares(vacancy.stages)
            if nodes is None:
                continue
            del self.vacancies[vacancy.node]
            for stage, node in zip(vacancy.stages, nodes, strict=True):
                self.stage_nodes[stage] = node
            moved += vacancy.stages
        if moved:
            self._move_places(moved)
            actions.append(ChangeShape(self.shape))
        if self.repartition_time <= now:
            assert self._repartition is not None
            survivors = self.survivors
            shape = self._repartition(self.shape, survivors)
            if shape is None:
                self._rejected_survivors = survivors
            else:
                actions += [ChangeShape(shape), *self._replace(shape)]
        if actions and self._former is None:
            self._former = former
        return actions

    def allow_repartition(self) -> None:
        """Permit another partition over nodes on which the layers did not fit before."""
        self._rejected_survivors = []

    def try_shape(self, shape: NodeShape) -> list[KillWorker]:
        """Replace the stages by those of a planned change, until `confirm` or `restore`."""
        self._former, self.is_trial = self.shape, True
        return self._replace(shape)

    def confirm(self) -> None:
        """Make the present stages permanent, because they serve requests."""
        self._former, self.is_trial = None, False

    def restore(self, cause: str, now: float) -> list[Action]:
        """Return to the stages that served last, because the present stages cannot serve.

        The stages of lost nodes wait for these again, or for nodes that have not been tried. Nodes
        that had no stages then get none any more, until they join again.
        """
        shape, self._former, self.is_trial = self._former, None, False
        assert shape is not None, "the stages are those that served last"
        before = self.living_nodes
        for node in set(self.stage_nodes).difference(shape.nodes):
            self.capacities[node] = 0
        self.stage_nodes, self.degrees = list(shape.nodes), list(shape.degrees)
        self.vacancies.clear()
        for node in dict.fromkeys(shape.nodes):
            stages = [stage for stage, own in enumerate(shape.nodes) if own == node]
            if self.capacities.get(node, 0) < self._count_ranks(stages):
                self.vacancies[node] = Vacancy(node, stages, {}, cause, now, now)
        kills = self._replace_places(shape, match_stages(before, self.living_nodes))
        for place, name in enumerate(self.names):
            if name.stage in self.vacant_stages:
                self._pool.places[place].is_vacant = True
        self._rejected_survivors = self.survivors
        return [ChangeShape(self.shape), *kills]

    def add_node(self, node: str, capacity: int, workers: Sequence[int]) -> list[KillWorker]:
        """Add a node, which receives its former stages unless another node has them.

        Args:
            node: name of the node.
            capacity: number of workers that it can have.
            workers: ids of its surviving workers of an earlier session, which have no KV cache.

        Returns:
            Commands that kill the workers that are not needed.
        """
        wanted = self.returning_workers(node, capacity, workers)
        self.capacities[node] = capacity
        if self._can_return(node, capacity):
            self._move_places(self.vacancies.pop(node).stages)
            for sender, place in wanted.items():
                self._pool.restore(sender, place)
        self._pool.standby_nodes = self.alive
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
        del self.capacities[node]
        stages = self.stages_on(node)
        if stages:
            all_stages, since = stages, now
            # One that has returned with too little capacity may have got other stages since.
            if earlier := self.vacancies.get(node):
                all_stages, since = sorted([*earlier.stages, *stages]), earlier.since
            self.vacancies[node] = Vacancy(
                node, all_stages, returning, cause, since, now + return_seconds
            )
        self._pool.standby_nodes = self.alive
        return stages, gone

    def discard_node(self, node: str) -> None:
        """Remove a connected node without stages, and its standby workers."""
        self._pool.remove_node(node)
        del self.capacities[node]
        self._pool.standby_nodes = self.alive

    def choose_spares(
        self, stages: Sequence[int], without: Collection[str] = ()
    ) -> list[str] | None:
        """Return a spare for each of some stages; None if the spares have too little capacity.

        The smallest spare that can have all is best; else several spares share the stages.

        Args:
            stages: indices of the stages.
            without: nodes that get none.
        """
        spares = [node for node in self.spares if node not in without]
        capacities = {node: self.capacities[node] for node in spares}
        needed = self._count_ranks(stages)
        if enough := [node for node, capacity in capacities.items() if capacity >= needed]:
            return [min(enough, key=lambda node: capacities[node])] * len(stages)
        largest_first = iter(sorted(capacities, key=lambda node: -capacities[node]))
        nodes: list[str] = []
        node = next(largest_first, None)
        for stage in stages:
            while node is not None and capacities[node] < self.degrees[stage]:
                node = next(largest_first, None)
            if node is None:
                return None
            capacities[node] -= self.degrees[stage]
            nodes.append(node)
        return nodes

    def fill_nodes(self, nodes: Sequence[str], degrees: Sequence[int]) -> list[tuple[str, int]]:
        """Return the node and the number of ranks of further stages, as far as nodes have capacity.

        Args:
            nodes: nodes without stages.
            degrees: number of ranks of each further stage.
        """
        waiting, filled = list(degrees), []
        for node in nodes:
            capacity = self.capacities[node]
            own = []
            for degree in list(waiting):
                if degree <= capacity:
                    waiting.remove(degree)
                    own.append((node, degree))
                    capacity -= degree
            filled += own
        return filled

    def fit(self, nodes: Sequence[str], degree: int) -> list[str]:
        """Return the nodes that have the capacity for a stage with a number of ranks."""
        return [node for node in nodes if self.capacities[node] >= degree]

    def find_shape_without(self, leaving: Collection[str]) -> NodeShape | None:
        """Return the stages without some nodes.

        They move to spares, or the layers are partitioned over the other nodes.
        """
        shape = self.shape
        stages = [stage for stage, node in enumerate(shape.nodes) if node in leaving]
        spares = self.choose_spares(stages, leaving)
        if spares is not None:
            nodes = list(shape.nodes)
            for stage, node in zip(stages, spares, strict=True):
                nodes[stage] = node
            return NodeShape(shape.layers, shape.degrees, nodes)
        survivors = [node for node in self.survivors if node not in leaving]
        return None if self._repartition is None else self._repartition(shape, survivors)

    def _move_places(self, stages: Collection[int]) -> None:
        """Note the living nodes of places of some stages that were vacant."""
        for place, name in enumerate(self.names):
            if name.stage in stages:
                self._pool.move_place(place, self.stage_nodes[name.stage])

    def _replace(self, shape: NodeShape) -> list[KillWorker]:
        """Replace the stages; workers of the same stage of a node remain, others are killed."""
        stages = match_stages(self.living_nodes, shape.nodes)
        if not set(shape.nodes) <= self.capacities.keys() or shape.nodes[0] != LOCAL_NODE:
            raise ValueError(f"stages are on lost nodes, or stage 0 is remote: {shape.nodes}")
        self.vacancies.clear()
        self.stage_nodes = list(shape.nodes)
        return self._replace_places(shape, stages)

    def _replace_places(self, shape: NodeShape, stages: Mapping[int, int]) -> list[KillWorker]:
        """Replace the places by those of the stages of a shape.

        stages: new index of each old stage that remains.
        """
        old_names = self.names
        self.layers, self.degrees = list(shape.layers), list(shape.degrees)
        self.names = rank_names(self.degrees)
        new_places = {(name.stage, name.rank): place for place, name in enumerate(self.names)}
        moves = {
            place: new_places[stages[name.stage], name.rank]
            for place, name in enumerate(old_names)
            if (stages.get(name.stage), name.rank) in new_places
        }
        nodes = [self.node_of(place) for place in range(len(self.names))]
        return self._pool.reshape(nodes, moves)

    def _can_return(self, node: str, capacity: int) -> bool:
        """Return True if a node that joins gets its former stages."""
        vacancy = self.vacancies.get(node)
        return vacancy is not None and self._count_ranks(vacancy.stages) <= capacity

    def _count_ranks(self, stages: Sequence[int]) -> int:
        return sum(self.degrees[stage] for stage in stages)


def choose_return_seconds(predicted_seconds: float, seconds_left: float) -> float:
    """Return how long the stages of a lost node wait for its return before others take its layers.

    Nobody knows whether the node returns. A wait as long as the takeover would take is at most
    twice as long as the best decision in hindsight (Karlin, Manasse, Rudolph and Sleator,
    "Competitive Snoopy Caching", Algorithmica 3, 1988).

    Args:
        predicted_seconds: time until the engine would serve without the node: its layers are
            loaded, and the running requests are computed again.
        seconds_left: time until the running requests are rejected; infinite if there is no limit.

    Returns:
        Seconds.
    """
    wanted = max(predicted_seconds, MIN_RETURN_SECONDS)
    if predicted_seconds <= seconds_left < wanted + predicted_seconds:
        # The other nodes can still answer the requests.
        return seconds_left - predicted_seconds
    return wanted


def predict_reload_seconds(
    seconds_per_layer: float, num_lost_layers: int, num_stages_left: int
) -> float:
    """Return the predicted seconds in which the remaining stages load the layers of lost stages.

    Args:
        seconds_per_layer: measured time to load one layer.
        num_lost_layers: layers of the lost stages.
        num_stages_left: stages that load them in parallel.
    """
    return seconds_per_layer * math.ceil(num_lost_layers / num_stages_left)
