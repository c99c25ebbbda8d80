"""Search of a cluster that begins with copies of the plans of its parts.

Copies of a plan are a plan, because the links of different machines are independent. A search of a
large cluster therefore begins with the plan of half of its machines, made twice, and with those of
a third, a fifth, ... of them where the numbers divide. The plans of the parts are searched the same
way, so a cluster is never planned worse than so many copies of its parts. Small clusters also begin
with the plan of all machines but one, so that a further machine never makes a plan worse.
"""

from collections.abc import Callable, Sequence

from gllm.plan.hetero.evaluation import (
    EvaluatedPlan,
    Partition,
    PlanEvaluator,
    make_partition,
)
from gllm.plan.hetero.partition import first_partition
from gllm.plan.hetero.replicas import Phase, ReplicaPlanner
from gllm.plan.hetero.search import LocalSearch, PlanBudget, SearchResult
from gllm.plan.nodes import Group

FACTORS = (2, 3, 5, 7, 11, 13, 17, 19, 23)
"""Numbers of copies with which a search may begin; products of them are copies of copies."""
MAX_CLUSTERED_DEVICES = 128
"""Largest number of devices that spectral clustering groups where there are copies to begin with;
its time grows with the third power."""
MAX_SMALL_DEVICES = 12
"""Largest number of devices of a cluster whose search begins with plans without one machine."""
PART_SHARE = 0.4
"""Share of the remaining time for the searches of a cluster's parts."""
Counts = tuple[int, ...]
"""Number of machines of each class."""


class ClusterSearch:
    """Search for the division of a cluster, or of some of its machines, into replicas.

    Args:
        planner: Chooses the stages of each group of devices.
        budget: Limit of the time and of the number of evaluated partitions.
        seed: Seed of the order of changes and of the restarts.
        max_vain_restarts: Number of consecutive restarts without improvement after which the search
            of each part ends.
        on_better: Called with each plan that serves more than all plans before. Machines of a plan
            that belongs to a part are idle where the part has none.
    """

    def __init__(
        self,
        planner: ReplicaPlanner,
        budget: PlanBudget,
        seed: int,
        max_vain_restarts: int,
        on_better: Callable[[EvaluatedPlan], None] = lambda plan: None,
    ) -> None:
        self._planner, self._budget, self._seed = planner, budget, seed
        self._max_vain_restarts, self._on_better = max_vain_restarts, on_better
        self._evaluator = PlanEvaluator(planner)
        self._best_flow = 0.0
        by_class: dict[int, list[int]] = {}
        for node, number in enumerate(self._evaluator.machine_classes):
            by_class.setdefault(number, []).append(node)
        self._nodes = list(by_class.values())
        """Machines of each class."""
        self._known: dict[Counts, SearchResult | None] = {}

    @property
    def num_parts(self) -> int:
        """Number of parts of the cluster that were searched, besides the cluster itself."""
        return max(0, len(self._known) - 1)

    def run(self) -> SearchResult | None:
        """Return the result for the whole cluster; None if it has fewer than two devices."""
        return self._search(tuple(len(nodes) for nodes in self._nodes), self._budget)

    def _search(self, counts: Counts, budget: PlanBudget) -> SearchResult | None:
        if counts not in self._known:
            devices = self._devices(counts)
            self._known[counts] = None
            if sum(devices) > 1:
                self._known[counts] = self._search_part(counts, devices, budget)
        return self._known[counts]

    def _search_part(
        self, counts: Counts, devices: Group, budget: PlanBudget
    ) -> SearchResult | None:
        starts = self._copies(counts, budget)
        if sum(devices) <= MAX_SMALL_DEVICES:
            starts += self._extensions(counts, budget)
        is_clustered = sum(devices) <= MAX_CLUSTERED_DEVICES and not budget.refusal()
        if is_clustered or not starts:
            starts.append(first_partition(self._planner, devices))
        search = LocalSearch(
            self._evaluator,
            budget,
            self._seed,
            max_vain_restarts=self._max_vain_restarts,
            on_better=self._note,
        )
        return search.run(*dict.fromkeys(starts))

    def _note(self, plan: EvaluatedPlan) -> None:
        if plan.score.flow > self._best_flow:
            self._best_flow = plan.score.flow
            self._on_better(plan)

    def _devices(self, counts: Counts) -> Group:
        """Return the devices of the first machines of each class."""
        devices = [0] * len(self._planner.cluster.nodes)
        for count, nodes in zip(counts, self._nodes, strict=True):
            for node in nodes[:count]:
                devices[node] = self._planner.cluster.nodes[node].num_devices
        return tuple(devices)

    def _copies(self, counts: Counts, budget: PlanBudget) -> list[Partition]:
        """Return partitions of copies of the plan of a part, with one of the remaining machines."""
        starts: list[Partition] = []
        for factor in FACTORS:
            part = tuple(count // factor for count in counts)
            remaining = tuple(count % factor for count in counts)
            if not any(part) or (factor > 2 and any(remaining)):
                continue
            if starts and budget.refusal():
                break
            result = self._search(part, budget.part(PART_SHARE))
            if result is None or not result.best.score.flow:
                continue
            groups = [
                group
                for copy in range(factor)
                for group in self._moved(result.best.partition, part, [copy * n for n in part])
            ]
            last = [factor * count for count in part]
            groups += self._moved(self._partition(remaining, budget), remaining, last)
            starts.append(make_partition(groups))
        return starts

    def _extensions(self, counts: Counts, budget: PlanBudget) -> list[Partition]:
        """Return the partitions of the plans without one machine, which is a group of its own."""
        starts: list[Partition] = []
        for number, count in enumerate(counts):
            if not count or sum(counts) == 1:
                continue
            part = (*counts[:number], count - 1, *counts[number + 1 :])
            result = self._search(part, budget.part(PART_SHARE))
            if result is None:
                continue
            single = tuple(int(index == number) for index in range(len(counts)))
            for phase in (Phase.PREFILL, Phase.DECODE):
                added = self._moved([(phase, self._devices(single))], single, list(part))
                starts.append(make_partition([*result.best.partition, *added]))
        return starts

    def _partition(self, counts: Counts, budget: PlanBudget) -> Partition:
        """Return the partition of a part; a group of each machine if it serves nothing alone."""
        result = self._search(counts, budget.part(PART_SHARE))
        if result is not None and result.best.score.flow:
            return result.best.partition
        devices = self._devices(counts)
        return make_partition(
            (
                Phase.DECODE,
                tuple(count if node == index else 0 for index, count in enumerate(devices)),
            )
            for node in range(len(devices))
        )

    def _moved(
        self, partition: Sequence[tuple[Phase, Group]], counts: Counts, offsets: Sequence[int]
    ) -> list[tuple[Phase, Group]]:
        """Return a partition of the first machines of each class on those after an offset."""
        target = {
            nodes[index]: nodes[index + offset]
            for count, nodes, offset in zip(counts, self._nodes, offsets, strict=True)
            for index in range(count)
        }
        moved = []
        for phase, group in partition:
            devices = [0] * len(group)
            for node, count in enumerate(group):
                if count:
                    devices[target[node]] = count
            moved.append((phase, tuple(devices)))
        return moved
