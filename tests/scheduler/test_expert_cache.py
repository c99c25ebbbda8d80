"""Decisions about experts on a device: every chosen one is computed once, where it takes less time,
and the device has those that save most, without exchanging them for ever."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.scheduler.expert_cache import ExpertCache, ExpertCosts, ExpertPlan

DECODE = ExpertCosts(host=1e-3, host_row=1e-5, copy=2e-3, device=1e-4, device_row=1e-6)
"""Of an expert of some 10 MB: 10 GB/s per expert on the host, 20 GB/s of the link after that."""
NUM_EXPERTS = 64

times = st.floats(0, 1e-2)
costs_of = st.builds(ExpertCosts, times, times, times, times, times)
loads = st.lists(
    st.dictionaries(st.integers(0, 7), st.integers(1, 300), min_size=1), min_size=1, max_size=60
)


@given(loads, st.integers(0, 8), costs_of)
def test_a_plan_can_be_carried_out(
    steps: list[dict[int, int]], num_slots: int, costs: ExpertCosts
) -> None:
    """The memory of a device that does what plans say has the expert of each slot."""
    cache, again = ExpertCache(8, num_slots, horizon=5), ExpertCache(8, num_slots, horizon=5)
    memory: dict[int, int] = {}
    for num_rows in steps:
        plan = cache.plan(num_rows, costs)
        assert plan == again.plan(dict(reversed(num_rows.items())), costs), "of no order"
        placed = [*plan.on_host, *dict(plan.resident), *dict(plan.copied)]
        assert sorted(placed) == sorted(num_rows), "each expert once"
        assert all(memory[slot] == expert for expert, slot in plan.resident)
        for expert, slot in plan.copied:
            if slot is not None:
                assert 0 <= slot < num_slots
                memory[slot] = expert
        assert memory == {slot: expert for expert, slot in cache.slots.items()}
        assert len(memory) <= num_slots


@given(loads, st.integers(0, 8), costs_of)
def test_weights_are_moved_only_where_that_pays(
    steps: list[dict[int, int]], num_slots: int, costs: ExpertCosts
) -> None:
    """For one step: if it takes less time than the host; to stay: if uses have saved it before."""
    cache, saved = ExpertCache(8, num_slots, horizon=10**9), Counter[int]()
    for num_rows in steps:
        plan = cache.plan(num_rows, costs)
        for expert, count in num_rows.items():
            saved[expert] += costs.saved_seconds(count)  # type: ignore[assignment]
        for expert, slot in plan.copied:
            count = num_rows[expert]
            moved = costs.copy + costs.device_seconds(count)
            assert moved < costs.host_seconds(count) or slot is not None
            assert slot is None or saved[expert] > costs.copy
        for expert in plan.on_host:
            count = num_rows[expert]
            assert costs.host_seconds(count) <= costs.copy + costs.device_seconds(count)


def serve(
    cache: ExpertCache, weights: list[float], num_steps: int, seed: int, top_k: int = 8
) -> Iterator[ExpertPlan]:
    """Plans of decodes of one token, whose experts are drawn by weights without repetition."""
    draws = random.Random(seed)
    for _ in range(num_steps):
        keys = [draws.random() ** (1 / weight) for weight in weights]
        chosen = sorted(range(len(keys)), key=keys.__getitem__)[-top_k:]
        yield cache.plan(dict.fromkeys(chosen, 1), DECODE)


@pytest.mark.parametrize("num_slots", [8, 32])
def test_equally_likely_experts_are_not_exchanged(num_slots: int) -> None:
    """They are drawn, so that some are used more often for a while."""
    cache = ExpertCache(NUM_EXPERTS, num_slots)
    list(serve(cache, [1.0] * NUM_EXPERTS, 6000, 0))
    assert len(cache.slots) == num_slots
    assert cache.num_exchanges <= 6, "one in a thousand steps, of 8 copies that would be possible"


def test_experts_in_turn_are_not_exchanged() -> None:
    cache = ExpertCache(8, 4)
    for step in range(5000):
        cache.plan({step % 8: 1}, DECODE)
    assert len(cache.slots) == 4
    assert not cache.num_exchanges


def test_the_device_has_the_experts_that_are_used_most() -> None:
    """Those that came first are replaced; then hits are as many as if it had been known."""
    cache = ExpertCache(NUM_EXPERTS, 16)
    list(serve(cache, [1.0] * NUM_EXPERTS, 100, 0))
    assert len(cache.slots) == 16
    weights = [0.3 + 8.0 * (expert % 4 == 0) for expert in range(NUM_EXPERTS)]
    list(serve(cache, weights, 3000, 1))
    favourites = {expert for expert in range(NUM_EXPERTS) if expert % 4 == 0}
    assert set(cache.slots) == favourites
    plans = list(serve(cache, weights, 500, 2))
    hits = sum(len(plan.resident) for plan in plans) / (8 * len(plans))
    assert hits > 0.75


def test_a_changed_load_changes_the_experts() -> None:
    cache = ExpertCache(NUM_EXPERTS, 16)
    for favourite in (0, 1):
        weights = [0.3 + 8.0 * (expert % 4 == favourite) for expert in range(NUM_EXPERTS)]
        list(serve(cache, weights, 4000, favourite))
        assert {expert for expert in cache.slots if expert % 4 == favourite} == set(cache.slots)


def test_many_rows_are_worth_a_copy() -> None:
    """A prefill moves weights that a decode does not."""
    cache = ExpertCache(4, 0)
    assert cache.plan({0: 1, 1: 500}, DECODE) == ExpertPlan((0,), (), ((1, None),))
