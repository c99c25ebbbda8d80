"""DistServe's evaluation in the simulator: goodput, attainment, breakdown of latency, ablation.

Every system is simulated with production's scheduler, pair policy, holds and fetches.
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.distserve_claims import make_claims, make_panels
from experiments.distserve_queue import compare_queues
from experiments.distserve_search import (
    make_task,
    measure_goodputs,
    place_for_rate,
    place_high_affinity,
)
from experiments.distserve_seeds import measure_seeds
from experiments.distserve_study import (
    SHARES,
    HighPlacement,
    Study,
    Table2,
    TightLimit,
    WorkloadResult,
)
from experiments.distserve_tables import format_study
from experiments.distserve_workloads import (
    COLOCATED_CHOICES,
    MOTIVATION,
    MOTIVATION_LENGTHS,
    MOTIVATION_SLO,
    SEPARATED_CHOICES,
    TABLE_2_RATES,
    TPOT_LIMITS,
    WORKLOADS,
    PaperWorkload,
)
from experiments.parallel import map_parallel
from gllm.options.slo import Slo
from gllm.plan.goodput.engines import DISTSERVE_COSTS
from gllm.plan.goodput.systems import GoodputTask, RunTask, System, run_task
from gllm.plan.layout import Parallelism
from gllm.sim.metrics.plots import plot_grid

REFERENCE = 'arXiv 2401.09670 ("DistServe", OSDI\'24)'
QUICK_REQUESTS = 24
SIZED_FACTOR = 1.5
"""Rate for which Algorithm 1 counts engines, in goodputs of one engine of the faster phase."""


def run(options: ExperimentOptions) -> ExperimentResult:
    """Simulate all workloads and compare the figures with the paper's."""
    if options.quick:
        options = replace(options, requests=min(options.requests, QUICK_REQUESTS))
    workloads = WORKLOADS[:1] if options.quick else WORKLOADS
    results = _measure_workloads(workloads, options)
    _run_points(results, options)
    study = Study(results, options.requests, measure_motivation(options))
    study.queues = compare_queues(options)
    if not options.quick:
        study.tight = _tighten(options)
        study.table_2 = _run_table_2(options)
        study.high = [place_high(result, options) for result in results[:2]]
        study.throttled = _throttle(results, options)
        study.by_seed = measure_seeds(results[0], options)
    panels = make_panels(results)
    return ExperimentResult(
        "DistServe: prefill and decode apart",
        format_study(study),
        make_claims(study),
        {"distserve.svg": lambda path: plot_grid(panels, path)},
        reference=REFERENCE,
    )


def _measure_workloads(
    workloads: Sequence[PaperWorkload], options: ExperimentOptions
) -> list[WorkloadResult]:
    """Return the goodput of each system, at its best parallelism where several are tried."""
    results = []
    for workload in workloads:
        systems = [workload.distserve, *workload.colocated]
        tasks = [make_task(workload, system, options) for system in systems]
        result = WorkloadResult(workload)
        for system, rate in zip(systems, measure_goodputs(tasks, options), strict=True):
            result.add_goodput(system, rate)
        results.append(result)
    return results


def _run_points(results: Sequence[WorkloadResult], options: ExperimentOptions) -> None:
    """Simulate each system at shares of DistServe's goodput per GPU."""
    tasks, owners = [], []
    for result in results:
        base = result.per_gpu("DistServe")
        for name, system in result.systems.items():
            for share in SHARES if base else ():
                rate = share * base * system.num_gpus
                tasks.append(RunTask(system, result.workload.lengths, rate, options.requests))
                owners.append((result, name, share))
    outcomes = map_parallel(run_task, tasks, options.jobs, options.progress)
    for (result, name, share), outcome in zip(owners, outcomes, strict=True):
        result.outcomes[name, share] = outcome


def measure_motivation(options: ExperimentOptions) -> dict[str, dict[str, float]]:
    """Return the goodput per GPU of the paper's Figure 1, by lengths and system."""
    systems = {name: (system, "") for name, system in MOTIVATION.items()}
    engine = System("phase", "opt-13b", DISTSERVE_COSTS, Parallelism(1))
    systems |= {phase: (engine, phase) for phase in ("prefill", "decode")}
    goodputs: dict[str, dict[str, float]] = {}
    for title, lengths in MOTIVATION_LENGTHS.items():
        tasks = [
            GoodputTask(system, lengths, Slo(*MOTIVATION_SLO), options.requests, phase)
            for system, phase in systems.values()
        ]
        rates = measure_goodputs(tasks, options)
        goodputs[title] = {
            name: rate / system.num_gpus
            for (name, (system, _)), rate in zip(systems.items(), rates, strict=True)
        }
    return goodputs


def _tighten(options: ExperimentOptions) -> list[TightLimit]:
    """Return the best separated and colocated engines by limit of TPOT."""
    workload = WORKLOADS[0]
    systems = [*COLOCATED_CHOICES, *SEPARATED_CHOICES]
    limits = []
    for tpot in TPOT_LIMITS:
        tasks = [
            GoodputTask(system, workload.lengths, Slo(workload.ttft, tpot), options.requests)
            for system in systems
        ]
        best: dict[str, tuple[str, float]] = {}
        for system, rate in zip(systems, measure_goodputs(tasks, options), strict=True):
            per_gpu = rate / system.num_gpus
            if system.name not in best or per_gpu > best[system.name][1]:
                best[system.name] = system.placement, per_gpu
        limits.append(TightLimit(tpot, best))
    return limits


def _run_table_2(options: ExperimentOptions) -> list[Table2]:
    """Return the attainment at the rates of the paper's Table 2, for both candidate models."""
    tables = []
    for workload in WORKLOADS[:2]:
        systems = {"vLLM": workload.colocated[0], "DistServe": workload.distserve}
        attained = {}
        for name, system in systems.items():
            tasks = [
                RunTask(system, workload.lengths, rate, options.requests) for rate in TABLE_2_RATES
            ]
            outcomes = map_parallel(run_task, tasks, options.jobs, options.progress)
            limits = workload.ttft, workload.tpot
            attained[name] = [outcome.attainment(*limits) for outcome in outcomes]
        tables.append(Table2(workload, attained))
    return tables


def place_high(low: WorkloadResult, options: ExperimentOptions) -> HighPlacement:
    """Return Algorithm 1's placement, and the attainment of its numbers of engines for a rate."""
    workload = low.workload
    system, prefill, decode = place_high_affinity(workload, options)
    (rate,) = measure_goodputs([make_task(workload, system, options)], options)
    sized_rate = SIZED_FACTOR * max(prefill.rate, decode.rate)
    sized = place_for_rate(workload.model, sized_rate, prefill, decode)
    outcome = run_task(RunTask(sized, workload.lengths, sized_rate, options.requests))
    attained = outcome.attainment(workload.ttft, workload.tpot)
    per_gpu = rate / system.num_gpus
    return HighPlacement(low, system, per_gpu, prefill, decode, sized, sized_rate, attained)


def _throttle(
    results: Sequence[WorkloadResult], options: ExperimentOptions
) -> list[tuple[str, System, float]]:
    """Return goodputs per GPU of engines in stages, with DistServe's local rule and throttling."""
    rows = []
    for result in results[:2]:
        tp = 1 if result.workload.model == "opt-13b" else 2
        stages = Parallelism(tp, 2)
        base = replace(result.systems["DistServe"], prefill=stages, decode=stages)
        for policy in ("distserve", "throttle"):
            system = replace(base, prefill_policy=policy, decode_policy=policy)
            rows.append((result.workload, system))
        for policy in ("vllm", "throttle"):
            system = replace(result.systems["colocated"], prefill=Parallelism(tp, 4))
            rows.append((result.workload, replace(system, prefill_policy=policy)))
    tasks = [make_task(workload, system, options) for workload, system in rows]
    return [
        (workload.name, system, rate / system.num_gpus)
        for (workload, system), rate in zip(rows, measure_goodputs(tasks, options), strict=True)
    ]
