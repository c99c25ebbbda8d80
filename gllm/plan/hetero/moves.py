"""Changes of a partition: move, swap, flip, merge, split."""

from collections.abc import Iterable, Iterator
from itertools import combinations, product
from random import Random

from gllm.plan.hetero.evaluation import (
    EvaluatedPlan,
    GroupLoad,
    Partition,
    TypedGroup,
    make_partition,
)
from gllm.plan.hetero.replicas import Phase
from gllm.plan.nodes import Group

MAX_SPLITS = 64
"""Ways to split a group in two that are tried; those with the most even halves."""
PHASES = (Phase.PREFILL, Phase.DECODE)


def flipped(phase: Phase) -> Phase:
    """Return the other phase."""
    return Phase.DECODE if phase is Phase.PREFILL else Phase.PREFILL


def add_devices(group: Group, machine: int, count: int) -> Group:
    """Return a group with `count` more devices of a machine."""
    return (*group[:machine], group[machine] + count, *group[machine + 1 :])


class NeighbourFinder:
    """Partitions that one change makes of a partition.

    Args:
        partition: The groups.
    """

    def __init__(self, partition: Partition) -> None:
        self._groups = list(partition)

    def moves(self, source: int, target: int) -> Iterator[Partition]:
        """Yield the partitions with one device of group `source` in group `target`."""
        for machine in _machines(self._groups[source][1]):
            yield self._replace(
                {
                    source: self._changed(source, machine, -1),
                    target: self._changed(target, machine, 1),
                }
            )

    def swaps(self, a: int, b: int) -> Iterator[Partition]:
        """Yield the partitions with two devices of different machines exchanged."""
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
        """Yield the partition with the other phase for a group."""
        phase, group = self._groups[index]
        yield self._replace({index: (flipped(phase), group)})

    def merges(self, a: int, b: int) -> Iterator[Partition]:
        """Yield the partitions with two groups as one of either phase."""
        both = tuple(x + y for x, y in zip(self._groups[a][1], self._groups[b][1], strict=True))
        for phase in PHASES:
            yield self._replace({a: (phase, both), b: None})

    def splits(self, index: int) -> Iterator[Partition]:
        """Yield the partitions with a group as two, the most even ones first."""
        phase, group = self._groups[index]
        for part in _parts(group):
            other = tuple(x - y for x, y in zip(group, part, strict=True))
            for first, second in ((phase, phase), (phase, flipped(phase)), (flipped(phase), phase)):
                yield self._replace({index: (first, part)}, [(second, other)])

    def exchanges(self) -> Iterator[Partition]:
        """Yield every neighbour with as many groups; some more than once."""
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
    """Yield the neighbours of a plan, the most promising ones first, without repetition.

    Groups at their capacity are bottlenecks, groups below it have slack. Devices go from the group
    with the most slack to a bottleneck first; a slack group takes the bottleneck's phase; a
    saturated transfer exchanges devices of its two ends; then slack groups merge and split. All
    other changes follow in random order.
    """
    seen = {plan.partition}
    for partition in _ordered(plan, rng):
        if partition not in seen:
            seen.add(partition)
            yield partition


def random_changes(plan: EvaluatedPlan, rng: Random) -> Iterator[Partition]:
    """Yield the neighbours of a plan in random order, without repetition."""
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
