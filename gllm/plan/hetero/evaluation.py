"""Value of a partition: its replicas, and the maximum flow of requests through them."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gllm.plan.hetero.replicas import Phase, Replica, ReplicaPlanner
from gllm.plan.nodes import Group

FLOW_UNIT = 1e-7
"""Requests per second of one unit of flow; capacities are whole numbers, so flows are exact."""
SOURCE, SINK = 0, 1
"""Vertices of the flow network; numbers, so that equal problems have equal flows: the algorithm
iterates over sets, and the hashes of strings differ between processes."""


class PlanFlow(NamedTuple):
    """Maximum flow of requests through prefill and decode replicas, in requests per second."""

    value: float
    """Total flow."""
    prefill: list[float]
    """Flow through each prefill replica."""
    decode: list[float]
    """Flow through each decode replica."""
    routes: dict[tuple[int, int], float]
    """Flow by (prefill replica, decode replica), as list indices; only positive flows."""
    transfers: dict[tuple[int, int], float]
    """Capacity of the KV transfers between the same pairs of replicas."""

    def shares(self, prefill: int) -> dict[int, float]:
        """Return the share of a prefill replica's requests that each decode replica receives."""
        flows = {d: flow for (p, d), flow in self.routes.items() if p == prefill}
        total = sum(flows.values())
        return {d: flow / total for d, flow in flows.items()} if total else {}


def _vertex(side: str, index: int) -> int:
    """Return the number of an end of a replica: its way in or out."""
    sides = "prefill-in", "prefill-out", "decode-in", "decode-out"
    return 2 + sides.index(side) + len(sides) * index


def build_graph(
    prefill: Sequence[Replica], decode: Sequence[Replica], planner: ReplicaPlanner
) -> Any:
    """Return the flow network of a plan: source, prefill replicas, decode replicas, sink.

    Capacities are requests per second: of each replica, and of the KV transfers between each pair.
    The edges to the source and the sink do not limit the flow further.

    Args:
        prefill: Prefill replicas.
        decode: Decode replicas.
        planner: Predicts the seconds of a KV transfer.

    Returns:
        A networkx.DiGraph with the attribute `capacity` in FLOW_UNITs on each edge.
    """
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    for p, replica in enumerate(prefill):
        capacity = round(replica.capacity / FLOW_UNIT)
        graph.add_edge(SOURCE, _vertex("prefill-in", p), capacity=capacity)
        graph.add_edge(_vertex("prefill-in", p), _vertex("prefill-out", p), capacity=capacity)
    for d, replica in enumerate(decode):
        capacity = round(replica.capacity / FLOW_UNIT)
        graph.add_edge(_vertex("decode-in", d), _vertex("decode-out", d), capacity=capacity)
        graph.add_edge(_vertex("decode-out", d), SINK, capacity=capacity)
    for p, source in enumerate(prefill):
        for d, target in enumerate(decode):
            capacity = round(1 / planner.kv_seconds(source, target) / FLOW_UNIT)
            graph.add_edge(_vertex("prefill-out", p), _vertex("decode-in", d), capacity=capacity)
    return graph


def solve_flow(
    prefill: Sequence[Replica], decode: Sequence[Replica], planner: ReplicaPlanner
) -> PlanFlow:
    """Return the maximum flow of requests through replicas, by the preflow-push algorithm.

    Args:
        prefill: Prefill replicas.
        decode: Decode replicas.
        planner: Predicts the seconds of a KV transfer.
    """
    from networkx.algorithms.flow import preflow_push

    graph = build_graph(prefill, decode, planner)
    residual = preflow_push(graph, SOURCE, SINK)
    flows: dict[tuple[int, int], float] = {}
    ways: dict[tuple[int, int], float] = {}
    for p in range(len(prefill)):
        for d in range(len(decode)):
            edge = residual[_vertex("prefill-out", p)][_vertex("decode-in", d)]
            if edge["flow"] > 0:
                flows[p, d] = edge["flow"] * FLOW_UNIT
                ways[p, d] = edge["capacity"] * FLOW_UNIT

    def through(side: str, index: int) -> float:
        edge = residual[_vertex(f"{side}-in", index)][_vertex(f"{side}-out", index)]
        return float(edge["flow"] * FLOW_UNIT)

    return PlanFlow(
        residual.graph["flow_value"] * FLOW_UNIT,
        [through("prefill", index) for index in range(len(prefill))],
        [through("decode", index) for index in range(len(decode))],
        flows,
        ways,
    )


TypedGroup = tuple[Phase, Group]
"""A group of devices and its phase."""
Partition = tuple[TypedGroup, ...]
"""All groups, sorted, so that equal partitions are equal values."""


def make_partition(groups: Iterable[TypedGroup]) -> Partition:
    """Return a partition of a cluster's devices as a sorted tuple of non-empty groups.

    Args:
        groups: Phase (prefill or decode) of each group, and its number of devices on each node.
    """
    return tuple(sorted(group for group in groups if any(group[1])))


class GroupLoad(NamedTuple):
    """Predicted request rate and capacity of one group of devices, in requests per second."""

    phase: Phase
    group: Group
    capacity: float
    """Requests per second; 0 if the model does not fit."""
    flow: float
    """Requests per second through the group at the maximum flow."""

    @property
    def is_saturated(self) -> bool:
        """True if the request rate is at the capacity."""
        return self.capacity > 0 and self.flow >= self.capacity * (1 - 1e-6)

    @property
    def slack(self) -> float:
        """Unused share of the capacity; 1 for a group whose devices do not fit the model."""
        return 1 - self.flow / self.capacity if self.capacity else 1.0


class Score(NamedTuple):
    """Score of a partition of the devices into prefill and decode groups; larger is better.

    Fields are compared in their order.
    """

    flow: float
    """Maximum flow in requests per second."""
    scarce: float
    """Capacity of the phase (prefill or decode) with the smaller capacity."""
    ample: float
    """Capacity of the phase with the larger capacity."""

    def beats(self, other: "Score") -> bool:
        """Return True if this score is larger than another by more than rounding errors."""
        for ours, theirs in zip(self, other, strict=True):
            if abs(ours - theirs) > 1e-6 * max(abs(ours), abs(theirs)):
                return ours > theirs
        return False


class EvaluatedPlan(NamedTuple):
    """A partition of the devices into prefill and decode replicas, with its maximum flow and score.

    The flow is the request rate that the replicas serve together.
    """

    partition: Partition
    prefill: list[Replica]
    decode: list[Replica]
    flow: PlanFlow
    score: Score

    @property
    def _phases(self) -> list[tuple[Phase, list[Replica], list[float]]]:
        """Replicas of each phase and their flows."""
        prefill = Phase.PREFILL, self.prefill, self.flow.prefill
        return [prefill, (Phase.DECODE, self.decode, self.flow.decode)]

    def engines(self) -> dict[str, tuple[Replica, float]]:
        """Return each replica and its flow by name: p0, p1, ... for prefill, d0, ... for decode."""
        return {
            f"{phase[0]}{index}": pair
            for phase, replicas, flows in self._phases
            for index, pair in enumerate(zip(replicas, flows, strict=True))
        }

    def routes(self) -> dict[str, dict[str, float]]:
        """Return the flow from each prefill engine to each decode engine, requests per second."""
        routes: dict[str, dict[str, float]] = {}
        for (p, d), flow in sorted(self.flow.routes.items()):
            routes.setdefault(f"p{p}", {})[f"d{d}"] = flow
        return routes

    def loads(self) -> list[GroupLoad]:
        """Return the load of each group, in the order of the partition."""
        known: dict[TypedGroup, list[GroupLoad]] = {}
        for phase, replicas, flows in self._phases:
            for replica, flow in zip(replicas, flows, strict=True):
                load = GroupLoad(phase, replica.group, replica.capacity, flow)
                known.setdefault((phase, replica.group), []).append(load)
        return [
            known[group].pop() if known.get(group) else GroupLoad(*group, 0.0, 0.0)
            for group in self.partition
        ]


class PlanEvaluator:
    """Computes and caches the score of divisions of the devices into prefill and decode groups.

    The score of such a partition is mainly the maximum flow of requests through its replicas.

    Args:
        planner: Chooses the pipeline stages of each group of devices.
    """

    def __init__(self, planner: ReplicaPlanner) -> None:
        self.planner = planner
        self.num_evaluations = 0
        """Partitions that were compared, those included whose bound is too low for a flow."""
        self.num_flows = 0
        """Maximum flows that were computed."""
        self._plans: dict[Partition, EvaluatedPlan] = {}

    def evaluate(self, partition: Partition) -> EvaluatedPlan:
        """Return the replicas of a partition and their maximum flow."""
        self.num_evaluations += 1
        return self._evaluate(partition)

    def evaluate_if_better(self, partition: Partition, best: Score) -> EvaluatedPlan | None:
        """Return the plan of a partition if its score beats another one; otherwise None.

        The smaller capacity of both phases bounds the flow, so most flows need not be computed.
        """
        self.num_evaluations += 1
        bound = self._bound(*self._replicas(partition))
        if not Score(bound.scarce, bound.scarce, bound.ample).beats(best):
            return None
        plan = self._evaluate(partition)
        return plan if plan.score.beats(best) else None

    def _evaluate(self, partition: Partition) -> EvaluatedPlan:
        if partition not in self._plans:
            prefill, decode = self._replicas(partition)
            bound = self._bound(prefill, decode)
            if prefill and decode:
                self.num_flows += 1
                flow = solve_flow(prefill, decode, self.planner)
            else:
                flow = PlanFlow(0.0, [0.0] * len(prefill), [0.0] * len(decode), {}, {})
            score = bound._replace(flow=flow.value)
            self._plans[partition] = EvaluatedPlan(partition, prefill, decode, flow, score)
        return self._plans[partition]

    def _replicas(self, partition: Partition) -> tuple[list[Replica], list[Replica]]:
        sides: dict[Phase, list[Replica]] = {Phase.PREFILL: [], Phase.DECODE: []}
        for phase, group in partition:
            replica = self.planner.best(group, phase)
            if replica is not None:
                sides[phase].append(replica)
        return sides[Phase.PREFILL], sides[Phase.DECODE]

    def _bound(self, prefill: list[Replica], decode: list[Replica]) -> Score:
        capacities = [sum(replica.capacity for replica in side) for side in (prefill, decode)]
        return Score(0.0, min(capacities), max(capacities))
