"""Aladdin's re-balancing in simulated fleets: attainment without and with it, and its moves."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from experiments.aladdin_cases import FleetSearchTask
from experiments.base import ExperimentOptions
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.parallel import map_parallel
from experiments.rebalanced_cluster import RebalancedRun, simulate_rebalanced
from gllm.plan.scale.fleet_size import fleet_deployments, measure_fleet, simulate_fleet
from gllm.sim.metrics.report import format_table

FLEETS = {"sharegpt-like": (5, 6), "azure-conv": (10, 12)}
"""Workers by workload: as many as attain 99 % without re-balancing, and fewer."""
NUM_SEEDS = 8
NOTE = """\
At each arrival, before the new request is placed, requests of which no step has scheduled anything
move from workers with more load than was predicted to workers with less, while each move lowers the
sum of the distances and the target meets b to e. *Chances*: arrivals at which some request has not
started. Errors are summed over the run; a request that is longer than predicted does not end early
by its later predictions (our reading). *Without* and *with*: share of the requests within both
limits, and *change* in points with its standard error; these, moves and chances are means of the
seeds. One move changes which requests are placed together from then on, so that a seed's share may
change either way."""


@dataclass(frozen=True)
class RebalancingTask:
    """Simulation of a fleet without and with re-balancing."""

    search: FleetSearchTask
    num_workers: int


class RebalancingOutcome(NamedTuple):
    """Attainment of a fleet, 0..1, and its moves."""

    without: float
    with_moves: float
    num_chances: int
    num_moves: int
    num_started: int
    """Moves of requests that a step had scheduled."""
    num_useless: int
    """Moves that did not lower the sum of distances."""


class RebalancingReport(NamedTuple):
    """Section of the page."""

    text: str
    claims: list[PaperClaim]


def run_rebalanced(task: RebalancingTask) -> RebalancedRun:
    """Return the run of a fleet with re-balancing."""
    case = task.search.case
    deployments = fleet_deployments(case, task.num_workers)
    return simulate_rebalanced(
        deployments, case.jobs(), case.router(), case.rules, case.worker.latency
    )


def compare_fleet(task: RebalancingTask) -> RebalancingOutcome:
    """Return the attainment of a fleet without and with re-balancing."""
    run, case = run_rebalanced(task), task.search.case
    return RebalancingOutcome(
        simulate_fleet(case, task.num_workers).attainment,
        measure_fleet(run.cluster, case.slo, task.num_workers).attainment,
        run.num_chances,
        len(run.moves),
        run.num_started_moves,
        sum(not move.lowers_distances for move in run.moves),
    )


def compare_rebalancing(
    workloads: Mapping[str, float], options: ExperimentOptions
) -> RebalancingReport:
    """Return a table of fleets without and with re-balancing, and what holds of their moves.

    Args:
        workloads: Requests per second by workload.
        options: Of the experiment.
    """
    if options.quick:
        search = FleetSearchTask("sharegpt-like", 4.0, "aladdin", seconds=20.0)
        fleets = [RebalancingTask(search, 2)]
    else:
        fleets = [
            RebalancingTask(FleetSearchTask(workload, workloads[workload], "aladdin"), count)
            for workload, counts in FLEETS.items()
            for count in counts
        ]
    seeds = range(1 if options.quick else NUM_SEEDS)
    tasks = [
        replace(fleet, search=replace(fleet.search, seed=seed))
        for fleet in fleets
        for seed in seeds
    ]
    outcomes = map_parallel(compare_fleet, tasks, options.jobs, options.progress)
    rows = [
        _row(fleet, outcomes[index * len(seeds) : (index + 1) * len(seeds)])
        for index, fleet in enumerate(fleets)
    ]
    header = ["workload", "requests/s", "workers", "without", "with", "change", "moves", "chances"]
    largest = max(abs(outcome.with_moves - outcome.without) for outcome in outcomes)
    text = (
        f"{NOTE}\n\nSeeds: {len(seeds)}; the largest change of one is {100 * largest:.2f} points."
        f"\n\n{format_table(header, rows)}"
    )
    return RebalancingReport(text, _claims(outcomes))


def _row(fleet: RebalancingTask, outcomes: list[RebalancingOutcome]) -> list[str]:
    """Return the row of a fleet, by the outcomes of all seeds."""
    changes = [100 * (outcome.with_moves - outcome.without) for outcome in outcomes]
    change = f"{fmean(changes):+.2f}"
    if len(changes) > 1:
        change += f" +- {stdev(changes) / sqrt(len(changes)):.2f}"
    return [
        fleet.search.workload, f"{fleet.search.rate:g}", str(fleet.num_workers),
        f"{fmean(outcome.without for outcome in outcomes):.2%}",
        f"{fmean(outcome.with_moves for outcome in outcomes):.2%}", change,
        f"{fmean(outcome.num_moves for outcome in outcomes):.0f}",
        f"{fmean(outcome.num_chances for outcome in outcomes):.0f}",
    ]  # fmt: skip


def _claims(outcomes: list[RebalancingOutcome]) -> list[PaperClaim]:
    limit = ExpectedLimit(0.0, unit="requests", digits=0)
    started = sum(outcome.num_started for outcome in outcomes)
    useless = sum(outcome.num_useless for outcome in outcomes)
    return [
        PaperClaim("re-balancing: moved after their start", limit, float(started)),
        PaperClaim("re-balancing: moved without a smaller error", limit, float(useless)),
    ]
