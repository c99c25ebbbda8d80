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
    credit: PipelineCapacityRule = PipelineCapacityRule.PIPELINED,
) -> ReplicaPlanner:
    """Return the planner that chooses the layout of each replica of a problem.

    Args:
        problem: Model, workload and cluster.
        costs: A name of COSTS.
        credit: Rule of the capacities.

    Raises:
        ValueError: A name is unknown.
    """
    factory = look_up("costs", costs, COSTS)
    lengths = mean_lengths(problem.workload)
    return ReplicaPlanner(
        problem.cluster, problem.shape, factory(problem.cluster, problem.shape, lengths), credit
    )


class HeteroPlan(NamedTuple):
    """Best plan of a search over partitions of the devices."""

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
    """Search for the partition of the devices into replicas that serves the most requests.

    Args:
        problem: Model, workload and cluster.
        planner: A planner of the same problem, whose results are used again; default: a new one.
        budget: Of the search; default: MAX_EVALUATIONS.
        max_vain_restarts: Restarts without an improvement that end the search.

    Raises:
        ValueError: A name is unknown, or no two replicas of the model fit the cluster; the message
            names the constraint that binds.
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
    """Raise ValueError, which names the constraint, if the cluster cannot hold two replicas."""
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
    """Return the serving plan of the replicas that get requests.

    Args:
        plan: The replicas. Those that get no flow are left out.
        command: Command line that repeats the plan.
    """
    routes, flow = plan.best.routes(), plan.best.score.flow
    engines = [
        PlannedEngine(
            name,
            replica.stages,
            str(replica.phase),
            {"preset": "flow"}
            | ({"max_num_seqs": replica.batch} if replica.phase is Phase.DECODE else {}),
            {"kv-transfer": True},
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
