"""Plan of prefill and decode replicas for a model on a cluster of unlike devices."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gllm.plan.hetero.cluster import DeviceCluster
from gllm.plan.hetero.costs import ReplicaCosts, Table1Costs
from gllm.plan.hetero.evaluation import EvaluatedPlan, PlanEvaluator
from gllm.plan.hetero.partition import count_groups, first_partition
from gllm.plan.hetero.replicas import Phase, PipelineCredit, ReplicaPlanner
from gllm.plan.hetero.roofline_costs import RooflineCosts
from gllm.plan.hetero.search import LocalSearch, RefinementBudget, SearchResult
from gllm.plan.hetero.workload import MeanLengths, mean_lengths
from gllm.sim.hardware.shapes import MODELS, ModelShape
from gllm.sim.hardware.stages import look_up

CostsFactory = Callable[[DeviceCluster, ModelShape, MeanLengths], ReplicaCosts]
COSTS: dict[str, CostsFactory] = {"roofline": RooflineCosts, "table1": Table1Costs}
"""Cost models of replicas: the simulator's, and the paper's at peak rates."""


@dataclass(frozen=True)
class PlanProblem:
    """Input of the planner: cluster, model, workload and rules."""

    cluster: DeviceCluster
    model: str
    """A name of MODELS."""
    workload: str
    """A class of HexGen-2, or a workload of the simulator."""
    costs: str = "roofline"
    """A name of COSTS."""
    credit: PipelineCredit = PipelineCredit.PIPELINED
    seed: int = 0
    budget: RefinementBudget = field(default_factory=RefinementBudget)

    @property
    def shape(self) -> ModelShape:
        """Return the shape of the model. Raises ValueError for an unknown one."""
        return look_up("model", self.model, MODELS)

    @property
    def lengths(self) -> MeanLengths:
        """Return the mean lengths. Raises ValueError for an unknown workload."""
        return mean_lengths(self.workload)

    def make_planner(self) -> ReplicaPlanner:
        """Return a new planner of replicas."""
        factory = look_up("costs", self.costs, COSTS)
        costs = factory(self.cluster, self.shape, self.lengths)
        return ReplicaPlanner(self.cluster, self.shape, costs, self.credit)


class HeteroPlan(NamedTuple):
    """Best plan of a search."""

    problem: PlanProblem
    search: SearchResult
    planner: ReplicaPlanner

    @property
    def best(self) -> EvaluatedPlan:
        """Return the replicas and their flow."""
        return self.search.best

    @property
    def tokens_per_second(self) -> float:
        """Return the output tokens per second at the maximum flow."""
        return self.best.score.flow * self.problem.lengths.output


def plan_replicas(problem: PlanProblem, planner: ReplicaPlanner | None = None) -> HeteroPlan:
    """Return the best plan within the budget.

    Args:
        problem: Cluster, model, workload and rules.
        planner: A planner of the same problem, whose results are used again; default: a new one.

    Raises:
        ValueError: A name is unknown, or no two replicas of the model fit the cluster; the message
            names the constraint that binds.
    """
    planner = planner or problem.make_planner()
    check_fit(problem, planner)
    num_groups = count_groups(problem.cluster, problem.shape, problem.lengths)
    first = first_partition(planner, num_groups)
    search = LocalSearch(PlanEvaluator(planner), problem.budget, problem.seed).run(first)
    if not search.best.score.flow:
        raise ValueError(
            f"{problem.model}: no division of the cluster into a prefill and a decode replica was "
            f"found: each needs {_weights_gb(problem):.0f} GB for the weights and the KV cache of "
            "a request; add devices"
        )
    return HeteroPlan(problem, search, planner)


def check_fit(problem: PlanProblem, planner: ReplicaPlanner) -> None:
    """Raise ValueError, which names the binding constraint, if two replicas cannot fit."""
    cluster, shape = problem.cluster, problem.shape
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
    if planner.best(cluster.all_devices, Phase.DECODE) is None:
        raise ValueError(
            f"memory: {problem.model} with {shape.layers} layers and {shape.heads} heads fits no "
            f"cut of all {cluster.num_devices} devices: the weights take {weights:.0f} of "
            f"{memory:.0f} GB, but a request of {problem.lengths.total:.0f} tokens needs KV cache "
            "on every stage: add devices"
        )
    if memory < 2 * weights:
        raise ValueError(
            f"memory: a prefill and a decode replica of {problem.model} hold {2 * weights:.0f} GB "
            f"of weights, the cluster has {memory:.0f} GB: add devices, or serve it colocated on "
            "one engine"
        )


def _weights_gb(problem: PlanProblem) -> float:
    return problem.shape.parameters * problem.shape.bytes_per_weight / 1e9
