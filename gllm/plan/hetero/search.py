"""Search for the partition with the most flow: guided local search, and its rivals.

Source: HexGen-2 (arXiv 2502.07903), section 4.3. Swaps of devices alone end in poor partitions, so
groups also merge and split; the first improvement is accepted. After the last one the search goes
on from a randomly changed partition while its budget lasts.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from gllm.plan.budget import SearchBudget
from gllm.plan.hetero.evaluation import EvaluatedPlan, Partition, PlanEvaluator, Score
from gllm.plan.hetero.moves import NeighbourFinder, guided_changes, random_changes

Changes = Callable[[EvaluatedPlan, Random], Iterator[Partition]]
"""Yields the neighbours of a plan in the order in which they are tried."""
MAX_EVALUATIONS = 20_000
"""Partitions that a search compares at most."""
MAX_VAIN_RESTARTS = 24
"""Random restarts without an improvement, one after the other, that end a search."""
MAX_KICKED_CHANGES = 2
"""Most random changes with which the search goes on after a local optimum."""


class SearchStep(NamedTuple):
    """An improvement of the best plan during a search."""

    num_evaluations: int
    flow: float
    """Requests per second."""


class SearchResult(NamedTuple):
    """Best plan of a search, and its counters."""

    first: EvaluatedPlan
    """Plan of the first partition."""
    best: EvaluatedPlan
    steps: list[SearchStep]
    num_evaluations: int
    num_flows: int
    num_kicks: int
    """Restarts from randomly changed partitions."""
    is_complete: bool
    """True if no change of the best partition improves it; False if the budget ended before."""


class LocalSearch:
    """Local search that accepts the first improvement, with random restarts.

    Args:
        evaluator: A new evaluator.
        budget: Time, and partitions that are compared.
        seed: Seed of ties and restarts.
        changes: Neighbours and their order up to the first local optimum, in which also the
            ablations differ.
        restart_changes: Neighbours and their order after restarts.
        max_vain_restarts: Restarts without an improvement, one after the other, that end it.
    """

    def __init__(
        self,
        evaluator: PlanEvaluator,
        budget: SearchBudget,
        seed: int = 0,
        changes: Changes = guided_changes,
        restart_changes: Changes = random_changes,
        max_vain_restarts: int = MAX_VAIN_RESTARTS,
    ) -> None:
        self._evaluator, self._budget = evaluator, budget
        self._changes, self._restart_changes = changes, restart_changes
        self._max_vain_restarts = max_vain_restarts
        self._rng = Random(seed)
        self._steps: list[SearchStep] = []

    def run(self, partition: Partition) -> SearchResult:
        """Return the best plan that is reached from a first partition."""
        first = self._evaluate(partition)
        self._note(first)
        best, is_complete = self._climb(first, self._changes, None)
        num_kicks = num_vain = 0
        while num_vain < self._max_vain_restarts and not self._budget.refusal():
            num_kicks += 1
            plan, _ = self._climb(self._kick(best), self._restart_changes, best.score)
            num_vain += 1
            if plan.score.beats(best.score):
                best, num_vain = plan, 0
        return SearchResult(
            first,
            best,
            self._steps,
            self._evaluator.num_evaluations,
            self._evaluator.num_flows,
            num_kicks,
            is_complete,
        )

    def _climb(
        self, plan: EvaluatedPlan, changes: Changes, known: Score | None
    ) -> tuple[EvaluatedPlan, bool]:
        """Improve a plan as far as possible; the second value is False if the budget ended."""
        while True:
            better = None
            for partition in changes(plan, self._rng):
                if self._budget.refusal():
                    return plan, False
                better = self._evaluator.evaluate_if_better(partition, plan.score)
                self._budget.end_evaluation()
                if better is not None:
                    break
            if better is None:
                return plan, True
            plan = better
            if known is None or plan.score.beats(known):
                self._note(plan)

    def _kick(self, plan: EvaluatedPlan) -> EvaluatedPlan:
        """Return a plan some random changes away."""
        partition = plan.partition
        for _ in range(self._rng.randint(1, MAX_KICKED_CHANGES)):
            partition = self._rng.choice(list(NeighbourFinder(partition).all_changes()))
        return self._evaluate(partition)

    def _evaluate(self, partition: Partition) -> EvaluatedPlan:
        plan = self._evaluator.evaluate(partition)
        self._budget.end_evaluation()
        return plan

    def _note(self, plan: EvaluatedPlan) -> None:
        if not self._steps or plan.score.flow > self._steps[-1].flow:
            self._steps.append(SearchStep(self._evaluator.num_evaluations, plan.score.flow))
