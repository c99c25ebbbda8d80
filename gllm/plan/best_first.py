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

from gllm.sim.capacity import SearchEndedError, SimulationDeadline


class SearchBudget:
    """Time limit and limit of the number of evaluations of a planner's search.

    The search asks before each evaluation whether it may continue. An evaluation is assumed to take
    as long as the longest one so far, so that the search ends within the time limit. One that takes
    longer is cut off at the `deadline`.

    Args:
        seconds: Time limit in seconds from the creation of the object; None: no limit.
        max_evaluations: Largest number of candidates that may be evaluated; None: no limit.
        clock: Returns the current time in seconds; must be monotonic, and the same in all
            processes.
        reserve: Share of the time, 0..1, that is left at the deadline for work after the search.

    Raises:
        ValueError: A limit is below 0.
    """

    def __init__(
        self,
        seconds: float | None = None,
        max_evaluations: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        reserve: float = 0.0,
    ) -> None:
        for name, limit in (("seconds", seconds), ("max_evaluations", max_evaluations)):
            if limit is not None and limit < 0:
                raise ValueError(f"{name} is {limit}: give a limit of at least 0")
        self._clock = clock
        self._begin = clock()
        self._seconds = seconds
        self._search_seconds = inf if seconds is None else seconds * (1 - reserve)
        self._max_evaluations = max_evaluations
        self._longest = 0.0
        self._last = self._begin
        self.num_evaluations = 0

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the budget was created."""
        return self._clock() - self._begin

    def refusal(self) -> str:
        """Return the reason why no further evaluation is allowed; empty if one is."""
        limit = self._max_evaluations
        if limit is not None and self.num_evaluations >= limit:
            return f"beyond the best {limit} by closed forms"
        if (
            self._seconds is not None
            and self.elapsed_seconds + self._longest > self._search_seconds
        ):
            return self._spent_reason
        return ""

    @property
    def _spent_reason(self) -> str:
        return f"the budget of {self._seconds:g} s is spent"

    @property
    def deadline(self) -> SimulationDeadline | None:
        """Deadline at which running evaluations are cut off; None without a time limit."""
        if self._seconds is None:
            return None
        end = self._begin + self._search_seconds
        return SimulationDeadline(end, self._spent_reason, self._clock)

    @property
    def final_deadline(self) -> SimulationDeadline | None:
        """Deadline of work after the search, for which `reserve` is; None without a time limit."""
        if self._seconds is None:
            return None
        return SimulationDeadline(self._begin + self._seconds, self._spent_reason, self._clock)

    def for_one_evaluation(self) -> "SearchBudget":
        """Return a budget with the same deadline for the steps of one evaluation.

        It can be sent to another process if its clock can.
        """
        budget = SearchBudget(self._seconds, clock=self._clock)
        budget._begin, budget._search_seconds = self._begin, self._search_seconds
        return budget

    def end_evaluation(self) -> None:
        """Count an evaluation that has just ended, and measure its duration.

        It is assumed to have begun when the previous one ended, or when the budget was created.
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
    """Upper bound and estimate of a candidate's score, by formulas instead of simulation.

    A higher score is better.
    """

    score: float
    """Upper bound of the candidate's score."""
    expected: float
    """Estimate of the score."""
    reason: str = ""
    """Reason why the candidate cannot be used at all, such as too little memory; else empty."""


@dataclass
class BestFirstOutcome(Generic[Candidate, Result]):
    """Result of `search_best`: best candidate, evaluated candidates, and counts of skipped ones."""

    evaluated: list[tuple[Candidate, Result]] = field(default_factory=list)
    """Evaluated candidates and their results, in the order of evaluation."""
    best: tuple[Candidate, Result] | None = None
    """First candidate with the highest score; None if none of them has a score above -inf."""
    pruned: Counter[str] = field(default_factory=Counter)
    """Number of skipped candidates that cannot beat the best one, by reason."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of candidates that might be better but exceed the search budget, by reason."""


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
    """Find the candidate with the highest score by branch and bound.

    Candidates are evaluated (usually simulated) in descending order of their estimated scores. A
    candidate whose upper bound is not above the best score so far is skipped.

    Args:
        candidates: Candidates with their bounds; candidates with equal estimates keep this order.
        evaluate: Evaluates several candidates and returns their results in the same order. It may
            raise SearchEndedError at the deadline of the budget.
        score: Returns the score of a result; -inf: the candidate cannot be chosen.
        budget: Time and evaluation limit; checked before each batch of candidates.
        batch: Number of candidates per call of `evaluate`.
        is_exhaustive: Also evaluate candidates whose bound is too low, except those whose bound has
            a `reason`.
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
        try:
            with budget.evaluation(len(chosen)):
                pairs = list(zip(chosen, evaluate(chosen), strict=True))
        except SearchEndedError as error:
            num_open = sum(is_exhaustive or bound.score > best_score for _, bound in queue)
            outcome.left_out[str(error)] += len(chosen) + num_open
            outcome.pruned[DOMINATED] += len(queue) - num_open
            break
        outcome.evaluated += pairs
        for pair in pairs:
            if score(pair[1]) > best_score:
                best_score, outcome.best = score(pair[1]), pair
    outcome.pruned = +outcome.pruned
    return outcome
