"""Value of a partition: its replicas, and the maximum flow of requests through them."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from gllm.plan.hetero.links import (
    LinkBytes,
    LinkDirection,
    RequestTraffic,
    machines_of,
    make_traffic,
)
from gllm.plan.hetero.replicas import Phase, Replica, ReplicaPlanner
from gllm.plan.nodes import DeviceCluster, Group

FLOW_TOLERANCE = 1e-9
"""Share of the whole flow below which the flow of a route is none."""
LOCAL_PREFERENCE = 1e-7
"""Share of a request by which the flow prefers a KV transfer within a machine to one between two:
it decides between equal flows only."""


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
    links: dict[LinkDirection, float]
    """Utilization, 0 to 1, of each link that the flow uses."""

    def shares(self, prefill: int) -> dict[int, float]:
        """Return the share of a prefill replica's requests that each decode replica receives."""
        flows = {d: flow for (p, d), flow in self.routes.items() if p == prefill}
        total = sum(flows.values())
        return {d: flow / total for d, flow in flows.items()} if total else {}


def replica_name(phase: Phase, index: int) -> str:
    """Return the name of a replica of a plan: p0, p1, ... for prefill, d0, ... for decode."""
    return f"{phase[0]}{index}"


def pair_traffic(
    prefill: Sequence[Replica], decode: Sequence[Replica], traffic: RequestTraffic
) -> dict[tuple[int, int], LinkBytes]:
    """Return the bytes that a request sends over each link, by the pair of replicas that serve it.

    Args:
        prefill: Prefill replicas.
        decode: Decode replicas.
        traffic: Bytes of activations and KV transfers.
    """
    names = [replica_name(Phase.PREFILL, p) for p in range(len(prefill))]
    others = [replica_name(Phase.DECODE, d) for d in range(len(decode))]
    own = [traffic.activations(*pair) for pair in zip(names, prefill, strict=True)]
    own_decode = [traffic.activations(*pair) for pair in zip(others, decode, strict=True)]
    loads = {}
    for p, source in enumerate(prefill):
        for d, target in enumerate(decode):
            shares = traffic.kv_shares(names[p], source, others[d], target)
            links = {link: share * traffic.kv_bytes for link, share in shares.items()}
            for link, size in (*own[p].items(), *own_decode[d].items()):
                links[link] = links.get(link, 0.0) + size
            loads[p, d] = links
    return loads


def solve_flow(
    prefill: Sequence[Replica], decode: Sequence[Replica], traffic: RequestTraffic
) -> PlanFlow:
    """Return the maximum flow of requests through replicas and the links that they share.

    A linear program: one variable for each pair of replicas; the capacity of each replica and the
    bandwidth of each link bound the sum of the flows through it.

    Args:
        prefill: Prefill replicas.
        decode: Decode replicas.
        traffic: Bytes of activations and KV transfers of a request.
    """
    import numpy
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    loads = pair_traffic(prefill, decode, traffic)
    links = {link: i for i, link in enumerate(dict.fromkeys(chain(*loads.values())))}
    num_replicas = len(prefill) + len(decode)
    rows, columns, values, gains = [], [], [], []
    for column, ((p, d), sizes) in enumerate(loads.items()):
        rows += [p, len(prefill) + d]
        values += [1 / prefill[p].capacity, 1 / decode[d].capacity]
        rows += [num_replicas + links[link] for link in sizes]
        values += [size / link.bandwidth for link, size in sizes.items()]
        columns += [column] * (2 + len(sizes))
        is_remote = any(link.is_of_machine for link in sizes)
        gains.append(1 - LOCAL_PREFERENCE * is_remote)
    shape = num_replicas + len(links), len(loads)
    matrix = csr_array((values, (rows, columns)), shape=shape)
    ones = numpy.ones(shape[0])
    solution = linprog(-numpy.array(gains), A_ub=matrix, b_ub=ones, method="highs-ds")
    if solution.x is None:
        raise RuntimeError(f"HiGHS did not solve the flow of requests: {solution.message}")
    flows = numpy.where(solution.x > FLOW_TOLERANCE * solution.x.sum(), solution.x, 0.0)
    used = matrix @ flows
    scale = 1 / max(1.0, used.max())  # HiGHS exceeds bounds by its tolerance.
    flows, used = flows * scale, used * scale
    return PlanFlow(
        float(flows.sum()),
        [float(used[p] * replica.capacity) for p, replica in enumerate(prefill)],
        [float(used[len(prefill) + d] * replica.capacity) for d, replica in enumerate(decode)],
        {pair: float(flow) for pair, flow in zip(loads, flows, strict=True) if flow},
        {
            link: float(used[num_replicas + i])
            for link, i in links.items()
            if used[num_replicas + i]
        },
    )


def bound_flow(
    prefill: Sequence[Replica], decode: Sequence[Replica], traffic: RequestTraffic
) -> float:
    """Return an upper bound of the maximum flow, from capacities and the links of machines alone.

    The prefill replicas of a machine cannot send more requests away than its way out carries KV
    caches; the others have to be decoded on replicas with a stage on it. Likewise for decode.
    """
    bounds = []
    for side, others in ((prefill, decode), (decode, prefill)):
        near: dict[int, float] = {}
        for replica in others:
            for node in machines_of(replica):
                near[node] = near.get(node, 0.0) + replica.capacity
        total, own = 0.0, dict[int, float]()
        for replica in side:
            nodes = machines_of(replica)
            if len(nodes) > 1:
                total += replica.capacity
            else:
                (node,) = nodes
                own[node] = own.get(node, 0.0) + replica.capacity
        for node, capacity in own.items():
            remote = traffic.network_bandwidth(node) / traffic.kv_bytes
            total += min(capacity, near.get(node, 0.0) + remote)
        bounds.append(total)
    return min(bounds)


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
    machine_classes: tuple[int, ...] = ()
    """Equal numbers for machines that are interchangeable; empty: all are different."""

    @property
    def _phases(self) -> list[tuple[Phase, list[Replica], list[float]]]:
        """Replicas of each phase and their flows."""
        prefill = Phase.PREFILL, self.prefill, self.flow.prefill
        return [prefill, (Phase.DECODE, self.decode, self.flow.decode)]

    def engines(self) -> dict[str, tuple[Replica, float]]:
        """Return each replica and its flow by name: p0, p1, ... for prefill, d0, ... for decode."""
        return {
            replica_name(phase, index): pair
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


def classify_machines(cluster: DeviceCluster) -> tuple[int, ...]:
    """Return a number for each machine, equal for machines that are interchangeable."""
    special = {node for pair in cluster.between for node in pair}
    classes: dict[object, int] = {}
    keys = (
        (node.device, node.num_devices, node.inner_link, index if index in special else -1)
        for index, node in enumerate(cluster.nodes)
    )
    return tuple(classes.setdefault(key, len(classes)) for key in keys)


class PlanEvaluator:
    """Computes and caches the score of divisions of the devices into prefill and decode groups.

    The score of such a partition is mainly the maximum flow of requests through its replicas.

    Args:
        planner: Chooses the pipeline stages of each group of devices.
    """

    def __init__(self, planner: ReplicaPlanner) -> None:
        self.planner = planner
        self.traffic = make_traffic(planner)
        """Bytes of a request on the links of the cluster."""
        self.machine_classes = classify_machines(planner.cluster)
        """Equal numbers for machines that are interchangeable."""
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

        Capacities and links of machines bound the flow, so most flows need not be computed.
        """
        self.num_evaluations += 1
        sides = self._replicas(partition)
        bound = self._bound(*sides)
        if not bound._replace(flow=bound.scarce).beats(best):
            return None
        if not bound._replace(flow=bound_flow(*sides, self.traffic)).beats(best):
            return None
        plan = self._evaluate(partition)
        return plan if plan.score.beats(best) else None

    def _evaluate(self, partition: Partition) -> EvaluatedPlan:
        if partition not in self._plans:
            prefill, decode = self._replicas(partition)
            bound = self._bound(prefill, decode)
            if prefill and decode:
                self.num_flows += 1
                flow = solve_flow(prefill, decode, self.traffic)
            else:
                flow = PlanFlow(0.0, [0.0] * len(prefill), [0.0] * len(decode), {}, {})
            score = bound._replace(flow=flow.value)
            self._plans[partition] = EvaluatedPlan(
                partition, prefill, decode, flow, score, self.machine_classes
            )
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
