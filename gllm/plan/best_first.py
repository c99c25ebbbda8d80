"""Best-first search over candidates with closed-form bounds.

A bound states the score that a candidate cannot exceed and the score that is expected of it.
Candidates are evaluated in the order of expected scores. One whose bound does not exceed the best
score so far is left out: it cannot win. Nothing else but the budget leaves a candidate out, so
without a limit of the budget the result is that of an exhaustive evaluation, if the bounds hold.
The clock of the budget is an argument.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic, NamedTuple, TypeVar

from gllm.sim.capacity import INTERRUPTED, SearchEndedError, SimulationDeadline


class SearchBudget:
    """Time limit and limit of the number of evaluations of a planner's search.

    The search asks before each evaluation whether it may continue. A running evaluation is cut off
    at the `deadline`.

    Args:
        seconds: Time limit in seconds; None: no limit.
        max_evaluations: Largest number of candidates that may be evaluated; None: no limit.
        clock: Returns the current time in seconds; must be monotonic, and the same in all
            processes.
        reserve: Share of the time, 0..1, that is left at the deadline for work after the search.
        begin: Time of the clock from which the limit counts, such as the start of a command; None:
            now.

    Raises:
        ValueError: A limit is below 0.
    """

    def __init__(
        self,
        seconds: float | None = None,
        max_evaluations: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        reserve: float = 0.0,
        begin: float | None = None,
    ) -> None:
        for name, limit in (("seconds", seconds), ("max_evaluations", max_evaluations)):
            if limit is not None and limit < 0:
                raise ValueError(f"{name} is {limit}: give a limit of at least 0")
        self._clock = clock
        self._begin = clock() if begin is None else begin
        self._seconds = seconds
        self._search_seconds = inf if seconds is None else seconds * (1 - reserve)
        self._max_evaluations = max_evaluations
        self._stop_reason = ""
        self.num_evaluations = 0

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the time limit began."""
        return self._clock() - self._begin

    def stop(self, reason: str) -> None:
        """Allow no further evaluation, nor work after the search, for instance after Ctrl-C."""
        self._stop_reason = reason

    def spent_reason(self) -> str:
        """Return the reason why the time is over; empty if some is left."""
        if self._stop_reason or self.elapsed_seconds <= self._search_seconds:
            return self._stop_reason
        return self._spent_reason

    def refusal(self) -> str:
        """Return the reason why no further evaluation is allowed; empty if one is."""
        if self._stop_reason:
            return self._stop_reason
        limit = self._max_evaluations
        if limit is not None and self.num_evaluations >= limit:
            return f"beyond the best {limit} by closed forms"
        return self.spent_reason()

    @property
    def _spent_reason(self) -> str:
        return f"the budget of {self._seconds:g} s is spent"

    @property
    def deadline(self) -> SimulationDeadline | None:
        """Deadline at which running evaluations are cut off; None without a time limit."""
        return self._deadline(self._search_seconds)

    @property
    def final_deadline(self) -> SimulationDeadline | None:
        """Deadline of work after the search, for which `reserve` is; None without a time limit."""
        return self._deadline(inf if self._seconds is None else self._seconds)

    def _deadline(self, seconds: float) -> SimulationDeadline | None:
        if self._stop_reason:
            return SimulationDeadline(-inf, self._stop_reason, self._clock)
        if seconds == inf:
            return None
        return SimulationDeadline(self._begin + seconds, self._spent_reason, self._clock)

    def make_check(self, on_tick: Callable[[], None] | None) -> Callable[[], None]:
        """Return a function for simulations of this process to call now and then.

        It raises SearchEndedError after the present deadline; before, it calls `on_tick`.
        """
        deadline = self.deadline

        def check() -> None:
            if deadline is not None:
                deadline()
            if on_tick is not None:
                on_tick()

        return check

    def for_one_evaluation(self) -> "SearchBudget":
        """Return a budget with the same deadline for the steps of one evaluation.

        It can be sent to another process if its clock can.
        """
        budget = SearchBudget(self._seconds, clock=self._clock, begin=self._begin)
        budget._search_seconds = self._search_seconds
        budget._stop_reason = self._stop_reason
        return budget

    def end_evaluation(self, count: int = 1) -> None:
        """Count evaluations that have just ended."""
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
    untried: list[Candidate] = field(default_factory=list)
    """Candidates that `left_out` counts, the most promising first."""
    bound: float = -inf
    """Score that no candidate can exceed: the highest of their bounds."""
    open_bound: float = -inf
    """The same of the candidates of `left_out`; -inf without such."""


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
            raise SearchEndedError at the deadline of the budget. An interrupt (KeyboardInterrupt)
            ends the search, and stops the budget.
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
            outcome.bound = max(outcome.bound, bound.score)
    while queue:
        chosen: list[tuple[Candidate, CandidateBound]] = []
        while queue and len(chosen) < batch:
            pair = queue.popleft()
            if pair[1].score > best_score or is_exhaustive:
                chosen.append(pair)
            else:
                outcome.pruned[DOMINATED] += 1
        if not chosen:
            break
        if not (reason := budget.refusal()):
            try:
                results = evaluate([candidate for candidate, _ in chosen])
                budget.end_evaluation(len(chosen))
            except SearchEndedError as error:
                reason = str(error)
            except KeyboardInterrupt:
                reason = INTERRUPTED
                budget.stop(reason)
        if reason:
            still_open = [
                *chosen,
                *(pair for pair in queue if is_exhaustive or pair[1].score > best_score),
            ]
            outcome.left_out[reason] += len(still_open)
            outcome.untried = [candidate for candidate, _ in still_open]
            outcome.open_bound = max(bound.score for _, bound in still_open)
            outcome.pruned[DOMINATED] += len(chosen) + len(queue) - len(still_open)
            break
        for (candidate, _), result in zip(chosen, results, strict=True):
            outcome.evaluated.append((candidate, result))
            if score(result) > best_score:
                best_score, outcome.best = score(result), (candidate, result)
    outcome.pruned = +outcome.pruned
    return outcome
