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


def max_flow(edges: dict[tuple[str, str], float], source: str, sink: str) -> float:
    """Return the maximum flow of a network by shortest augmenting paths (Edmonds and Karp).

    Args:
        edges: Capacity by (from, to).
        source: Vertex where the flow begins.
        sink: Vertex where it ends.
    """
    residual = dict(edges)
    residual.update({(b, a): residual.get((b, a), 0.0) for a, b in edges})
    neighbours: dict[str, list[str]] = {}
    for a, b in residual:
        neighbours.setdefault(a, []).append(b)
    total = 0.0
    while True:
        before, queue = {source: ""}, [source]
        for vertex in queue:
            for other in neighbours.get(vertex, []):
                if other not in before and residual[vertex, other] > 1e-12:
                    before[other] = vertex
                    queue.append(other)
        if sink not in before:
            return total
        path, vertex = [], sink
        while vertex != source:
            path.append((before[vertex], vertex))
            vertex = before[vertex]
        pushed = min(residual[edge] for edge in path)
        for a, b in path:
            residual[a, b] -= pushed
            residual[b, a] += pushed
        total += pushed
