"""Value of a partition: its replicas, and the maximum flow through them."""

from collections.abc import Iterable
from typing import NamedTuple

from gllm.plan.hetero.cluster import Group
from gllm.plan.hetero.flow import PlanFlow, solve_flow
from gllm.plan.hetero.replicas import Phase, Replica, ReplicaPlanner

TypedGroup = tuple[Phase, Group]
"""A group of devices and its phase."""
Partition = tuple[TypedGroup, ...]
"""All groups, sorted, so that equal partitions are equal values."""


def make_partition(groups: Iterable[TypedGroup]) -> Partition:
    """Return a partition without its empty groups, in canonical order."""
    return tuple(sorted(each for each in groups if any(each[1])))


class GroupLoad(NamedTuple):
    """Flow through one group."""

    phase: Phase
    group: Group
    capacity: float
    """Requests per second; 0 if the model does not fit."""
    flow: float

    @property
    def is_saturated(self) -> bool:
        """Return True for a bottleneck."""
        return self.capacity > 0 and self.flow >= self.capacity * (1 - 1e-6)

    @property
    def slack(self) -> float:
        """Return the unused share of the capacity; 1 for a group that serves nothing."""
        return 1 - self.flow / self.capacity if self.capacity else 1.0


class Score(NamedTuple):
    """Value of a partition; larger is better, in the order of the fields."""

    flow: float
    """Requests per second."""
    scarce: float
    """Capacity of the phase with less of it."""
    ample: float
    """Capacity of the other phase."""

    def beats(self, other: "Score") -> bool:
        """Return True if a field is larger by more than rounding, and no earlier one smaller."""
        for ours, theirs in zip(self, other, strict=True):
            if abs(ours - theirs) > 1e-6 * max(abs(ours), abs(theirs)):
                return ours > theirs
        return False


class EvaluatedPlan(NamedTuple):
    """A partition with its replicas and their flow."""

    partition: Partition
    prefill: list[Replica]
    decode: list[Replica]
    flow: PlanFlow
    score: Score

    def loads(self) -> list[GroupLoad]:
        """Return the load of each group, in the order of the partition."""
        known: dict[TypedGroup, list[GroupLoad]] = {}
        for phase, replicas, flows in (
            (Phase.PREFILL, self.prefill, self.flow.prefill),
            (Phase.DECODE, self.decode, self.flow.decode),
        ):
            for replica, flow in zip(replicas, flows, strict=True):
                load = GroupLoad(phase, replica.group, replica.capacity, flow)
                known.setdefault((phase, replica.group), []).append(load)
        return [
            known[each].pop() if known.get(each) else GroupLoad(*each, 0.0, 0.0)
            for each in self.partition
        ]


class PlanEvaluator:
    """Evaluates partitions and counts what it does.

    Args:
        planner: Chooses the layout of each group.
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
        """Return a plan that beats a score; None if it does not.

        A flow is at most the capacity of each phase, so most partitions need no flow.
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
        capacities = [sum(each.capacity for each in side) for side in (prefill, decode)]
        return Score(0.0, min(capacities), max(capacities))
