"""Maximum flow of requests through prefill replicas, KV transfers and decode replicas."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from gllm.plan.hetero.replicas import Replica, ReplicaPlanner

FLOW_UNIT = 1e-7
"""Requests per second of one unit of flow; capacities are whole numbers, so flows are exact."""
SOURCE, SINK = "source", "sink"


class PlanFlow(NamedTuple):
    """Flow through the replicas of a plan, requests per second."""

    value: float
    prefill: list[float]
    """Through each prefill replica."""
    decode: list[float]
    """Through each decode replica."""
    routes: dict[tuple[int, int], float]
    """From a prefill replica to a decode replica, by their positions; only positive ones."""
    transfers: dict[tuple[int, int], float]
    """Capacity of each of these ways."""

    def shares(self, prefill: int) -> dict[int, float]:
        """Return the share of a prefill replica's requests that each decode replica gets."""
        flows = {d: flow for (p, d), flow in self.routes.items() if p == prefill}
        total = sum(flows.values())
        return {d: flow / total for d, flow in flows.items()} if total else {}


def build_graph(
    prefill: Sequence[Replica], decode: Sequence[Replica], planner: ReplicaPlanner
) -> Any:
    """Return the flow network: source, both ends of each replica, sink.

    Edges from the source and to the sink carry prompts and tokens, which limit nothing.

    Returns:
        A networkx.DiGraph with the attribute `capacity` in FLOW_UNITs on each edge.
    """
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    for p, replica in enumerate(prefill):
        capacity = round(replica.capacity / FLOW_UNIT)
        graph.add_edge(SOURCE, ("prefill-in", p), capacity=capacity)
        graph.add_edge(("prefill-in", p), ("prefill-out", p), capacity=capacity)
    for d, replica in enumerate(decode):
        capacity = round(replica.capacity / FLOW_UNIT)
        graph.add_edge(("decode-in", d), ("decode-out", d), capacity=capacity)
        graph.add_edge(("decode-out", d), SINK, capacity=capacity)
    for p, source in enumerate(prefill):
        for d, target in enumerate(decode):
            capacity = round(1 / planner.kv_seconds(source, target) / FLOW_UNIT)
            graph.add_edge(("prefill-out", p), ("decode-in", d), capacity=capacity)
    return graph


def solve_flow(
    prefill: Sequence[Replica], decode: Sequence[Replica], planner: ReplicaPlanner
) -> PlanFlow:
    """Return the maximum flow, by the preflow-push algorithm."""
    from networkx.algorithms.flow import preflow_push

    graph = build_graph(prefill, decode, planner)
    residual = preflow_push(graph, SOURCE, SINK)
    flows: dict[tuple[int, int], float] = {}
    ways: dict[tuple[int, int], float] = {}
    for p in range(len(prefill)):
        for d in range(len(decode)):
            edge = residual[("prefill-out", p)][("decode-in", d)]
            if edge["flow"] > 0:
                flows[p, d] = edge["flow"] * FLOW_UNIT
                ways[p, d] = edge["capacity"] * FLOW_UNIT

    def through(side: str, index: int) -> float:
        return residual[(f"{side}-in", index)][(f"{side}-out", index)]["flow"] * FLOW_UNIT

    return PlanFlow(
        residual.graph["flow_value"] * FLOW_UNIT,
        [through("prefill", index) for index in range(len(prefill))],
        [through("decode", index) for index in range(len(decode))],
        flows,
        ways,
    )
