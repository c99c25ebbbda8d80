"""Flows against another algorithm, and what every flow keeps (H2)."""

from random import Random

import pytest
from networkx.algorithms.flow import edmonds_karp

from gllm.plan.hetero.evaluation import FLOW_UNIT, SINK, SOURCE, build_graph, solve_flow
from gllm.plan.hetero.replicas import Phase, Replica


class Transfers:
    """Stands for the planner: random times of transfers."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._seconds: dict[tuple[int, int], float] = {}

    def kv_seconds(self, prefill: Replica, decode: Replica) -> float:
        key = id(prefill), id(decode)
        return self._seconds.setdefault(key, 10 ** self._rng.uniform(-2, 2))


def replicas(phase: Phase, rng: Random) -> list[Replica]:
    return [
        Replica((1,), phase, (), 1.0, 10 ** rng.uniform(-1, 1.5), 1)
        for _ in range(rng.randint(1, 7))
    ]


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_flow_is_that_of_another_algorithm(first: int) -> None:
    for seed in range(first, first + 50):
        rng = Random(seed)
        prefill, decode = replicas(Phase.PREFILL, rng), replicas(Phase.DECODE, rng)
        planner = Transfers(rng)
        flow = solve_flow(prefill, decode, planner)  # type: ignore[arg-type]
        graph = build_graph(prefill, decode, planner)  # type: ignore[arg-type]
        other = edmonds_karp(graph, SOURCE, SINK).graph["flow_value"]
        assert flow.value == pytest.approx(other * FLOW_UNIT)
        check_conservation(flow, prefill, decode, planner)
        # Flows are those of every process: hashes of numbers do not depend on it.
        assert all(isinstance(vertex, int) for vertex in graph)


def check_conservation(flow, prefill, decode, planner) -> None:
    """Nothing is lost between the replicas, and nothing exceeds its capacity."""
    for p, replica in enumerate(prefill):
        sent = sum(value for (source, _), value in flow.routes.items() if source == p)
        assert sent == pytest.approx(flow.prefill[p])
        assert flow.prefill[p] <= replica.capacity + FLOW_UNIT
        assert sum(flow.shares(p).values()) == pytest.approx(1 if sent else 0)
    for d, replica in enumerate(decode):
        received = sum(value for (_, target), value in flow.routes.items() if target == d)
        assert received == pytest.approx(flow.decode[d])
        assert flow.decode[d] <= replica.capacity + FLOW_UNIT
    for (p, d), value in flow.routes.items():
        assert value <= 1 / planner.kv_seconds(prefill[p], decode[d]) + FLOW_UNIT
    assert sum(flow.decode) == pytest.approx(flow.value)
