"""Searches of the `vidur` experiment: designs, capacities and costs of a wrong configuration."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from gllm.options.slo import parse_slo
from gllm.plan.best_first import BestFirstOutcome, SearchBudget
from gllm.plan.capacity import PLAN_RULES
from gllm.plan.prices import PRICE_TABLES
from gllm.plan.problem import ServiceProblem
from gllm.plan.search.designs import DesignSpace, EngineDesign, parse_policies
from gllm.plan.search.objectives import AssessedDesign
from gllm.plan.search.planner import DesignPlanner, DesignTrial, simulate_design
from gllm.sim.options import SimulationConfig

MODELS = ("llama-2-7b", "internlm-20b", "llama-2-70b", "qwen-72b")
WORKLOADS = ("chat-1m", "arxiv-4k", "bwb-4k")
MAX_TOKENS = 4096
"""Longest request of the workloads."""
PAPER_SLO = "ttft:p90=2,tbt:p99=0.2"
MAX_GPUS = 16
SPACE = DesignSpace(
    ("A100-80G", "H100"),
    (1, 2, 4),
    (1, 2, 4),
    parse_policies("vllm,orca+:4096,sarathi:512,sarathi:1024,sarathi:2048"),
    (32, 64, 128, 256, 512),
)
"""Vidur's space."""
SMALL_SPACE = replace(SPACE, devices=("H100",), ranks=(2,), max_num_seqs=(256,))
"""Space of a functional check, for which few forests are fitted."""
RULE = replace(PLAN_RULES["vidur"], rate_step=1.1)
"""Vidur's rule, exact to 10 %; the planner extends its runs where requests are long."""


def limit_slo(tbt_seconds: float) -> str:
    """Return the limits of the paper's search with another one of TBT."""
    return f"ttft:p90=2,tbt:p99={tbt_seconds:g}"


@dataclass(frozen=True)
class VidurSearchTask:
    """Search for the best design of a model and a workload."""

    model: str
    workload: str
    slo: str
    requests: int
    """Least number of requests per simulation."""
    num_simulated: int
    """Designs that are simulated; 0: closed forms only."""
    space: DesignSpace = SPACE


class VidurSearchFigures(NamedTuple):
    """Result of a task."""

    best: AssessedDesign | None
    num_designs: int
    num_hopeless: int
    """Designs that closed forms rule out: they do not fit, or miss a limit."""
    num_simulated: int


@dataclass(frozen=True)
class VidurCapacityTask:
    """Capacity of one design under a workload."""

    design: EngineDesign
    model: str
    workload: str
    slo: str
    requests: int
    is_simulated: bool = True
    """False: closed forms only."""


def make_planner(model: str, workload: str, slo: str, requests: int) -> DesignPlanner:
    """Return a search by QPS per dollar."""
    config = SimulationConfig(
        profile=f"vidur:{model}",
        max_request_tokens=MAX_TOKENS,
        max_model_len=MAX_TOKENS,
    )
    problem = ServiceProblem(
        config.model,
        workload,
        limits=parse_slo(slo),
        objective="qps-per-dollar",
        bounds={"devices": MAX_GPUS},
        prices=PRICE_TABLES["vidur"],
        num_requests=requests,
        seed=config.seed,
    )
    return DesignPlanner(problem, config, RULE)


def run_search(task: VidurSearchTask) -> VidurSearchFigures:
    """Return the best design of a task."""
    planner = make_planner(task.model, task.workload, task.slo, task.requests)
    designs = list(task.space.designs(MAX_GPUS))
    is_closed = not task.num_simulated
    budget = SearchBudget(max_evaluations=None if is_closed else task.num_simulated)
    outcome: BestFirstOutcome[EngineDesign, AssessedDesign] = planner.search(
        designs, budget, uses_closed_forms=is_closed
    )
    num_hopeless = len(designs) - len(outcome.evaluated) - outcome.left_out.total()
    return VidurSearchFigures(
        outcome.best[1] if outcome.best else None,
        len(designs),
        num_hopeless,
        0 if is_closed else len(outcome.evaluated),
    )


def run_capacity(task: VidurCapacityTask) -> AssessedDesign:
    """Return the figures of one design."""
    planner = make_planner(task.model, task.workload, task.slo, task.requests)
    estimate = planner.estimate(task.design)
    if not task.is_simulated:
        return estimate
    start = estimate.capacity or 1.0
    candidate = DesignTrial(task.design, start, planner.rule_of(task.design))
    return simulate_design(planner.problem, planner.config, SearchBudget(), candidate)
