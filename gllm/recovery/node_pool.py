"""Nodes of an engine: the living ones, the stages of each, and stages whose node is lost.

`Recovery` reports losses and joins; the pool decides which node gets the stages of a lost one.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gllm.recovery.placement import LOCAL_NODE

MIN_RETURN_SECONDS = 10.0
"""Shortest wait for a lost node: a manager starts a process again within this time, and a machine
that returns in time costs one pause instead of two."""


@dataclass(frozen=True, slots=True)
class Vacancy:
    """Stages whose node is lost."""

    node: str
    """The lost node."""
    stages: list[int]
    workers: Mapping[int, int]
    """Place of each worker process of the node that may return with it, by sender."""
    cause: str
    since: float
    """Time of the loss."""
    return_until: float
    """Time until which only the same node or a spare gets the stages."""


class NodePool:
    """Decides which nodes have the stages."""

    def __init__(self, stage_nodes: Sequence[str], degrees: Sequence[int]) -> None:
        """Create the pool of an engine whose nodes are all alive.

        Args:
            stage_nodes: name of the node of each stage.
            degrees: number of ranks of each stage.

        Raises:
            ValueError: the first stage is not on the head's node.
        """
        self.stage_nodes = list(stage_nodes)
        """Name of the node of each stage; of a vacant stage, the lost one."""
        self.vacancies: dict[str, Vacancy] = {}
        """By the name of the lost node."""
        self.excluded: frozenset[str] = frozenset()
        """Nodes that get no further stages."""
        self._degrees = list(degrees)
        if len(self.stage_nodes) != len(self._degrees) or self.stage_nodes[0] != LOCAL_NODE:
            raise ValueError(f"stage 0 has to be on the head's node: {self.stage_nodes}")
        self.capacities = {node: self._num_ranks(node) for node in self.stage_nodes}
        """Workers that each living node can have, in the order of joining."""

    @property
    def alive(self) -> list[str]:
        """Names of the living nodes, the head's first."""
        return list(self.capacities)

    @property
    def spares(self) -> list[str]:
        """Names of the living nodes without stages that may get some, in the order of joining."""
        return [
            node
            for node in self.capacities
            if not self.stages_on(node) and node not in self.excluded
        ]

    @property
    def survivors(self) -> list[str]:
        """Names of the living nodes with stages, in the order of their stages."""
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
        """Time until which lost nodes are awaited before the layers are cut anew."""
        return max((each.return_until for each in self.vacancies.values()), default=math.inf)

    @property
    def oldest_vacancy(self) -> Vacancy | None:
        """The stages that have waited longest for a node; None if there are none."""
        return min(self.vacancies.values(), key=lambda each: each.since, default=None)

    def is_alive(self, node: str) -> bool:
        """Return True if a node has joined and was not lost since."""
        return node in self.capacities

    def remove(
        self, node: str, workers: Mapping[int, int], cause: str, now: float, return_seconds: float
    ) -> list[int]:
        """Handle the loss of a node; return the stages that are vacant by it.

        Args:
            node: the lost node.
            workers: place of each of its workers that may return with it, by sender.
            cause: description of the loss.
            now: time in seconds.
            return_seconds: time for which its stages wait for it.
        """
        del self.capacities[node]
        stages = self.stages_on(node)
        if stages:
            until = now + return_seconds
            # One that has returned with too little capacity may have got other stages since.
            if earlier := self.vacancies.get(node):
                all_stages, since = sorted([*earlier.stages, *stages]), earlier.since
            else:
                all_stages, since = stages, now
            self.vacancies[node] = Vacancy(node, all_stages, workers, cause, since, until)
        return stages

    def add(self, node: str, capacity: int) -> Vacancy | None:
        """Handle a node that has joined; return the vacancy that it fills as the same node.

        Args:
            node: its name.
            capacity: workers that it can have.
        """
        self.capacities[node] = capacity
        return self.vacancies.pop(node) if self._can_return(node, capacity) else None

    def wanted_workers(self, node: str, capacity: int, workers: Sequence[int]) -> dict[int, int]:
        """Return the place of each worker that a node keeps if it joins; see `add`.

        workers: living workers of its earlier session.
        """
        if not self._can_return(node, capacity):
            return {}
        places = self.vacancies[node].workers
        return {sender: places[sender] for sender in workers if sender in places}

    def _can_return(self, node: str, capacity: int) -> bool:
        """Return True if a node that joins gets its former stages."""
        vacancy = self.vacancies.get(node)
        return vacancy is not None and self._count_ranks(vacancy.stages) <= capacity

    def fill_vacancies(self) -> list[int]:
        """Move vacant stages to spares, as far as these can have all stages of a lost node.

        Returns:
            The stages that have got another node.
        """
        moved: list[int] = []
        for vacancy in sorted(self.vacancies.values(), key=lambda each: each.stages):
            nodes = self.choose_spares(vacancy.stages)
            if nodes is None:
                continue
            del self.vacancies[vacancy.node]
            for stage, node in zip(vacancy.stages, nodes, strict=True):
                self.stage_nodes[stage] = node
            moved += vacancy.stages
        return moved

    def reshape(self, stage_nodes: Sequence[str], degrees: Sequence[int]) -> None:
        """Note other stages, all of which are on living nodes.

        Raises:
            ValueError: one is not, or the first stage is not on the head's node.
        """
        if not set(stage_nodes) <= self.capacities.keys() or stage_nodes[0] != LOCAL_NODE:
            raise ValueError(f"stages are on lost nodes, or stage 0 is remote: {stage_nodes}")
        self.vacancies.clear()
        self.stage_nodes, self._degrees = list(stage_nodes), list(degrees)

    def restore(
        self, stage_nodes: Sequence[str], degrees: Sequence[int], cause: str, now: float
    ) -> None:
        """Return to earlier stages, because the memory of the present nodes does not suffice.

        Nodes that had no stages then get none any more, until they join again.

        Args:
            stage_nodes: name of the earlier node of each stage; stages of a lost one are vacant.
            degrees: number of ranks of each stage.
            cause: description of the reason.
            now: time in seconds.
        """
        for node in set(self.stage_nodes).difference(stage_nodes):
            self.capacities[node] = 0
        self.stage_nodes, self._degrees = list(stage_nodes), list(degrees)
        self.vacancies.clear()
        for node in dict.fromkeys(stage_nodes):
            stages = [stage for stage, own in enumerate(stage_nodes) if own == node]
            if self.capacities.get(node, 0) < self._count_ranks(stages):
                self.vacancies[node] = Vacancy(node, stages, {}, cause, now, now)

    def choose_spares(
        self, stages: Sequence[int], without: Collection[str] = ()
    ) -> list[str] | None:
        """Return the spare for each of some stages; None if the spares cannot have all of them.

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
            while node is not None and capacities[node] < self._degrees[stage]:
                node = next(largest_first, None)
            if node is None:
                return None
            capacities[node] -= self._degrees[stage]
            nodes.append(node)
        return nodes

    def fill_nodes(self, nodes: Sequence[str], degrees: Sequence[int]) -> list[tuple[str, int]]:
        """Return the node and the degree of further stages, as far as nodes have the capacity.

        Args:
            nodes: without stages.
            degrees: of the stages.
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
        """Return the nodes that have the capacity for a stage of a degree."""
        return [node for node in nodes if self.capacities[node] >= degree]

    def discard(self, node: str) -> None:
        """Handle the end of a living node that has no stages."""
        del self.capacities[node]

    def stages_on(self, node: str) -> list[int]:
        """Return the stages that a living node has."""
        return [i for i, own in enumerate(self.living_nodes) if own == node]

    def _num_ranks(self, node: str) -> int:
        return self._count_ranks(self.stages_on(node))

    def _count_ranks(self, stages: Sequence[int]) -> int:
        return sum(self._degrees[stage] for stage in stages)


def match_stages(old: Sequence[str], new: Sequence[str]) -> dict[int, int]:
    """Return the new stage of each old one that remains, after a change of the stages.

    The first stage of a node remains its first one, and so on.

    Args:
        old: node of each stage before.
        new: node of each stage after.
    """
    after = {key: stage for stage, key in enumerate(_stage_keys(new))}
    keys = enumerate(_stage_keys(old))
    return {stage: after[key] for stage, key in keys if key in after}


def _stage_keys(nodes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the node of each stage, and the index of the stage among those of the node."""
    counts: Counter[str] = Counter()
    for node in nodes:
        yield node, counts[node]
        counts[node] += 1


def choose_return_seconds(predicted_seconds: float, seconds_left: float) -> float:
    """Return the time for which the stages of a lost node wait for it.

    Nobody knows whether the node returns. A wait of the time that other stages would cost is at
    most twice as long as the best decision in hindsight (Karlin, Manasse, Rudolph and Sleator,
    "Competitive Snoopy Caching", Algorithmica 3, 1988).

    Args:
        predicted_seconds: time until the engine would serve without the node: its layers are
            loaded, and the running requests are computed again.
        seconds_left: time until the running requests are rejected; infinite if there is no limit.
    """
    wanted = max(predicted_seconds, MIN_RETURN_SECONDS)
    if predicted_seconds <= seconds_left < wanted + predicted_seconds:
        # The other nodes can still answer the requests.
        return seconds_left - predicted_seconds
    return wanted


def predict_reload_seconds(
    seconds_per_layer: float, num_lost_layers: int, num_stages_left: int
) -> float:
    """Return the time in which the other stages load the layers of lost ones, all at once."""
    return seconds_per_layer * math.ceil(num_lost_layers / num_stages_left)
