"""Rivals of the planner: colocated replicas, and equal replicas as DistServe has them."""

from functools import cache
from itertools import product
from typing import NamedTuple

from gllm.plan.hetero.evaluation import EvaluatedPlan, PlanEvaluator, make_partition
from gllm.plan.hetero.replicas import Phase, Replica, ReplicaPlanner
from gllm.plan.nodes import Group

MAX_COLOCATED_DEVICES = 12
"""Largest number of devices of a colocated replica."""


class ColocatedPlan(NamedTuple):
    """Replicas that run both phases."""

    replicas: list[Replica]
    capacity: float
    """Requests per second of all replicas."""


def best_colocated(planner: ReplicaPlanner, max_stages: int | None = None) -> ColocatedPlan:
    """Return the division into colocated replicas with the most capacity, by dynamic programming.

    HexGen (arXiv 2311.11514) searches for it with genes; this is the optimum of that search.

    Args:
        planner: Chooses the layout of each group.
        max_stages: Largest number of pipeline stages per replica; None: no limit.
    """
    devices = planner.cluster.all_devices
    groups = [
        group
        for group in product(*(range(count + 1) for count in devices))
        if 0 < sum(group) <= MAX_COLOCATED_DEVICES
    ]
    found = (_best_mixed(planner, group, max_stages) for group in groups)
    replicas = [each for each in found if each is not None]
    # Groups that serve less than a part of theirs are no choice.
    replicas.sort(key=lambda each: -each.capacity / sum(each.group))
    densities = [replica.capacity / sum(replica.group) for replica in replicas]

    @cache
    def best(left: Group) -> tuple[float, tuple[int, ...]]:
        chosen: tuple[float, tuple[int, ...]] = (0.0, ())
        num_left = sum(left)
        for index, replica in enumerate(replicas):
            if densities[index] * num_left <= chosen[0]:
                # The others serve less per device.
                break
            rest = tuple(x - y for x, y in zip(left, replica.group, strict=True))
            if min(rest) < 0:
                continue
            capacity, others = best(rest)
            if replica.capacity + capacity > chosen[0]:
                chosen = replica.capacity + capacity, (index, *others)
        return chosen

    capacity, indices = best(devices)
    return ColocatedPlan([replicas[index] for index in indices], capacity)


def _best_mixed(planner: ReplicaPlanner, group: Group, max_stages: int | None) -> Replica | None:
    if max_stages is None:
        return planner.best(group, Phase.MIXED)
    candidates = planner.candidates(group, Phase.MIXED)
    short = [candidate for candidate in candidates if len(candidate.stages) <= max_stages]
    return max(short, key=lambda each: each.capacity, default=None)


def best_uniform(planner: ReplicaPlanner) -> EvaluatedPlan:
    """Return the best plan whose replicas of a phase are all alike, on equal devices.

    As DistServe (arXiv 2401.09670) places: a number of devices per replica of each phase, and a
    number of replicas of each.

    Raises:
        ValueError: The cluster has several machines.
    """
    if len(planner.cluster.nodes) != 1:
        raise ValueError("equal replicas need a cluster of one machine: choose hom or hom4")
    (total,) = planner.cluster.all_devices
    evaluator = PlanEvaluator(planner)
    plans = []
    sizes = range(1, total)
    for prefill, decode in product(sizes, sizes):
        for num_prefill in range(1, total // prefill + 1):
            num_decode = (total - num_prefill * prefill) // decode
            if num_decode:
                groups = [(Phase.PREFILL, (prefill,))] * num_prefill
                groups += [(Phase.DECODE, (decode,))] * num_decode
                plans.append(evaluator.evaluate(make_partition(groups)))
    return max(plans, key=lambda plan: plan.score)
