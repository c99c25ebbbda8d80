"""Best-first search: pruning never loses the best candidate, and every candidate is counted."""

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.plan.best_first import (
    DOMINATED,
    BestFirstOutcome,
    CandidateBound,
    SearchBudget,
    search_best,
)
from gllm.sim.capacity import INTERRUPTED, SearchEndedError
from tests.support.examples import num_examples

Pair = tuple[float, CandidateBound]

scores = st.integers(0, 12).map(float)
candidates = st.lists(
    st.builds(
        lambda score, slack, expected, is_hopeless: (
            -inf if is_hopeless else score,
            CandidateBound(score + slack, expected, "does not fit" if is_hopeless else ""),
        ),
        scores,
        scores,
        scores,
        st.booleans(),
    ),
    max_size=12,
)


def search(
    pairs: Sequence[Pair], budget: SearchBudget | None = None, batch: int = 1, **options: bool
) -> BestFirstOutcome[tuple[int, float], float]:
    items = [((index, score), bound) for index, (score, bound) in enumerate(pairs)]
    return search_best(
        items,
        lambda chosen: [score for _, score in chosen],
        lambda result: result,
        budget or SearchBudget(),
        batch,
        **options,
    )


@settings(max_examples=num_examples(60, 2000), deadline=None)
@given(candidates, st.integers(1, 3))
def test_pruning_keeps_the_best_of_an_exhaustive_evaluation(pairs: list[Pair], batch: int) -> None:
    outcome = search(pairs, batch=batch)
    exhaustive = search(pairs, is_exhaustive=True)
    assert (outcome.best is None) == (exhaustive.best is None)
    if outcome.best and exhaustive.best:
        assert outcome.best[1] == exhaustive.best[1] == max(score for score, _ in pairs)
    assert len(outcome.evaluated) + outcome.pruned.total() == len(pairs)
    assert not outcome.left_out
    assert DOMINATED not in exhaustive.pruned


@settings(max_examples=num_examples(60, 2000), deadline=None)
@given(candidates, st.integers(0, 4), st.integers(1, 3))
def test_a_budget_leaves_out_only_candidates_that_could_win(
    pairs: list[Pair], most: int, batch: int
) -> None:
    outcome = search(pairs, SearchBudget(max_evaluations=most), batch)
    assert len(outcome.evaluated) <= most + batch - 1
    total = len(outcome.evaluated) + outcome.pruned.total() + outcome.left_out.total()
    assert total == len(pairs)
    best = outcome.best[1] if outcome.best else -inf
    could_win = sum(not bound.reason and bound.score > best for _, bound in pairs)
    assert outcome.left_out.total() == len(outcome.untried) <= could_win
    # Nothing beats the bound, and only what was not tried may beat the best.
    exhaustive = search(pairs, is_exhaustive=True)
    highest = exhaustive.best[1] if exhaustive.best else -inf
    assert highest <= outcome.bound
    assert highest <= max(best, outcome.open_bound)


def test_an_interrupt_leaves_the_best_so_far_and_names_what_was_not_tried() -> None:
    def evaluate(chosen: Sequence[float]) -> list[float]:
        if chosen[0] == 5.0:
            raise KeyboardInterrupt
        return [1.0]

    pairs = [(float(score), CandidateBound(9.0 + score, float(score))) for score in (3, 8, 5)]
    budget = SearchBudget()
    outcome = search_best(pairs, evaluate, lambda result: result, budget)
    assert outcome.best == (8.0, 1.0)
    assert outcome.left_out == {INTERRUPTED: 2}
    assert outcome.untried == [5.0, 3.0]
    assert outcome.open_bound == 14.0
    assert budget.refusal() == INTERRUPTED
    for deadline in (budget.deadline, budget.final_deadline):
        assert deadline is not None
        with pytest.raises(SearchEndedError, match="Ctrl-C"):
            deadline()


class FakeClock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_search_ends_at_the_deadline_of_an_evaluation() -> None:
    clock = FakeClock()
    budget = SearchBudget(10.0, clock=clock, begin=98.0)
    started = []

    def evaluate(chosen: Sequence[int]) -> list[float]:
        started.append(clock.now)
        for _ in range(4):
            clock.now += 1.0
            assert budget.deadline is not None
            budget.deadline()
        return [0.0 for _ in chosen]

    pairs = [(index, CandidateBound(9.0, 1.0)) for index in range(5)]
    outcome = search_best(pairs, evaluate, lambda result: result, budget)
    assert started == [100.0, 104.0]
    assert budget.elapsed_seconds == 10.0
    assert outcome.left_out == {"the budget of 10 s is spent": 4}


def test_a_search_evaluates_in_the_order_of_expected_scores() -> None:
    pairs = [(float(score), CandidateBound(99.0, float(score))) for score in (3, 8, 5)]
    assert [score for (_, score), _ in search(pairs).evaluated] == [8, 5, 3]


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds is -1"):
        SearchBudget(-1.0)
    with pytest.raises(ValueError, match="max_evaluations is -1"):
        SearchBudget(max_evaluations=-1)
