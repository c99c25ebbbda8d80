"""Search for the partition with the most flow: changes of a partition, and a guided local search.

Source: HexGen-2 (arXiv 2502.07903), section 4.3. Swaps of devices alone end in poor partitions, so
groups also merge and split; the first improvement is accepted. After the last one the search goes
on from a randomly changed partition while its budget lasts.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from gllm.plan.hetero.links import SATURATED_SHARE, machines_of
from gllm.plan.hetero.replicas import Phase
from gllm.plan.nodes import Group

MAX_SPLITS = 64
"""Ways to split a group in two that are tried; those with the most even halves."""
PHASES = (Phase.PREFILL, Phase.DECODE)
REFINEMENTS = 3
"""Rounds in which the roles of groups and machines are refined."""


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
    devices, another phase for a group, merges and splits of groups. Equal machines are
    interchangeable: of changes that differ only in which of them they concern, the first one is
    generated.

    Args:
        partition: Groups of devices with their phases.
        machine_classes: Equal numbers for equal machines; empty: all are different.
    """

    def __init__(self, partition: Partition, machine_classes: Sequence[int] = ()) -> None:
        self._groups = list(partition)
        self._machines = [_machines(group) for _, group in partition]
        num_machines = len(partition[0][1]) if partition else 0
        classes = machine_classes or range(num_machines)
        self._group_roles, self._machine_roles = _find_roles(
            self._groups, self._machines, list(classes)
        )
        self._seen: set[object] = set()

    def moves(self, source: int, target: int) -> Iterator[Partition]:
        """Yield the partitions in which one device moves from group `source` to group `target`."""
        key = self._pair_key(source, target)
        for machine in self._machines[source]:
            if self._is_new("move", key, self._machine_key(machine, source, target)):
                yield self._replace(
                    {
                        source: self._changed(source, machine, -1),
                        target: self._changed(target, machine, 1),
                    }
                )

    def swaps(self, a: int, b: int) -> Iterator[Partition]:
        """Yield the partitions in which two groups exchange devices of different nodes."""
        key = self._pair_key(a, b)
        for i, j in product(self._machines[a], self._machines[b]):
            if i != j and self._is_new(
                "swap", key, self._machine_key(i, a, b), self._machine_key(j, a, b)
            ):
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
        if self._is_new("flip", self._group_roles[index]):
            yield self._replace({index: (other_phase(phase), group)})

    def merges(self, a: int, b: int) -> Iterator[Partition]:
        """Yield the partitions in which two groups are merged, as prefill and as decode."""
        if not self._is_new("merge", self._pair_key(*sorted((a, b), key=self._role_of))):
            return
        both = tuple(x + y for x, y in zip(self._groups[a][1], self._groups[b][1], strict=True))
        for phase in PHASES:
            yield self._replace({a: (phase, both), b: None})

    def splits(self, index: int) -> Iterator[Partition]:
        """Yield the partitions in which a group is split in two, the most even splits first."""
        phase, group = self._groups[index]
        role, machines = self._group_roles[index], self._machines[index]
        for part in _parts(group):
            counts = sorted((self._machine_roles[i], group[i], part[i]) for i in machines)
            if not self._is_new("split", role, tuple(counts)):
                continue
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

    # Equal changes.

    def _is_new(self, *key: object) -> bool:
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def _role_of(self, index: int) -> int:
        return self._group_roles[index]

    def _pair_key(self, a: int, b: int) -> tuple[object, ...]:
        """Return what a change of two groups depends on: their roles and common machines."""
        common = set(self._machines[a]).intersection(self._machines[b])
        shared = sorted(self._machine_key(machine, a, b) for machine in common)
        return self._group_roles[a], self._group_roles[b], *shared

    def _machine_key(self, machine: int, a: int, b: int) -> tuple[int, int, int]:
        groups = self._groups
        return self._machine_roles[machine], groups[a][1][machine], groups[b][1][machine]


def _find_roles(
    groups: Sequence[TypedGroup], machines: Sequence[Sequence[int]], classes: list[int]
) -> tuple[list[int], list[int]]:
    """Return numbers of groups and machines that are equal where exchanging them changes nothing.

    Colours of vertices are refined by those of their neighbours (Weisfeiler and Leman), which tells
    nearly all graphs apart.

    Args:
        groups: Groups of devices with their phases.
        machines: Machines of each group.
        classes: Equal numbers for equal machines.
    """
    machine_roles = classes
    group_roles = [PHASES.index(phase) for phase, _ in groups]
    for _ in range(REFINEMENTS):
        group_roles = _number(
            (role, *sorted((machine_roles[i], group[i]) for i in own))
            for role, (_, group), own in zip(group_roles, groups, machines, strict=True)
        )
        users: list[list[tuple[int, int]]] = [[] for _ in classes]
        for role, (_, group), own in zip(group_roles, groups, machines, strict=True):
            for i in own:
                users[i].append((role, group[i]))
        machine_roles = _number(
            (role, *sorted(using)) for role, using in zip(machine_roles, users, strict=True)
        )
    return group_roles, machine_roles


def _number(keys: Iterable[tuple[object, ...]]) -> list[int]:
    numbers: dict[tuple[object, ...], int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


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
    finder = NeighbourFinder(plan.partition, plan.machine_classes)
    yield from _shuffled_changes(finder, rng)


def _shuffled_changes(finder: NeighbourFinder, rng: Random) -> Iterator[Partition]:
    partitions = list(dict.fromkeys(finder.all_changes()))
    rng.shuffle(partitions)
    yield from partitions


def _ordered(plan: EvaluatedPlan, rng: Random) -> Iterator[Partition]:
    finder, loads = NeighbourFinder(plan.partition, plan.machine_classes), plan.loads()
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
    yield from _shuffled_changes(finder, rng)


def _saturated_transfers(plan: EvaluatedPlan, loads: list[GroupLoad]) -> Iterator[tuple[int, int]]:
    """Yield the groups at both ends of each route over a link without slack."""
    saturated = {link for link, share in plan.flow.links.items() if share >= SATURATED_SHARE}
    if not saturated:
        return
    machines = {link.node for link in saturated}
    for p, d in plan.flow.routes:
        ends = plan.prefill[p], plan.decode[d]
        if machines.isdisjoint(machines_of(ends[0]) | machines_of(ends[1])):
            continue
        yield tuple(  # type: ignore[misc]
            next(
                index
                for index, load in enumerate(loads)
                if (load.phase, load.group) == (phase, replica.group)
            )
            for phase, replica in zip(PHASES, ends, strict=True)
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
MAX_VAIN_RESTARTS = 24
"""Random restarts without an improvement, one after the other, that end a search."""
MAX_RESTART_CHANGES = 2
"""Most random changes with which the search goes on after a local optimum."""


class PlanBudget(SearchBudget):
    """Budget of a search that can be divided among the searches of parts of a cluster.

    An evaluation of a partition is not cut off. It is assumed to take as long as the longest one so
    far, so that the search ends within the time limit.

    Args:
        seconds: Time limit in seconds; None: no limit.
        max_evaluations: Largest number of partitions that may be compared; None: no limit.
        clock: Returns the current time in seconds; must be monotonic.
        reserve: Share of the time, 0..1, that is left for work after the search.
        begin: Time of the clock from which the limit counts; None: now.
        whole: Budget of which this one is a part, which ends it too; None: it is no part.
    """

    def __init__(
        self,
        seconds: float | None = None,
        max_evaluations: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        reserve: float = 0.0,
        begin: float | None = None,
        whole: "PlanBudget | None" = None,
    ) -> None:
        super().__init__(seconds, max_evaluations, clock, reserve, begin)
        self._whole = whole
        self._longest = 0.0
        self._last = clock()

    def part(self, share: float) -> "PlanBudget":
        """Return a budget for a share, 0..1, of the time that is left."""
        seconds = None
        if self._seconds is not None:
            seconds = max(0.0, share * (self._search_seconds - self.elapsed_seconds))
        return PlanBudget(seconds, None, self._clock, whole=self)

    def refusal(self) -> str:
        """Return the reason why no further evaluation is allowed; empty if one is."""
        reason = (self._whole.refusal() if self._whole else "") or super().refusal()
        if not reason and self.elapsed_seconds + self._longest > self._search_seconds:
            return self._spent_reason
        return reason

    def check(self) -> None:
        """Raise SearchEndedError if work after the search has to end."""
        if deadline := self.final_deadline:
            deadline()

    def begin_evaluation(self) -> None:
        """Begin the time of an evaluation now, instead of at the end of the one before."""
        self._last = self._clock()
        if self._whole:
            self._whole.begin_evaluation()

    def end_evaluation(self, count: int = 1) -> None:
        """Count evaluations that have just ended, and measure their duration."""
        super().end_evaluation(count)
        now = self._clock()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        if self._whole:
            self._whole.end_evaluation(count)


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
    """True if no change of the first local optimum improves it; False if the budget ended."""
    ending: str = ""
    """Reason why the search ended before its restarts; empty if it did not."""


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
        on_better: Called with each plan that is better than all plans before.
    """

    def __init__(
        self,
        evaluator: PlanEvaluator,
        budget: PlanBudget,
        seed: int = 0,
        changes: Changes = guided_changes,
        restart_changes: Changes = random_changes,
        max_vain_restarts: int = MAX_VAIN_RESTARTS,
        on_better: Callable[[EvaluatedPlan], None] = lambda plan: None,
    ) -> None:
        self._evaluator, self._budget = evaluator, budget
        self._changes, self._restart_changes = changes, restart_changes
        self._max_vain_restarts = max_vain_restarts
        self._rng = Random(seed)
        self._on_better = on_better
        self._steps: list[SearchStep] = []

    def run(self, *partitions: Partition) -> SearchResult:
        """Return the best plan that is reached from one of some first partitions."""
        first = best = self._evaluate(partitions[0])
        self._note(first)
        starts, is_complete = [first], True
        for partition in partitions[1:]:
            if self._budget.refusal():
                break
            starts.append(self._evaluate(partition))
            if starts[-1].score.beats(best.score):
                best = starts[-1]
                self._note(best)
        for start in starts:
            plan, has_ended = self._climb(start, self._changes, best.score)
            is_complete = is_complete and has_ended
            if plan.score.beats(best.score):
                best = plan
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
            self._budget.refusal(),
        )

    def _climb(
        self, plan: EvaluatedPlan, changes: Changes, known: Score
    ) -> tuple[EvaluatedPlan, bool]:
        """Improve a plan as far as possible; the second value is False if the budget ended."""
        while True:
            better = None
            for partition in changes(plan, self._rng):
                if self._budget.refusal():
                    return plan, False
                self._budget.begin_evaluation()
                better = self._evaluator.evaluate_if_better(partition, plan.score)
                self._budget.end_evaluation()
                if better is not None:
                    break
            if better is None:
                return plan, True
            plan = better
            if plan.score.beats(known):
                self._note(plan)

    def _restart_from(self, plan: EvaluatedPlan) -> EvaluatedPlan:
        """Return a plan some random changes away."""
        partition = plan.partition
        for _ in range(self._rng.randint(1, MAX_RESTART_CHANGES)):
            finder = NeighbourFinder(partition, plan.machine_classes)
            partition = self._rng.choice(list(finder.all_changes()))
        return self._evaluate(partition)

    def _evaluate(self, partition: Partition) -> EvaluatedPlan:
        self._budget.begin_evaluation()
        plan = self._evaluator.evaluate(partition)
        self._budget.end_evaluation()
        return plan

    def _note(self, plan: EvaluatedPlan) -> None:
        if not self._steps or plan.score.flow > self._steps[-1].flow:
            self._steps.append(SearchStep(self._evaluator.num_evaluations, plan.score.flow))
            self._on_better(plan)
