"""Vidur's figures of merit by latency limit (Figure 5) and the cost of its search (Table 2)."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import NamedTuple

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedFigure, ExpectedLimit, PaperClaim
from experiments.parallel import map_parallel
from experiments.vidur_searches import (
    MAX_GPUS,
    PAPER_SLO,
    SMALL_SPACE,
    SPACE,
    WORKLOADS,
    VidurCapacityTask,
    VidurSearchFigures,
    VidurSearchTask,
    make_planner,
    run_capacity,
    run_search,
)
from gllm.options.slo import parse_slo
from gllm.plan.capacity import measure_capacity
from gllm.plan.search.designs import EngineDesign
from gllm.plan.search.objectives import AssessedDesign
from gllm.sim.capacity import RateTrial
from gllm.sim.costs.base import CostRangeError
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table, show_value

REFERENCE = 'Agrawal et al., "Vidur", MLSys 2024 (arXiv 2405.05465)'
MODEL = "llama-2-70b"
TBT_LIMITS = (0.05, 0.08, 0.1, 0.12, 0.14, 0.2)
TTFT_LIMITS = (0.25, 0.5, 1.0, 2.0)
"""Limits of TBT P99 and of TTFT P90 in seconds; the other one is that of the paper's search."""
PAPER_CORE_HOURS = 96.0
"""An hour on 96 cores: the paper's search for LLaMA2-70B."""
PAPER_GPU_HOURS = 42_000.0
"""The same search by runs on GPUs, as the paper estimates it."""
NUM_SAMPLED = 3
"""Designs of each workload that are simulated, of those that closed forms do not rule out."""
SEED = 0
CONFIDENCE = 1.96
"""Standard errors on each side of a mean: 95 %."""
FRONT_NOTE = f"""\
Best QPS per $/h of Llama-2-70B by the limit of one latency; the other limit is the paper's (TTFT
P90 2 s, TBT P99 0.2 s). Closed forms choose the design out of the space of [vidur](vidur.md). Those
for {WORKLOADS[0]} are also simulated within the same limits, to 10 %; the chart has the simulated
figures of these. The paper's figure is a picture whose text has one number, the step from 0.12 to
0.14 s, judged on that page."""
COST_NOTE = """\
CPU time of the capacities of designs drawn at random from those that closed forms do not rule out,
each simulated to 10 % as the search does; *GPU time*: what the same runs would take on the design's
GPUs, requests over rate times devices, without their ends. The total is the mean over the sample
times the number of such designs, with its 95 % interval; the paper's search simulates all of them.
We read its 42,000 GPU-hours and its hour on 96 cores as those of one model with three workloads.
CPU times are those of this machine."""


@dataclass(frozen=True)
class CostTask:
    """Capacity of one design, whose cost is measured."""

    workload: str
    design: EngineDesign
    requests: int


class CapacityCost(NamedTuple):
    """Cost of one design's capacity."""

    cpu_seconds: float
    gpu_seconds: float
    """Of its runs on the design's GPUs."""
    num_runs: int


class CostEstimate(NamedTuple):
    """Cost of all designs of a workload by that of a sample."""

    num_designs: int
    sample: Sequence[CapacityCost]

    def total(self, name: str) -> tuple[float, float]:
        """Return the estimate of a field's sum over all designs, and half its 95 % interval."""
        values = [float(getattr(each, name)) for each in self.sample]
        spread = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
        return self.num_designs * fmean(values), self.num_designs * CONFIDENCE * spread


def measure_cost(task: CostTask) -> CapacityCost:
    """Measure the cost of one capacity."""
    planner = make_planner(MODEL, task.workload, PAPER_SLO, task.requests)
    estimate = planner.estimate(task.design)
    config, rule = planner.configure(task.design), planner.rule_of(task.design)
    gpu_seconds, num_runs = 0.0, 0

    def observe(rate: float, trial: RateTrial) -> None:
        nonlocal gpu_seconds, num_runs
        gpu_seconds += trial.num_requests / rate * task.design.num_devices
        num_runs += 1

    begin = time.process_time()
    # Where no rate is sustained the runs count.
    with suppress(ValueError, CostRangeError):
        measure_capacity(
            config, estimate.capacity or 1.0, rule, parse_slo(PAPER_SLO), on_trial=observe
        )
    return CapacityCost(time.process_time() - begin, gpu_seconds, num_runs)


def sample_designs(workload: str, requests: int, count: int) -> tuple[int, list[CostTask]]:
    """Return the number of designs that are not ruled out, and some of them.

    Args:
        workload: A name of WORKLOADS.
        requests: Least number of requests of a simulation.
        count: Size of the sample.
    """
    planner = make_planner(MODEL, workload, PAPER_SLO, requests)
    designs = [each for each in SPACE.designs(MAX_GPUS) if not planner.bound(each).reason]
    chosen = Random(SEED).sample(designs, min(count, len(designs)))
    return len(designs), [CostTask(workload, each, requests) for each in chosen]


FrontKey = tuple[str, str, float]
"""Workload, latency and its limit in seconds."""
Fronts = Mapping[FrontKey, VidurSearchFigures]
Simulated = Mapping[FrontKey, AssessedDesign]


def limits_slo(metric: str, seconds: float) -> str:
    """Return the paper's limits with another one of a metric: ttft or tbt."""
    limits = {"ttft": ("p90", 2.0), "tbt": ("p99", 0.2)}
    limits[metric] = limits[metric][0], seconds
    return ",".join(f"{name}:{point}={limit:g}" for name, (point, limit) in limits.items())


def front_table(fronts: Fronts, simulated: Simulated) -> str:
    """Return the best design by limit."""
    rows = []
    for key, found in fronts.items():
        workload, metric, limit = key
        best, run = found.best, simulated.get(key)
        cells = ["none within the limits", ""]
        if best and best.capacity:
            cells = [str(best.design), show_value(best.value)]
        cells.append("" if run is None else show_value(run.value if run.capacity else 0.0))
        rows.append([workload, metric.upper(), f"{limit:g}", *cells])
    header = ["workload", "limit of", "s", "best design", "QPS per $/h", "simulated"]
    return format_table(header, rows)


def cost_table(costs: Mapping[str, CostEstimate]) -> str:
    """Return the cost of the search by workload."""
    rows = []
    for workload, each in costs.items():
        runs = fmean(cost.num_runs for cost in each.sample)
        row = [workload, str(each.num_designs), str(len(each.sample)), f"{runs:.1f}"]
        for name in CapacityCost._fields[:2]:
            total, half = each.total(name)
            per_design = total / each.num_designs
            row += [f"{per_design:,.0f} s", f"{total / 3600:,.1f} +- {half / 3600:,.1f} h"]
        rows.append(row)
    header = ["workload", "designs", "sample", "runs per design", "CPU time per design",
              "CPU time of all", "GPU time per design", "GPU time of all"]  # fmt: skip
    return format_table(header, rows)


def cost_claims(costs: Mapping[str, CostEstimate]) -> list[PaperClaim]:
    """Return the costs of all workloads beside the paper's."""
    figures = {}
    for name in CapacityCost._fields[:2]:
        totals = [each.total(name) for each in costs.values()]
        half = math.sqrt(sum(each**2 for _, each in totals)) / 3600
        figures[name] = sum(total for total, _ in totals) / 3600, half
    (core_hours, core_half), (gpu_hours, gpu_half) = figures.values()
    return [
        PaperClaim(
            "Table 2: core-hours of the simulated search",
            ExpectedLimit(PAPER_CORE_HOURS, unit="h", name="paper"),
            core_hours,
            f"(+- {core_half:.1f})",
        ),
        PaperClaim(
            "Table 2: GPU-hours of the same runs",
            ExpectedFigure(PAPER_GPU_HOURS, "h", 0),
            gpu_hours,
            f"(+- {gpu_half:,.0f})",
        ),
        PaperClaim(
            "Table 2: GPU-hours per core-hour",
            ExpectedFigure(PAPER_GPU_HOURS / PAPER_CORE_HOURS, "x", 0),
            gpu_hours / core_hours,
        ),
    ]


def plot_fronts(fronts: Fronts, simulated: Simulated, path: Path) -> None:
    """Plot QPS per $/h over the limits."""
    panels = []
    for metric in ("ttft", "tbt"):
        series: dict[str, list[tuple[float, float]]] = {}
        for key, found in fronts.items():
            workload, other, limit = key
            if other != metric or not found.best:
                continue
            series.setdefault(workload, []).append((limit, found.best.value))
            if run := simulated.get(key):
                value = run.value if run.capacity else 0.0
                series.setdefault(f"{workload}, simulated", []).append((limit, value))
        if series:
            title = f"Best design by limit of {metric.upper()}"
            panels.append(ChartPanel(title, "limit, s", "QPS per $/h", series))
    plot_grid(panels, path)


def _search_fronts(
    options: ExperimentOptions, workloads: Sequence[str], requests: int
) -> tuple[Fronts, Simulated]:
    """Return the best designs by limit, and simulations of those of the first workload."""
    limits = [("tbt", each) for each in TBT_LIMITS] + [("ttft", each) for each in TTFT_LIMITS]
    if options.quick:
        limits = limits[3:5]
    keys = [(workload, *limit) for workload in workloads for limit in limits]
    space = SMALL_SPACE if options.quick else SPACE
    tasks = {
        key: VidurSearchTask(MODEL, key[0], limits_slo(*key[1:]), requests, 0, space)
        for key in keys
    }
    unique = list(dict.fromkeys(tasks.values()))
    found = map_parallel(run_search, unique, options.jobs, options.progress, "search")
    known = dict(zip(unique, found, strict=True))
    fronts = {key: known[task] for key, task in tasks.items()}
    runs = {
        key: VidurCapacityTask(best.design, MODEL, key[0], tasks[key].slo, requests)
        for key, each in fronts.items()
        if key[0] == WORKLOADS[0] and (best := each.best) and best.capacity
    }
    drawn = list(dict.fromkeys(runs.values()))
    results = map_parallel(run_capacity, drawn, options.jobs, options.progress, "capacity")
    assessed = dict(zip(drawn, results, strict=True))
    return fronts, {key: assessed[task] for key, task in runs.items()}


def run(options: ExperimentOptions) -> ExperimentResult:
    """Search by limit, measure the cost of a sample, and return the page."""
    requests = max(20, options.requests // 16)
    workloads = WORKLOADS[:1] if options.quick else WORKLOADS
    fronts, simulated = _search_fronts(options, workloads, requests)
    count = 1 if options.quick else NUM_SAMPLED
    samples = {each: sample_designs(each, requests, count) for each in workloads}
    drawn = [task for _, each in samples.values() for task in each]
    measured = dict(
        zip(
            drawn,
            map_parallel(measure_cost, drawn, options.jobs, options.progress, "capacity"),
            strict=True,
        )
    )
    costs = {
        workload: CostEstimate(number, [measured[task] for task in each])
        for workload, (number, each) in samples.items()
    }
    text = (
        f"Closed forms, and simulated capacities.\n\n## Figure 5: best designs by limit\n\n"
        f"{FRONT_NOTE}\n\n{front_table(fronts, simulated)}\n\n## Table 2: cost of the search\n\n"
        f"{COST_NOTE}\n\n{cost_table(costs)}\n"
    )
    return ExperimentResult(
        "Vidur: designs by latency limit, cost of the search",
        text,
        cost_claims(costs),
        {"vidur-pareto.svg": lambda path: plot_fronts(fronts, simulated, path)},
        reference=REFERENCE,
    )
