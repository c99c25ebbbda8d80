"""Plan of prefill and decode replicas for a model on a cluster of unlike devices."""

from collections.abc import Callable
from typing import NamedTuple

from gllm.plan.best_first import SearchBudget
from gllm.plan.hetero.costs import ReplicaCosts, RooflineCosts, Table1Costs
from gllm.plan.hetero.evaluation import EvaluatedPlan, PlanEvaluator
from gllm.plan.hetero.partition import count_groups, first_partition
from gllm.plan.hetero.replicas import Phase, PipelineCapacityRule, ReplicaPlanner
from gllm.plan.hetero.search import (
    MAX_EVALUATIONS,
    MAX_VAIN_RESTARTS,
    LocalSearch,
    SearchResult,
)
from gllm.plan.hetero.workload import MeanLengths, mean_lengths
from gllm.plan.layout import PlannedEngine, lay_out
from gllm.plan.nodes import DeviceCluster
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ExpectedFigures, RouterPlan, ServingPlan
from gllm.routing.disaggregation.flow import format_routes
from gllm.sim.hardware.shapes import ModelShape
from gllm.sim.hardware.stages import look_up

CostsFactory = Callable[[DeviceCluster, ModelShape, MeanLengths], ReplicaCosts]
COSTS: dict[str, CostsFactory] = {"roofline": RooflineCosts, "table1": Table1Costs}
"""Cost models of replicas: the simulator's, and the paper's at peak rates."""


def make_planner(
    problem: ServiceProblem,
    costs: str = "roofline",
    rule: PipelineCapacityRule = PipelineCapacityRule.PIPELINED,
) -> ReplicaPlanner:
    """Return an object that chooses the pipeline stages of each replica for a planning problem.

    Args:
        problem: Model, workload and cluster.
        costs: Cost model: a name of COSTS.
        rule: Formula for the capacity of a pipeline.

    Raises:
        ValueError: A name is unknown.
    """
    factory = look_up("costs", costs, COSTS)
    lengths = mean_lengths(problem.workload)
    return ReplicaPlanner(
        problem.cluster, problem.shape, factory(problem.cluster, problem.shape, lengths), rule
    )


class HeteroPlan(NamedTuple):
    """Result of `plan_replicas`: the problem, the search over partitions, the replica planner."""

    problem: ServiceProblem
    search: SearchResult
    planner: ReplicaPlanner

    @property
    def best(self) -> EvaluatedPlan:
        """Replicas of the best partition, and the flow of requests through them."""
        return self.search.best

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second at the maximum flow."""
        return self.best.score.flow * mean_lengths(self.problem.workload).output


def plan_replicas(
    problem: ServiceProblem,
    planner: ReplicaPlanner | None = None,
    budget: SearchBudget | None = None,
    max_vain_restarts: int = MAX_VAIN_RESTARTS,
) -> HeteroPlan:
    """Search for the division of unlike devices into prefill and decode replicas (HexGen-2).

    The plan with the highest maximum flow of requests wins.

    Args:
        problem: Model, workload and cluster.
        planner: Replica planner of the same problem, whose cached results are reused; default: a
            new one.
        budget: Time and evaluation limit of the search; default: MAX_EVALUATIONS partitions.
        max_vain_restarts: Number of consecutive restarts without improvement after which the search
            ends.

    Raises:
        ValueError: A name is unknown, or two replicas of the model do not fit the cluster; the
            message names the failed constraint.
    """
    planner = planner or make_planner(problem)
    check_fit(problem, planner)
    num_groups = count_groups(problem.cluster, problem.shape, mean_lengths(problem.workload))
    first = first_partition(planner, num_groups)
    budget = budget or SearchBudget(max_evaluations=MAX_EVALUATIONS)
    search = LocalSearch(
        PlanEvaluator(planner), budget, problem.seed, max_vain_restarts=max_vain_restarts
    ).run(first)
    if not search.best.score.flow:
        raise ValueError(
            f"{problem.model}: no division of the cluster into a prefill and a decode replica was "
            f"found: each needs {_weights_gb(problem):.0f} GB for the weights and the KV cache of "
            "a request; add devices"
        )
    return HeteroPlan(problem, search, planner)


def check_fit(problem: ServiceProblem, planner: ReplicaPlanner) -> None:
    """Raise ValueError if the cluster cannot hold a prefill and a decode replica of the model.

    The message names the failed constraint.
    """
    cluster, shape = problem.cluster, problem.shape
    memory = cluster.memory(cluster.all_devices) / 1e9
    weights, lengths = _weights_gb(problem), mean_lengths(problem.workload)
    if memory < weights:
        raise ValueError(
            f"memory: the weights of {problem.model} are {weights:.0f} GB, the cluster's "
            f"{cluster.num_devices} devices have {memory:.0f} GB: add devices or choose another "
            "model"
        )
    if cluster.num_devices < 2:
        raise ValueError("devices: the cluster has 1, prefill and decode need one each: add one")
    if planner.best(cluster.all_devices, Phase.DECODE) is None:
        raise ValueError(
            f"memory: {problem.model} with {shape.layers} layers and {shape.heads} heads fits no "
            f"cut of all {cluster.num_devices} devices: the weights take {weights:.0f} of "
            f"{memory:.0f} GB, but a request of {lengths.total:.0f} tokens needs KV cache on every "
            "stage: add devices"
        )
    if memory < 2 * weights:
        raise ValueError(
            f"memory: a prefill and a decode replica of {problem.model} hold {2 * weights:.0f} GB "
            f"of weights, the cluster has {memory:.0f} GB: add devices, or serve it colocated on "
            "one engine"
        )


def _weights_gb(problem: ServiceProblem) -> float:
    return problem.shape.parameters * problem.shape.bytes_per_weight / 1e9


def make_serving_plan(plan: HeteroPlan, command: str) -> ServingPlan:
    """Convert the result of a search into a serving plan that `gllm up` starts.

    Args:
        plan: Result of the search. Replicas without flow are left out.
        command: Command line that repeats the search, for the plan file.
    """
    routes, flow = plan.best.routes(), plan.best.score.flow
    engines = [
        PlannedEngine(
            name,
            replica.stages,
            str(replica.phase),
            {"preset": "flow"}
            | ({"max_num_seqs": replica.batch} if replica.phase is Phase.DECODE else {}),
        )
        for name, (replica, engine_flow) in plan.best.engines().items()
        if engine_flow > 0
    ]
    return lay_out(
        plan.problem,
        plan.problem.cluster,
        engines,
        RouterPlan("", preset="flow", flags={"routes": format_routes(routes)}),
        ExpectedFigures(command, flow, capacity=flow),
        {
            source: {target: share / sum(targets.values()) for target, share in targets.items()}
            for source, targets in routes.items()
        },
    )
