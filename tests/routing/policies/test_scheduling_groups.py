"""Groups of engines, and their use by Aladdin's policy."""

from collections import Counter
from random import Random
from typing import Any

from benchmarks.placement import MODEL
from gllm.options.slo import Slo
from gllm.routing.placement import PlacementRules
from gllm.routing.policies.aladdin import AladdinPolicy, SchedulingGroups
from gllm.routing.state import EngineSnapshot, OngoingRequest, RoutingRequest

NAMES = [f"engine-{number}" for number in range(200)]
SLO = Slo(1.6, 0.075)


def grouped(rate: float, num_engines: int, seconds: float = 5.0) -> SchedulingGroups:
    """Groups after arrivals at a rate."""
    groups = SchedulingGroups()
    for number in range(round(rate * seconds)):
        groups.on_request(num_engines, number / rate)
    return groups


def members(groups: SchedulingGroups, names: list[str]) -> dict[str, frozenset[str]]:
    """The other engines of each engine's group."""
    parts = [frozenset(names[index] for index in each) for each in groups.divide(names)]
    return {name: part for part in parts for name in part}


def test_sixty_four_engines_at_25_per_second_are_one_group() -> None:
    assert grouped(25.0, 64).num_groups == 1
    assert grouped(25.0, 64).divide(["a", "b"]) == [[0, 1]]
    # Twice as many requests take longer than a heartbeat may.
    assert grouped(50.0, 64).num_groups == 2
    # A rate of two groups would not be known.
    assert grouped(6.0, 64).num_groups == grouped(6.0, 10_000).num_groups == 1


def test_groups_are_disjoint_and_take_turns() -> None:
    groups = grouped(100.0, 200)
    assert groups.num_groups >= 4
    first = Counter[int]()
    for _ in range(10 * groups.num_groups):
        parts = groups.divide(NAMES)
        assert sorted(index for part in parts for index in part) == [*range(200)]
        first[parts[0][0]] += 1
    # Each group was the first equally often.
    assert [*first.values()] == [10] * groups.num_groups
    assert min(len(part) for part in groups.divide(NAMES)) >= 200 // groups.num_groups // 2


def test_engines_that_come_and_go_leave_the_others_in_their_groups() -> None:
    groups = grouped(100.0, 200)
    before = members(groups, NAMES)
    after = members(groups, [*NAMES[10:], "new"])
    for name in NAMES[10:]:
        assert before[name] - set(NAMES[:10]) == after[name] - {"new"}
    # At a higher rate further groups take engines, and the others exchange none.
    num_groups = groups.num_groups
    for number in range(2000):
        groups.on_request(200, 5.0 + number / 200)
    assert groups.num_groups > num_groups
    parts = set(members(groups, NAMES).values())
    assert len(parts) == groups.num_groups
    new = [part for part in parts if not any(part <= old for old in before.values())]
    assert len(new) == groups.num_groups - num_groups


class ThreeGroups(SchedulingGroups):
    """Three groups at any rate."""

    def __init__(self) -> None:
        super().__init__()
        self.num_groups = 3

    def on_request(self, num_engines: int, now: float) -> None:
        pass


def test_the_next_group_is_tried_before_the_least_load() -> None:
    policy = AladdinPolicy(Random(0), PlacementRules(), MODEL, ThreeGroups())
    late = OngoingRequest(100, 50, -9.0, slo=SLO)

    def engine(name: str, *ongoing: OngoingRequest) -> EngineSnapshot:
        return EngineSnapshot(name, ongoing=ongoing, num_blocks=3750)

    request = RoutingRequest(100, slo=SLO)
    names = NAMES[:12]
    assert len(ThreeGroups().divide(names)) == 3
    for free in range(12):
        # One engine meets the constraints; that of each other has a request that is late already.
        engines = [engine(each, *([late] if i != free else [])) for i, each in enumerate(names)]
        assert {policy.choose(request, engines) for _ in range(6)} == {names[free]}
        # None does: the one with the least load of all groups.
        engines[free] = engine(names[free], late)
        others = [
            each if i == free else engine(each.name, late, late) for i, each in enumerate(engines)
        ]
        assert {policy.choose(request, others) for _ in range(6)} == {names[free]}


class CountingList(list[EngineSnapshot]):
    """A list that counts the engines which are looked at one by one."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)


def test_a_placement_looks_at_the_engines_of_one_group() -> None:
    groups = SchedulingGroups()
    policy = AladdinPolicy(Random(0), PlacementRules(), MODEL, groups)
    counts: list[int] = []
    chosen = set()
    for number in range(400):
        snapshots = CountingList(
            EngineSnapshot(each, num_blocks=3750, time=number / 100) for each in NAMES
        )
        chosen.add(policy.choose(RoutingRequest(100, slo=SLO), snapshots))
        counts.append(snapshots.num_reads)
    assert counts[0] >= 200
    assert groups.num_groups >= 4
    assert max(counts[-50:]) < 100
    assert len(chosen) > 4
