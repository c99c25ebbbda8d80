"""Best-first search over candidates with closed-form bounds.

A bound states the score that a candidate cannot exceed and the score that is expected of it.
Candidates are evaluated in the order of expected scores. One whose bound does not exceed the best
score so far is left out: it cannot win. Nothing else but the budget leaves a candidate out, so
without a limit of the budget the result is that of an exhaustive evaluation, if the bounds hold.
The clock of the budget is an argument.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Generic, NamedTuple, TypeVar


class SearchBudget:
    """Limit of the time and of the number of evaluations of a search.

    A search asks before each evaluation, so that it ends in time: an evaluation is expected to take
    as long as the longest one before it.

    Args:
        seconds: Time from now on; None: no limit.
        max_evaluations: None: no limit.
        clock: Seconds of any clock that does not go back.

    Raises:
        ValueError: A limit is below 0.
    """

    def __init__(
        self,
        seconds: float | None = None,
        max_evaluations: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, limit in (("seconds", seconds), ("max_evaluations", max_evaluations)):
            if limit is not None and limit < 0:
                raise ValueError(f"{name} is {limit}: give a limit of at least 0")
        self._clock = clock
        self._begin = clock()
        self._seconds = seconds
        self._max_evaluations = max_evaluations
        self._longest = 0.0
        self._last = self._begin
        self.num_evaluations = 0

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the budget was created."""
        return self._clock() - self._begin

    def refusal(self) -> str:
        """Return the limit that a further evaluation would exceed; empty within the budget."""
        limit = self._max_evaluations
        if limit is not None and self.num_evaluations >= limit:
            return f"beyond the best {limit} by closed forms"
        if self._seconds is not None and self.elapsed_seconds + self._longest > self._seconds:
            return f"the budget of {self._seconds:g} s is spent"
        return ""

    def end_evaluation(self) -> None:
        """Count an evaluation that has just ended.

        It began when the previous evaluation ended, or when the budget was created.
        """
        now = self._clock()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        self.num_evaluations += 1

    @contextmanager
    def evaluation(self, count: int = 1) -> Iterator[None]:
        """Count evaluations and measure their time, as a context manager.

        Args:
            count: Number of evaluations in the block.
        """
        begin = self._clock()
        yield
        self._longest = max(self._longest, self._clock() - begin)
        self.num_evaluations += count


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
