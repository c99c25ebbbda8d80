"""Best-first search over candidates with closed-form bounds.

A bound states the score that a candidate cannot exceed and the score that is expected of it.
Candidates are evaluated in the order of expected scores. One whose bound does not exceed the best
score so far is left out: it cannot win. Nothing else but the budget leaves a candidate out, so
without a limit of the budget the result is that of an exhaustive evaluation, if the bounds hold.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic, NamedTuple, TypeVar

from gllm.plan.budget import SearchBudget

Candidate = TypeVar("Candidate")
Result = TypeVar("Result")


class CandidateBound(NamedTuple):
    """Closed-form figures of a candidate; a higher score is better."""

    score: float
    """The candidate's score is not above it."""
    expected: float
    """Estimate of the score."""
    reason: str = ""
    """Reason why the candidate is hopeless; empty: it is not."""


@dataclass
class BestFirstOutcome(Generic[Candidate, Result]):
    """Result of a search: the best candidate, and the reasons why others were not evaluated."""

    evaluated: list[tuple[Candidate, Result]] = field(default_factory=list)
    """In the order of evaluation."""
    best: tuple[Candidate, Result] | None = None
    """First candidate with the highest score; None if none of them has a score above -inf."""
    pruned: Counter[str] = field(default_factory=Counter)
    """Number of candidates that cannot win, by reason."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of candidates that could still win, by reason."""


DOMINATED = "bound is below the best candidate"
"""Reason of a candidate that cannot win."""


def search_best(
    candidates: Sequence[tuple[Candidate, CandidateBound]],
    evaluate: Callable[[Sequence[Candidate]], Sequence[Result]],
    score: Callable[[Result], float],
    budget: SearchBudget,
    batch: int = 1,
    is_exhaustive: bool = False,
) -> BestFirstOutcome[Candidate, Result]:
    """Evaluate the candidates that can still win, in the order of their estimates.

    Args:
        candidates: Candidates with their bounds; equal scores keep this order.
        evaluate: Returns the results of some candidates, in their order.
        score: Score of a result; -inf: it cannot be chosen.
        budget: Asked before each batch.
        batch: Number of candidates that are evaluated together.
        is_exhaustive: Evaluate candidates that cannot win as well, but not the hopeless ones.
    """
    outcome: BestFirstOutcome[Candidate, Result] = BestFirstOutcome()
    best_score = -inf
    queue: deque[tuple[Candidate, CandidateBound]] = deque()
    for candidate, bound in sorted(candidates, key=lambda candidate: -candidate[1].expected):
        if bound.reason:
            outcome.pruned[bound.reason] += 1
        else:
            queue.append((candidate, bound))
    while queue:
        chosen: list[Candidate] = []
        while queue and len(chosen) < batch:
            candidate, bound = queue.popleft()
            if bound.score > best_score or is_exhaustive:
                chosen.append(candidate)
            else:
                outcome.pruned[DOMINATED] += 1
        if not chosen:
            break
        if reason := budget.refusal():
            num_open = sum(is_exhaustive or bound.score > best_score for _, bound in queue)
            outcome.left_out[reason] += len(chosen) + num_open
            outcome.pruned[DOMINATED] += len(queue) - num_open
            break
        with budget.evaluation(len(chosen)):
            pairs = list(zip(chosen, evaluate(chosen), strict=True))
        outcome.evaluated += pairs
        for pair in pairs:
            if score(pair[1]) > best_score:
                best_score, outcome.best = score(pair[1]), pair
    outcome.pruned = +outcome.pruned
    return outcome
