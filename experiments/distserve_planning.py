"""Run time of DistServe's Algorithms 1 and 2 by the number of GPUs (Figure 12)."""

import heapq
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import (
    ExpectedDirection,
    ExpectedFigure,
    ExpectedLimit,
    PaperClaim,
    relative_change,
)
from experiments.parallel import map_parallel
from gllm.options.slo import Slo
from gllm.plan.best_first import SearchBudget
from gllm.plan.goodput.bounds import GoodputBounds
from gllm.plan.goodput.engines import DISTSERVE_COSTS
from gllm.plan.goodput.placed_systems import SystemPlacer
from gllm.plan.goodput.placement import PHASES, engine_choices, unit_choices
from gllm.plan.goodput.planner import GoodputPlanner
from gllm.plan.goodput.systems import (
    FIRST_RATES,
    MAX_FACTOR,
    PHASE_TARGET,
    GoodputTask,
    RunTask,
    System,
    measure_goodput,
    run_phase,
    run_system,
)
from gllm.plan.nodes import equal_nodes
from gllm.plan.problem import ServiceProblem
from gllm.plan.strategies import UnservableError
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table
from gllm.sim.monotone_search import find_last

REFERENCE = 'arXiv 2401.09670 ("DistServe", OSDI\'24)'
PAPER_SECONDS = 78.0
"""Longest run time of the paper's algorithms on PAPER_CORES cores."""
PAPER_CORES = 96
GPUS_PER_NODE = 8
NUM_GPUS = (2, 4, 8, 16, 32)
LIMITS = {"opt-13b": Slo(0.2, 0.1), "opt-66b": Slo(0.4, 0.1)}
"""Limits of TTFT and TPOT in seconds of the paper's chatbot, by model."""
LENGTHS = "sharegpt"
NETWORK = "nvlink"
"""Link between nodes: the paper's simulator has one kind."""
NUM_REQUESTS = 300
"""Requests of a simulation, as in the paper's artifact."""
ALGORITHMS = ("Algorithm 1", "Algorithm 2")
"""Phases placed for themselves, and pairs of engines whose stages share nodes."""
NOTE = f"""\
Time to search for the best placement on nodes of {GPUS_PER_NODE} A100-80G, ShareGPT's lengths,
{NUM_REQUESTS} requests per simulation (in ours more where rates are high). Algorithm 1 chooses the
engine of each phase for itself (for fast networks), Algorithm 2 pairs of engines whose stages share
nodes (for slow ones); section 6.5 of the paper has the names the other way round. *The paper's
search* simulates every candidate of which costs are published and whose lone request is within the
limits. Candidates are independent; the time on {PAPER_CORES} cores, those of the paper, is that of
their CPU times, longest first. *Ours* is the search of `gllm plan goodput`, which leaves out what
closed forms show to be no better than the best so far; the test of the plan that follows it there
is no part of the paper's algorithm and not counted. All times are CPU time of this machine."""


@dataclass(frozen=True)
class SearchKey:
    """One search."""

    model: str
    algorithm: str
    """A name of ALGORITHMS."""
    num_gpus: int


class SearchCost(NamedTuple):
    """CPU seconds of all simulated candidates of a search."""

    num_candidates: int
    """Candidates that the GPUs hold, also those that are not simulated."""
    seconds: Sequence[float]

    @property
    def total(self) -> float:
        """CPU seconds on one core."""
        return sum(self.seconds)

    def on_cores(self, num_cores: int) -> float:
        """Return the seconds on a number of cores: candidates begin longest first."""
        ends = [0.0] * num_cores
        for seconds in sorted(self.seconds, reverse=True):
            heapq.heappushpop(ends, ends[0] + seconds)
        return max(ends)


class SearchDoneError(Exception):
    """Raised in place of the test of the plan that a search has found."""


def make_problem(key: SearchKey) -> ServiceProblem:
    """Return the problem of a search."""
    per_node = min(key.num_gpus, GPUS_PER_NODE)
    cluster = equal_nodes(key.num_gpus // per_node, per_node)
    return ServiceProblem(
        key.model, LENGTHS, cluster, limits=LIMITS[key.model], num_requests=NUM_REQUESTS
    )


def list_candidates(key: SearchKey) -> tuple[int, list[GoodputTask]]:
    """Return the number of candidates, and the simulations of the paper's search."""
    problem = make_problem(key)
    shape, cluster, slo = problem.shape, problem.cluster, problem.limits
    bounds = GoodputBounds(problem, DISTSERVE_COSTS)
    if key.algorithm == ALGORITHMS[0]:
        slo = slo._replace(attainment=PHASE_TARGET)
        choices = [
            (phase, engine)
            for phase in PHASES
            for engine in engine_choices(cluster, shape.heads, shape.layers)
        ]
        tasks = [
            GoodputTask(
                System("engine", key.model, DISTSERVE_COSTS, engine),
                LENGTHS,
                slo,
                NUM_REQUESTS,
                phase,
            )
            for phase, engine in choices
            if not bounds.of_engine(phase, engine).reason
        ]
        return len(choices), tasks
    placer = SystemPlacer(problem, DISTSERVE_COSTS, NETWORK)
    units = list(unit_choices(cluster, shape.heads, shape.layers))
    return len(units), [
        GoodputTask(placer.unit_system(unit, 1), LENGTHS, slo, NUM_REQUESTS)
        for unit in units
        if not bounds.of_unit(unit).reason
    ]


def measure_seconds(task: GoodputTask) -> float:
    """Return the CPU seconds of the paper's search for one goodput.

    It looks for the rate by doubling and bisection, with NUM_REQUESTS at every rate.
    """
    begin = time.process_time()
    system, slo = task.system, task.slo
    step = FIRST_RATES[system.model] * system.num_gpus / task.num_steps

    def attains(index: int, *_: int) -> bool:
        if index == 0:
            return True
        load = (task.lengths, index * step, task.num_requests, task.seed)
        phase = task.phase
        outcome = run_phase(system, phase, *load) if phase else run_system(system, *load)
        return outcome.attainment(*slo[:2]) >= slo.attainment

    find_last(attains, task.num_steps, task.num_steps, 0, MAX_FACTOR * task.num_steps)
    return time.process_time() - begin


def _measure(task: GoodputTask) -> tuple[float, float]:
    begin = time.process_time()
    return measure_goodput(task), time.process_time() - begin


def measure_ours(keys: Sequence[SearchKey]) -> list[SearchCost]:
    """Return the costs of our search for each key; equal simulations run once for all of them."""
    known: dict[GoodputTask, tuple[float, float]] = {}

    def measure(used: list[float], task: GoodputTask) -> float:
        if task not in known:
            known[task] = _measure(task)
        goodput, seconds = known[task]
        used.append(seconds)
        return goodput

    def end(task: RunTask, slo: Slo) -> NoReturn:
        raise SearchDoneError(f"{task.system.placement} within {slo}")

    costs = []
    for key in keys:
        used: list[float] = []
        planner = GoodputPlanner(
            make_problem(key), DISTSERVE_COSTS, SearchBudget(), partial(measure, used), NETWORK, end
        )
        is_apart = key.algorithm == ALGORITHMS[0]
        with suppress(SearchDoneError, UnservableError):
            (planner.place_apart if is_apart else planner.place_together)(None)
        costs.append(SearchCost(len(used), used))
    return costs


Costs = Mapping[SearchKey, SearchCost]


def planning_table(paper: Costs, ours: Costs) -> str:
    """Return the effort of each search."""
    rows = []
    for key, each in paper.items():
        mine = ours[key]
        rows.append(
            [key.model, key.algorithm, str(key.num_gpus), str(each.num_candidates),
             str(len(each.seconds)), f"{each.total:.1f}", f"{max(each.seconds, default=0.0):.1f}",
             f"{each.on_cores(PAPER_CORES):.1f}", str(len(mine.seconds)), f"{mine.total:.1f}"]
        )  # fmt: skip
    header = ["model", "algorithm", "GPUs", "candidates", "simulated", "one core, s",
              "longest candidate, s", f"{PAPER_CORES} cores, s", "ours: simulated",
              "ours: one core, s"]  # fmt: skip
    return format_table(header, rows)


def planning_claims(paper: Costs, ours: Costs) -> list[PaperClaim]:
    """Return the times for the most GPUs beside the paper's longest one, and their ratios."""
    most = max(key.num_gpus for key in paper)
    largest = {(key.model, key.algorithm): key for key in paper if key.num_gpus == most}
    models = list(dict.fromkeys(model for model, _ in largest))
    claims = []
    for (model, algorithm), key in largest.items():
        claims.append(
            PaperClaim(
                f"Figure 12: {model}, {algorithm}, {most} GPUs: time on {PAPER_CORES} cores",
                ExpectedLimit(PAPER_SECONDS, unit="s", name="paper"),
                paper[key].on_cores(PAPER_CORES),
                beside={
                    "one core": f"{paper[key].total:.1f} s",
                    "ours, one core": f"{ours[key].total:.1f} s",
                },
            )
        )
    for model in models:
        first, second = (paper[largest[model, algorithm]].total for algorithm in ALGORITHMS)
        mine = [ours[largest[model, algorithm]].total for algorithm in ALGORITHMS]
        claims.append(
            PaperClaim(
                f"Figure 12: {model}, {most} GPUs: Algorithm 2 over Algorithm 1",
                ExpectedDirection(True, "longer: all pairs of engines"),
                relative_change(second, first),
                beside={"ours, one core": f"{100 * relative_change(mine[1], mine[0]):+.0f} %"},
            )
        )
    if len(models) > 1:
        small, large = models[0], models[-1]
        for algorithm in ALGORITHMS:
            sizes = [largest[model, algorithm] for model in (small, large)]
            ratio = paper[sizes[1]].total / paper[sizes[0]].total
            mine_ratio = ours[sizes[1]].total / ours[sizes[0]].total
            claims.append(
                PaperClaim(
                    f"Figure 12: {algorithm}, {most} GPUs: {large} over {small}, independent of "
                    "the model's size",
                    ExpectedFigure(1.0, "x", 2),
                    ratio,
                    beside={"ours, one core": f"{mine_ratio:.2f} x"},
                )
            )
    return claims


def plot_planning(paper: Costs, ours: Costs, path: Path) -> None:
    """Plot CPU time over the number of GPUs."""
    panels = []
    for title, costs in (("The paper's search", paper), ("Ours", ours)):
        series: dict[str, list[tuple[float, float]]] = {}
        for key, each in costs.items():
            name = f"{key.model}, {key.algorithm}"
            series.setdefault(name, []).append((float(key.num_gpus), each.total))
        panels.append(ChartPanel(title, "GPUs", "CPU time, s", series))
    plot_grid(panels, path)


def run(options: ExperimentOptions) -> ExperimentResult:
    """Run all searches, and return the page."""
    counts = NUM_GPUS[:2] if options.quick else NUM_GPUS
    cases = [
        (model, algorithm)
        for model in (tuple(LIMITS)[:1] if options.quick else LIMITS)
        for algorithm in ALGORITHMS
    ]
    by_case = [[SearchKey(*case, count) for count in counts] for case in cases]
    keys = [key for each in by_case for key in each]
    listed = {key: list_candidates(key) for key in keys}
    # Clusters of fewer GPUs have some of the candidates of larger ones.
    tasks = list(dict.fromkeys(task for _, each in listed.values() for task in each))
    seconds = map_parallel(measure_seconds, tasks, options.jobs, options.progress, "candidate")
    known = dict(zip(tasks, seconds, strict=True))
    paper = {
        key: SearchCost(number, [known[task] for task in each])
        for key, (number, each) in listed.items()
    }
    found = map_parallel(measure_ours, by_case, options.jobs, options.progress, "search")
    ours = dict(zip(keys, (each for costs in found for each in costs), strict=True))
    return ExperimentResult(
        "DistServe: run time of the placement algorithms",
        f"Simulated. {NOTE}\n\n{planning_table(paper, ours)}\n",
        planning_claims(paper, ours),
        {"distserve-planning.svg": lambda path: plot_planning(paper, ours, path)},
        reference=REFERENCE,
    )
