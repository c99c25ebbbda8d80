"""When another cut of the layers is proposed, and which one."""

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.recovery.balance import BalanceLimits, BetterPartition, Rebalancer
from gllm.recovery.partition import StageCosts, StageMemory, partition_layers, slowest_cost
from tests.support.examples import num_examples

LIMITS = BalanceLimits()
COSTS = StageCosts((1.0,) * 24, head=4.0)
"""Costs in which only the ratios are right: a step takes a thousandth of them."""


class Stages:
    """Stages that compute steps, and report totals every half second."""

    def __init__(
        self,
        rebalancer: Rebalancer,
        cut: Sequence[range],
        slowness: Sequence[float],
        noise: float = 0.0,
        steps_per_second: float = 40.0,
    ) -> None:
        self.rebalancer = rebalancer
        self.slowness = list(slowness)
        self.now = 1000.0
        self.proposals: list[tuple[float, BetterPartition]] = []
        self._noise, self._steps_per_second = noise, steps_per_second
        self._random = Random(3)
        self.begin(cut)

    def begin(self, cut: Sequence[range]) -> None:
        self.cut = list(cut)
        self.totals = [(0, 0.0)] * len(self.cut)
        self.rebalancer.begin(self.cut)

    def run(
        self, seconds: float, takes: bool = False, speed: Callable[[], None] | None = None
    ) -> None:
        """Let time pass; `takes`: begin an epoch with each proposal."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            if speed is not None:
                speed()
            for stage, part in enumerate(self.cut):
                num_steps, busy = self.totals[stage]
                step = self.slowness[stage] * COSTS.cost_of(part.start, part.stop) / 1000
                count = round(self._steps_per_second / 2)
                busy += sum(
                    step * (1 + self._random.uniform(-self._noise, self._noise))
                    for _ in range(count)
                )
                self.totals[stage] = num_steps + count, busy
                better = self.rebalancer.on_totals(stage, *self.totals[stage], self.now)
                if better is not None:
                    self.proposals.append((self.now, better))
                    if takes:
                        self.begin(better.layers)
                        break


def best_cut(slowness: Sequence[float]) -> list[range]:
    return partition_layers([COSTS.scale(factor) for factor in slowness])


@settings(max_examples=num_examples(6, 300), deadline=None)
@given(st.lists(st.floats(0.5, 4.0), min_size=2, max_size=5))
def test_the_best_cut_is_proposed_once_if_it_gains_enough(slowness: list[float]) -> None:
    """Whatever the speeds are: the cut is exact, and after it there is peace."""
    even = best_cut([1.0] * len(slowness))
    costs = [COSTS.scale(factor) for factor in slowness]
    best = best_cut(slowness)
    gain = slowest_cost(costs, even) / slowest_cost(costs, best) - 1
    stages = Stages(Rebalancer([COSTS] * len(slowness)), even, slowness)
    stages.run(600.0, takes=True)
    if abs(gain - LIMITS.min_gain) < 1e-6:
        return
    assert len(stages.proposals) == (gain > LIMITS.min_gain)
    if stages.proposals:
        ((when, better),) = stages.proposals
        assert slowest_cost(costs, better.layers) == pytest.approx(slowest_cost(costs, best))
        assert better.gain == pytest.approx(gain)
        assert when - 1000.0 <= LIMITS.window_seconds * (LIMITS.num_windows + 1) + 1.0


def test_balanced_stages_with_noise_are_left_alone() -> None:
    stages = Stages(Rebalancer([COSTS] * 3), best_cut([1.0] * 3), [1.0, 1.1, 0.95], noise=0.5)
    stages.run(3600.0)
    assert not stages.proposals


def test_a_short_disturbance_costs_no_pause() -> None:
    stages = Stages(Rebalancer([COSTS] * 2), best_cut([1.0, 1.0]), [1.0, 1.0])
    for _ in range(10):
        stages.slowness[1] = 3.0
        stages.run(LIMITS.window_seconds * (LIMITS.num_windows - 1))
        stages.slowness[1] = 1.0
        stages.run(30.0)
    assert not stages.proposals
    stages.slowness[1] = 3.0
    stages.run(LIMITS.window_seconds * (LIMITS.num_windows + 2))
    assert len(stages.proposals) == 1


def test_few_steps_take_longer_windows() -> None:
    stages = Stages(Rebalancer([COSTS] * 2), best_cut([1.0, 1.0]), [1.0, 2.0], steps_per_second=2.0)
    windows = LIMITS.num_windows * LIMITS.min_steps / 2.0
    stages.run(windows - 2.0)
    assert not stages.proposals
    stages.run(5.0)
    assert len(stages.proposals) == 1


def test_the_first_steps_do_not_count() -> None:
    """Kernels are compiled and measured in them."""
    rebalancer = Rebalancer([COSTS] * 2)
    stages = Stages(rebalancer, best_cut([1.0, 1.0]), [1.0, 1.0])
    stages.totals[1] = 2, 60.0
    stages.run(60.0)
    assert not stages.proposals


def test_speeds_that_change_all_the_time_cost_fewer_and_fewer_pauses() -> None:
    stages = Stages(Rebalancer([COSTS] * 2), best_cut([1.0, 1.0]), [1.0, 1.0])

    def swap() -> None:
        is_swapped = int(stages.now / 25.0) % 2
        stages.slowness = [3.0, 1.0] if is_swapped else [1.0, 3.0]

    stages.run(4 * 3600.0, takes=True, speed=swap)
    # The pauses double from a minute to an hour.
    assert 4 <= len(stages.proposals) <= 12


def test_the_memory_of_stages_limits_the_cut() -> None:
    needs = StageCosts((10.0,) * 24)
    memory = [StageMemory(needs, 140.0), StageMemory(needs)]
    stages = Stages(Rebalancer([COSTS] * 2, memory), best_cut([1.0, 1.0]), [1.0, 8.0])
    stages.run(60.0)
    assert stages.proposals == []
    roomy = [StageMemory(needs, 160.0), StageMemory(needs)]
    stages = Stages(Rebalancer([COSTS] * 2, roomy), best_cut([1.0, 1.0]), [1.0, 2.0])
    stages.run(60.0)
    ((_, better),) = stages.proposals
    assert better.layers == (range(16), range(16, 24))


def test_reports_of_unknown_stages_are_ignored() -> None:
    rebalancer = Rebalancer([COSTS] * 2)
    assert rebalancer.on_totals(0, 10, 1.0, 0.0) is None
    rebalancer.begin(best_cut([1.0, 1.0]))
    assert rebalancer.on_totals(2, 10, 1.0, 0.0) is None
