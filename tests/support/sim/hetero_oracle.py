"""Exhaustive search over all partitions of a small cluster: the yardstick of the planner."""

from collections.abc import Iterator
from itertools import product

from gllm.plan.hetero.evaluation import Partition, PlanEvaluator, TypedGroup, make_partition
from gllm.plan.hetero.replicas import Phase
from gllm.plan.nodes import Group


def all_partitions(devices: Group) -> Iterator[Partition]:
    """Yield every partition of the devices into groups with phases once."""
    options: list[TypedGroup] = [
        (phase, group)
        for phase in (Phase.PREFILL, Phase.DECODE)
        for group in product(*(range(count + 1) for count in devices))
        if any(group)
    ]
    options.sort()

    def extend(left: Group, first: int) -> Iterator[list[TypedGroup]]:
        if not any(left):
            yield []
            return
        for index in range(first, len(options)):
            _, group = options[index]
            rest = tuple(x - y for x, y in zip(left, group, strict=True))
            if min(rest) >= 0:
                for tail in extend(rest, index):
                    yield [options[index], *tail]

    for groups in extend(devices, 0):
        yield make_partition(groups)


def best_flow(evaluator: PlanEvaluator, devices: Group) -> float:
    """Return the largest flow of all partitions, requests per second."""
    best = evaluator.evaluate(make_partition([(Phase.PREFILL, devices)]))
    for partition in all_partitions(devices):
        best = evaluator.evaluate_if_better(partition, best.score) or best
    return best.score.flow
