"""Search for the partition with the most flow: changes of a partition, and a guided local search.

Source: HexGen-2 (arXiv 2502.07903), section 4.3. Swaps of devices alone end in poor partitions, so
groups also merge and split; the first improvement is accepted. After the last one the search goes
on from a randomly changed partition while its budget lasts.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, product
from random import Random
from typing import NamedTuple

from gllm.plan.best_first import SearchBudget
from gllm.plan.hetero.evaluation import (
    EvaluatedPlan,
    GroupLoad,
    Partition,
    PlanEvaluator,
    Score,
    TypedGroup,
    make_partition,
)
from gllm.plan.hetero.replicas import Phase
from gllm.plan.nodes import Group

MAX_SPLITS = 64
"""Ways to split a group in two that are tried; those with the most even halves."""
PHASES = (Phase.PREFILL, Phase.DECODE)


def other_phase(phase: Phase) -> Phase:
    """Return decode for prefill, and prefill for any other phase."""
    return Phase.DECODE if phase is Phase.PREFILL else Phase.PREFILL


def add_devices(group: Group, machine: int, count: int) -> Group:
    """Return a group of devices with `count` more devices of a node; `count` may be negative.

    Args:
        group: Number of devices on each node.
        machine: Index of the node.
        count: Number of devices to add.
    """
    return (*group[:machine], group[machine] + count, *group[machine + 1 :])


class NeighbourFinder:
    """Generates the partitions of the devices that differ from a given one by one change.

    A partition divides the devices into prefill and decode groups. Changes are moves and swaps of
    devices, another phase for a group, merges and splits of groups.

    Args:
        partition: Groups of devices with their phases.
    """

    def __init__(self, partition: Partition) -> None:
        self._groups = list(partition)

    def moves(self, source: int, target: int) -> Iterator[Partition]:
        """Yield the partitions in which one device moves from group `source` to group `target`."""
        for machine in _machines(self._groups[source][1]):
            yield self._replace(
                {
                    source: self._changed(source, machine, -1),
                    target: self._changed(target, machine, 1),
                }
            )

    def swaps(self, a: int, b: int) -> Iterator[Partition]:
        """Yield the partitions in which two groups exchange devices of different nodes."""
        for i, j in product(_machines(self._groups[a][1]), _machines(self._groups[b][1])):
            if i != j:
                first, second = self._changed(a, i, -1), self._changed(b, j, -1)
                yield self._replace(
                    {
                        a: (first[0], add_devices(first[1], j, 1)),
                        b: (second[0], add_devices(second[1], i, 1)),
                    }
                )

    def flips(self, index: int) -> Iterator[Partition]:
        """Yield the partition in which a group has the other phase."""
        phase, group = self._groups[index]
        yield self._replace({index: (other_phase(phase), group)})

    def merges(self, a: int, b: int) -> Iterator[Partition]:
        """Yield the partitions in which two groups are merged, as prefill and as decode."""
        both = tuple(x + y for x, y in zip(self._groups[a][1], self._groups[b][1], strict=True))
        for phase in PHASES:
            yield self._replace({a: (phase, both), b: None})

    def splits(self, index: int) -> Iterator[Partition]:
        """Yield the partitions in which a group is split in two, the most even splits first."""
        phase, group = self._groups[index]
        for part in _parts(group):
            other = tuple(x - y for x, y in zip(group, part, strict=True))
            for first, second in (
                (phase, phase),
                (phase, other_phase(phase)),
                (other_phase(phase), phase),
            ):
                yield self._replace({index: (first, part)}, [(second, other)])

    def exchanges(self) -> Iterator[Partition]:
        """Yield every neighbour with the same number of groups; some more than once."""
        count = len(self._groups)
        for index in range(count):
            yield from self.flips(index)
        for a, b in product(range(count), repeat=2):
            if a != b:
                yield from self.moves(a, b)
            if a < b:
                yield from self.swaps(a, b)

    def all_changes(self) -> Iterator[Partition]:
        """Yield every neighbour; some more than once."""
        yield from self.exchanges()
        count = len(self._groups)
        for a, b in combinations(range(count), 2):
            yield from self.merges(a, b)
        for index in range(count):
            yield from self.splits(index)

    def _changed(self, index: int, machine: int, count: int) -> TypedGroup:
        phase, group = self._groups[index]
        return phase, add_devices(group, machine, count)

    def _replace(
        self, changes: dict[int, TypedGroup | None], extra: Iterable[TypedGroup] = ()
    ) -> Partition:
        kept = [changes.get(index, group) for index, group in enumerate(self._groups)]
        return make_partition([group for group in [*kept, *extra] if group is not None])


def guided_changes(plan: EvaluatedPlan, rng: Random) -> Iterator[Partition]:
    """Yield the partitions that differ by one change from a plan's, the most promising ones first.

    Groups at their capacity are bottlenecks; groups below it have slack. The order is: devices move
    from the group with the most slack to a bottleneck; a group with slack takes the bottleneck's
    phase; the two groups of a saturated KV transfer exchange devices; groups with slack merge and
    split; then all other changes in random order. No partition is repeated.

    Args:
        plan: Plan to change, with the flow through its groups.
        rng: Source of randomness.
    """
    seen = {plan.partition}
    for partition in _ordered(plan, rng):
        if partition not in seen:
            seen.add(partition)
            yield partition


def random_changes(plan: EvaluatedPlan, rng: Random) -> Iterator[Partition]:
    """Yield the partitions that differ by one change from a plan's, in random order, each once."""
    partitions = list(dict.fromkeys(NeighbourFinder(plan.partition).all_changes()))
    rng.shuffle(partitions)
    yield from partitions


def _ordered(plan: EvaluatedPlan, rng: Random) -> Iterator[Partition]:
    finder, loads = NeighbourFinder(plan.partition), plan.loads()
    saturated = [index for index, load in enumerate(loads) if load.is_saturated]
    slack = sorted(
        (index for index, load in enumerate(loads) if not load.is_saturated),
        key=lambda index: -loads[index].slack,
    )
    for ample in slack:
        for scarce in saturated:
            yield from finder.moves(ample, scarce)
            yield from finder.swaps(ample, scarce)
        if any(loads[scarce].phase is not loads[ample].phase for scarce in saturated):
            yield from finder.flips(ample)
    for a, b in _saturated_transfers(plan, loads):
        yield from finder.swaps(a, b)
    for position, ample in enumerate(slack):
        for other in slack[position + 1 :]:
            yield from finder.merges(ample, other)
        yield from finder.splits(ample)
    for scarce in saturated:
        for ample in slack:
            yield from finder.merges(ample, scarce)
    yield from random_changes(plan, rng)


def _saturated_transfers(plan: EvaluatedPlan, loads: list[GroupLoad]) -> Iterator[tuple[int, int]]:
    """Yield the groups at both ends of each transfer without slack."""
    for (p, d), flow in plan.flow.routes.items():
        if flow >= plan.flow.transfers[p, d] * (1 - 1e-6):
            ends = plan.prefill[p].group, plan.decode[d].group
            yield tuple(  # type: ignore[misc]
                next(
                    index
                    for index, load in enumerate(loads)
                    if (load.phase, load.group) == (phase, group)
                )
                for phase, group in zip(PHASES, ends, strict=True)
            )


def _machines(group: Group) -> list[int]:
    return [machine for machine, count in enumerate(group) if count]


def _parts(group: Group) -> list[Group]:
    """Return the proper parts of a group up to its half, the most even ones first."""
    size = sum(group)
    total = 1
    for count in group:
        total *= count + 1
    if total > 16 * MAX_SPLITS:
        # Only parts with half of the devices of each machine, or all or none.
        options = [sorted({0, count // 2, (count + 1) // 2, count}) for count in group]
    else:
        options = [list(range(count + 1)) for count in group]
    parts = [part for part in product(*options) if 0 < 2 * sum(part) <= size]
    parts.sort(key=lambda part: (-sum(part), part))
    return parts[:MAX_SPLITS]


Changes = Callable[[EvaluatedPlan, Random], Iterator[Partition]]
"""Yields the neighbours of a plan in the order in which they are tried."""
MAX_EVALUATIONS = 20_000
"""Partitions that a search compares at most."""
MAX_VAIN_RESTARTS = 24
"""Random restarts without an improvement, one after the other, that end a search."""
MAX_RESTART_CHANGES = 2
"""Most random changes with which the search goes on after a local optimum."""


class SearchStep(NamedTuple):
    """Progress of a search: flow of a new best plan, and number of evaluations until then."""

    num_evaluations: int
    flow: float
    """Maximum flow of the new best plan in requests per second."""


class SearchResult(NamedTuple):
    """Result of a local search: first and best plan, improvements, and numbers of evaluations."""

    first: EvaluatedPlan
    """Plan of the first partition."""
    best: EvaluatedPlan
    steps: list[SearchStep]
    num_evaluations: int
    num_flows: int
    num_restarts: int
    """Restarts from randomly changed partitions."""
    is_complete: bool
    """True if no change of the best partition improves it; False if the budget ended before."""


class LocalSearch:
    """Local search for the division of the devices into prefill and decode groups with most flow.

    Accepts the first improvement, and restarts from random changes of the best partition.

    Args:
        evaluator: New evaluator, without cached results.
        budget: Limit of the time and of the number of evaluated partitions.
        seed: Seed of the random order and of the restarts.
        changes: Yields the neighbours of a plan in the order to try, until the first local optimum.
        restart_changes: Yields the neighbours of a plan in the order to try, after a restart.
        max_vain_restarts: Number of consecutive restarts without improvement after which the search
            ends.
    """

    def __init__(
        self,
        evaluator: PlanEvaluator,
        budget: SearchBudget,
        seed: int = 0,
        changes: Changes = guided_changes,
        restart_changes: Changes = random_changes,
        max_vain_restarts: int = MAX_VAIN_RESTARTS,
    ) -> None:
        self._evaluator, self._budget = evaluator, budget
        self._changes, self._restart_changes = changes, restart_changes
        self._max_vain_restarts = max_vain_restarts
        self._rng = Random(seed)
        self._steps: list[SearchStep] = []

    def run(self, partition: Partition) -> SearchResult:
        """Return the best plan that is reached from a first partition."""
        first = self._evaluate(partition)
        self._note(first)
        best, is_complete = self._climb(first, self._changes, None)
        num_restarts = num_vain = 0
        while num_vain < self._max_vain_restarts and not self._budget.refusal():
            num_restarts += 1
            plan, _ = self._climb(self._restart_from(best), self._restart_changes, best.score)
            num_vain += 1
            if plan.score.beats(best.score):
                best, num_vain = plan, 0
        return SearchResult(
            first,
            best,
            self._steps,
            self._evaluator.num_evaluations,
            self._evaluator.num_flows,
            num_restarts,
            is_complete,
        )

    def _climb(
        self, plan: EvaluatedPlan, changes: Changes, known: Score | None
    ) -> tuple[EvaluatedPlan, bool]:
        """Improve a plan as far as possible; the second value is False if the budget ended."""
        while True:
            better = None
            for partition in changes(plan, self._rng):
                if self._budget.refusal():
                    return plan, False
                better = self._evaluator.evaluate_if_better(partition, plan.score)
                self._budget.end_evaluation()
                if better is not None:
                    break
            if better is None:
                return plan, True
            plan = better
            if known is None or plan.score.beats(known):
                self._note(plan)

    def _restart_from(self, plan: EvaluatedPlan) -> EvaluatedPlan:
        """Return a plan some random changes away."""
        partition = plan.partition
        for _ in range(self._rng.randint(1, MAX_RESTART_CHANGES)):
            partition = self._rng.choice(list(NeighbourFinder(partition).all_changes()))
        return self._evaluate(partition)

    def _evaluate(self, partition: Partition) -> EvaluatedPlan:
        plan = self._evaluator.evaluate(partition)
        self._budget.end_evaluation()
        return plan

    def _note(self, plan: EvaluatedPlan) -> None:
        if not self._steps or plan.score.flow > self._steps[-1].flow:
            self._steps.append(SearchStep(self._evaluator.num_evaluations, plan.score.flow))
