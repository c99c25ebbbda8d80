"""Search for Splitwise's clusters: designs by constraint and objective, and their baselines."""

from dataclasses import dataclass

from gllm.plan.pools.clusters import (
    ClusterPoint,
    SampleSize,
    fluid_rate,
    highest_rate,
    simulate_point,
)
from gllm.plan.pools.design_search import (
    choose_cheapest,
    find_smallest_clusters,
    maximal_designs,
    maximize_throughput,
)
from gllm.plan.pools.planner import START_SHARE, max_machine_counts
from gllm.sim.hardware.machines import (
    ClusterDesign,
    count_affordable,
    machine_pair,
    read_machine_types,
)

POLICY = "vllm"
"""Scheduling policy of prompt and token machines: prompts first, in the order of arrival."""
DESIGNS = ("AA", "HH", "HA", "HHcap")
"""Prompt and token machine: A: DGX-A100, H: DGX-H100, cap: with a power limit."""
BASELINES = {"Baseline-A100": "DGX-A100", "Baseline-H100": "DGX-H100"}
"""Clusters whose machines do both phases."""
NUM_H100 = 40
"""Machines of the paper's Baseline-H100, whose power and cost are the budgets."""


@dataclass(frozen=True)
class SearchTask:
    """Search for the highest rate of a design under a budget."""

    design: str
    """A name of DESIGNS or BASELINES."""
    workload: str
    constraint: str
    """Name of a quantity of gllm.plan.pools.design_search.BUDGETS."""
    scale: int
    """The cluster has this share of the paper's machines: 5 is a fifth."""
    size: SampleSize
    policy: str


@dataclass(frozen=True)
class SearchOutcome:
    """Best cluster of a search."""

    task: SearchTask
    cluster: ClusterDesign
    rate: float
    """Highest rate within the SLOs, requests per second."""
    num_designs: int
    num_simulations: int

    @property
    def full_rate(self) -> float:
        """Return the rate of a cluster of the paper's size, in proportion."""
        return self.rate * self.task.scale


def budget(constraint: str, scale: int) -> float:
    """Return the power or cost of the paper's Baseline-H100, scaled."""
    h100 = read_machine_types()["DGX-H100"]
    return NUM_H100 * (h100.power if constraint == "power" else h100.cost) / scale


def baseline(name: str, constraint: str, scale: int) -> ClusterDesign:
    """Return the cluster of a baseline that a budget admits."""
    machine = read_machine_types()[BASELINES[name]]
    price = machine.power if constraint == "power" else machine.cost
    return ClusterDesign(machine, machine, count_affordable(budget(constraint, scale), price), 0)


def measure_rate(
    design: ClusterDesign, workload: str, size: SampleSize, policy: str
) -> tuple[float, int]:
    """Return the highest rate of a cluster within the SLOs, and the number of simulations."""
    rate = START_SHARE * fluid_rate(design, workload)
    return highest_rate(ClusterPoint(design, workload, rate, size, policy=policy))


def search_design(task: SearchTask) -> SearchOutcome:
    """Return the best cluster of a design, or the rate of a baseline."""
    num_simulations = 0

    def evaluate(design: ClusterDesign) -> float:
        nonlocal num_simulations
        rate, count = measure_rate(design, task.workload, task.size, task.policy)
        num_simulations += count
        return rate

    if task.design in BASELINES:
        cluster = baseline(task.design, task.constraint, task.scale)
        return SearchOutcome(task, cluster, evaluate(cluster), 1, num_simulations)
    limit = budget(task.constraint, task.scale)
    pair = machine_pair(task.design)
    result = maximize_throughput(pair, task.constraint, limit, evaluate)
    return SearchOutcome(task, result.design, result.value, result.num_evaluations, num_simulations)


def fluid_optimum(task: SearchTask) -> ClusterDesign:
    """Return the best cluster without queues, by an exhaustive search."""
    pair = machine_pair(task.design)
    designs = list(maximal_designs(pair, task.constraint, budget(task.constraint, task.scale)))
    return max(designs, key=lambda design: fluid_rate(design, task.workload))


@dataclass(frozen=True)
class BorderTask:
    """Search for the smallest clusters of a design that serve a rate."""

    design: str
    workload: str
    rate: float
    size: SampleSize
    policy: str


@dataclass(frozen=True)
class BorderOutcome:
    """Cheapest clusters of a design that serve a rate."""

    task: BorderTask
    least_power: ClusterDesign
    least_cost: ClusterDesign
    num_simulations: int


def search_border(task: BorderTask) -> BorderOutcome:
    """Return the clusters of least power and cost that serve a rate."""
    pair = machine_pair(task.design)

    def serves(design: ClusterDesign) -> bool:
        if fluid_rate(design, task.workload) < task.rate:
            return False
        point = ClusterPoint(design, task.workload, task.rate, task.size, policy=task.policy)
        return simulate_point(point).is_served

    border, num_evaluations = find_smallest_clusters(
        pair, serves, max_machine_counts(pair, task.rate, task.workload)
    )
    return BorderOutcome(
        task, choose_cheapest(border, "power"), choose_cheapest(border, "cost"), num_evaluations
    )


@dataclass(frozen=True)
class BatchTask:
    """Batch job on a cluster: all requests are there at once."""

    name: str
    cluster: ClusterDesign
    workload: str
    size: SampleSize
    policy: str


def batch_rate(task: BatchTask) -> float:
    """Return the completed requests per second of a batch job."""
    point = ClusterPoint(
        task.cluster, task.workload, 1.0, task.size, is_static=True, policy=task.policy
    )
    return simulate_point(point).requests_per_second


def llama_rate(outcome: SearchOutcome) -> float:
    """Return the highest rate of Llama-2-70B on the best cluster of a search for BLOOM-176B."""
    task, model = outcome.task, "llama-2-70b"
    rate = START_SHARE * fluid_rate(outcome.cluster, task.workload, model)
    point = ClusterPoint(
        outcome.cluster, task.workload, rate, task.size, policy=task.policy, model=model
    )
    return highest_rate(point)[0]
