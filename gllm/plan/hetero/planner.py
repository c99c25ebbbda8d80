"""Plan of prefill and decode replicas for a model on a cluster of unlike devices."""

from collections.abc import Callable
from typing import NamedTuple

from gllm.plan.hetero.bound import CostsFactory
from gllm.plan.hetero.copies import ClusterSearch
from gllm.plan.hetero.costs import RooflineCosts, Table1Costs
from gllm.plan.hetero.evaluation import EvaluatedPlan
from gllm.plan.hetero.replicas import PipelineCapacityRule, ReplicaPlanner, max_model_len_of
from gllm.plan.hetero.search import MAX_VAIN_RESTARTS, PlanBudget, SearchResult
from gllm.plan.hetero.workload import mean_lengths
from gllm.plan.layout import PlannedEngine, lay_out
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ExpectedFigures, RouterPlan, ServingPlan
from gllm.routing.disaggregation.flow import format_routes
from gllm.sim.hardware.stages import look_up

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
    lengths = mean_lengths(problem.workload, problem.max_request_tokens)
    return ReplicaPlanner(
        problem.cluster, problem.shape, factory(problem.cluster, problem.shape, lengths), rule
    )


class HeteroPlan(NamedTuple):
    """Result of `plan_replicas`: the problem, the search over partitions, the replica planner."""

    problem: ServiceProblem
    search: SearchResult
    planner: ReplicaPlanner
    num_parts: int = 0
    """Parts of the cluster that were searched before it, for copies of their plans."""

    @property
    def best(self) -> EvaluatedPlan:
        """Replicas of the best partition, and the flow of requests through them."""
        return self.search.best

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second at the maximum flow."""
        return self.best.score.flow * self.planner.costs.lengths.output


def plan_replicas(
    problem: ServiceProblem,
    planner: ReplicaPlanner | None = None,
    budget: PlanBudget | None = None,
    max_vain_restarts: int = MAX_VAIN_RESTARTS,
    on_better: Callable[[EvaluatedPlan], None] = lambda plan: None,
) -> HeteroPlan:
    """Search for the division of unlike devices into prefill and decode replicas (HexGen-2).

    The plan with the highest maximum flow of requests wins.

    Args:
        problem: Model, workload and cluster.
        planner: Replica planner of the same problem, whose cached results are reused; default: a
            new one.
        budget: Time and evaluation limit of the search; default: no limit.
        max_vain_restarts: Number of consecutive restarts without improvement after which the search
            ends.
        on_better: Called with each plan that serves more than all plans before.

    Raises:
        ValueError: A name is unknown, or two replicas of the model do not fit the cluster; the
            message names the failed constraint.
    """
    planner = planner or make_planner(problem)
    check_fit(problem)
    cluster_search = ClusterSearch(
        planner, budget or PlanBudget(), problem.seed, max_vain_restarts, on_better
    )
    search = cluster_search.run()
    if search is None or not search.best.score.flow:
        shape, lengths = problem.shape, planner.costs.lengths
        raise ValueError(
            f"memory: no division of the {problem.cluster.num_devices} devices into a prefill and "
            f"a decode replica of {problem.model} was found: each needs {_weights_gb(problem):.0f} "
            f"GB for the weights and, on every stage, the KV cache of the longest request, "
            f"{lengths.longest} tokens; a replica has at most {shape.layers} stages and a stage "
            f"a divisor of {shape.heads} heads as ranks: add devices"
        )
    return HeteroPlan(problem, search, planner, cluster_search.num_parts)


def check_fit(problem: ServiceProblem) -> None:
    """Raise ValueError if the cluster is too small for a prefill and a decode replica of the model.

    The message names the failed constraint.
    """
    cluster = problem.cluster
    memory = cluster.memory(cluster.all_devices) / 1e9
    weights = _weights_gb(problem)
    if memory < weights:
        raise ValueError(
            f"memory: the weights of {problem.model} are {weights:.0f} GB, the cluster's "
            f"{cluster.num_devices} devices have {memory:.0f} GB: add devices or choose another "
            "model"
        )
    if cluster.num_devices < 2:
        raise ValueError("devices: the cluster has 1, prefill and decode need one each: add one")
    if memory < 2 * weights:
        raise ValueError(
            f"memory: a prefill and a decode replica of {problem.model} hold {2 * weights:.0f} GB "
            f"of weights, the cluster has {memory:.0f} GB: add devices, or serve it colocated on "
            "one engine"
        )


def _weights_gb(problem: ServiceProblem) -> float:
    return problem.shape.parameters * problem.shape.bytes_per_weight / 1e9


def make_serving_plan(plan: HeteroPlan, expected: ExpectedFigures) -> ServingPlan:
    """Convert the result of a search into a serving plan that `gllm up` starts.

    Args:
        plan: Result of the search. Replicas without flow are left out.
        expected: Figures of the plan, and the command line that repeats the search.
    """
    routes = plan.best.routes()
    used = {name: replica for name, (replica, flow) in plan.best.engines().items() if flow > 0}
    length = max_model_len_of(plan.planner, list(used.values()))
    engines = [
        PlannedEngine(
            name, replica.stages, str(replica.phase), replica.options, max_model_len=length
        )
        for name, replica in used.items()
    ]
    return lay_out(
        plan.problem,
        plan.problem.cluster,
        engines,
        RouterPlan("", preset="flow", flags={"routes": format_routes(routes)}),
        expected,
        {
            source: {target: share / sum(targets.values()) for target, share in targets.items()}
            for source, targets in routes.items()
        },
    )
