"""Genetic search for a partition: the rival of the guided search.

As the genetic baseline of HexGen-2 (arXiv 2502.07903, section 5.4): chromosomes are partitions,
mutations move, swap, flip, merge and split groups, and a crossover takes whole groups of both
parents.
"""

from random import Random

from gllm.plan.best_first import SearchBudget
from gllm.plan.hetero.evaluation import EvaluatedPlan, Partition, PlanEvaluator, make_partition
from gllm.plan.hetero.search import NeighbourFinder, SearchResult, SearchStep

POPULATION = 16
MUTATION_SHARE = 0.5
"""Probability of a mutation after a crossover; an unchanged child mutates always."""


class GeneticSearch:
    """Steady-state genetic search.

    Args:
        evaluator: A new evaluator.
        budget: Limits.
        seed: Seed of all random choices.
    """

    def __init__(self, evaluator: PlanEvaluator, budget: SearchBudget, seed: int = 0) -> None:
        self._evaluator, self._budget = evaluator, budget
        self._rng = Random(seed)

    def run(self, partition: Partition) -> SearchResult:
        """Return the best plan that is found from mutations of a first partition."""
        first = best = self._evaluator.evaluate(partition)
        self._budget.end_evaluation()
        steps = [SearchStep(1, first.score.flow)]
        population = [first]
        while not self._budget.refusal():
            if len(population) < POPULATION:
                child = self._mutate(partition)
            else:
                child = self._breed(population)
            plan = self._evaluator.evaluate(child)
            self._budget.end_evaluation()
            if plan.score.beats(best.score):
                best = plan
                steps.append(SearchStep(self._evaluator.num_evaluations, plan.score.flow))
            self._insert(population, plan)
        return SearchResult(
            first,
            best,
            steps,
            self._evaluator.num_evaluations,
            self._evaluator.num_flows,
            0,
            False,
        )

    def _insert(self, population: list[EvaluatedPlan], plan: EvaluatedPlan) -> None:
        population.append(plan)
        population.sort(key=lambda each: each.score, reverse=True)
        del population[POPULATION:]

    def _breed(self, population: list[EvaluatedPlan]) -> Partition:
        parents = [max(self._rng.sample(population, 2), key=lambda each: each.score).partition]
        parents += [self._rng.choice(population).partition]
        child = self._cross(*parents)
        if child in parents or self._rng.random() < MUTATION_SHARE:
            child = self._mutate(child)
        return child

    def _cross(self, mother: Partition, father: Partition) -> Partition:
        """Return groups of the mother, then those of the father that fit the other devices."""
        devices = [sum(counts) for counts in zip(*(group for _, group in mother), strict=True)]
        kept = [each for each in mother if self._rng.random() < 0.5]
        for each in (*father, *mother):
            used = [sum(counts) for counts in zip(*(group for _, group in kept), strict=True)]
            left = [x - y for x, y in zip(devices, used or [0] * len(devices), strict=True)]
            if all(x <= y for x, y in zip(each[1], left, strict=True)):
                kept.append(each)
        used = [sum(counts) for counts in zip(*(group for _, group in kept), strict=True)]
        left = [x - y for x, y in zip(devices, used, strict=True)]
        phase = self._rng.choice(mother)[0]
        return make_partition([*kept, (phase, tuple(left))])

    def _mutate(self, partition: Partition) -> Partition:
        return self._rng.choice(list(NeighbourFinder(partition).all_changes()))
