"""Goodput of systems, and the placement of DistServe's Algorithm 1, in the simulator."""

from collections.abc import Sequence
from dataclasses import replace

from experiments.base import ExperimentOptions
from experiments.distserve_workloads import HIGH_CANDIDATES, PaperWorkload
from experiments.parallel import map_parallel
from gllm.options.slo import Slo
from gllm.plan.goodput.engines import DISTSERVE_COSTS
from gllm.plan.goodput.placement import PhaseGoodput, count_engines
from gllm.plan.goodput.systems import PHASE_TARGET, GoodputTask, System, measure_goodput

MAX_ENGINES = 3
"""Engines per phase of Algorithm 1's placement: further ones repeat the pattern."""


def make_task(
    workload: PaperWorkload, system: System, options: ExperimentOptions, seed: int = 0
) -> GoodputTask:
    """Return the search for the goodput of a system with a workload and its limits."""
    slo = Slo(workload.ttft, workload.tpot)
    return GoodputTask(system, workload.lengths, slo, options.requests, seed=seed)


def measure_goodputs(tasks: Sequence[GoodputTask], options: ExperimentOptions) -> list[float]:
    """Return goodputs in requests per second.

    Systems that differ by name only are measured once.
    """
    keys = [task._replace(system=replace(task.system, name="")) for task in tasks]
    unique = list(dict.fromkeys(keys))
    rates = map_parallel(measure_goodput, unique, options.jobs, options.progress)
    known = dict(zip(unique, rates, strict=True))
    return [known[key] for key in keys]


def place_high_affinity(
    workload: PaperWorkload, options: ExperimentOptions
) -> tuple[System, PhaseGoodput, PhaseGoodput]:
    """Return the placement of Algorithm 1, which chooses each phase for itself.

    Returns:
        The system, and the engine of each phase.
    """
    candidates = HIGH_CANDIDATES[workload.model]
    slo = Slo(workload.ttft, workload.tpot, attainment=PHASE_TARGET)
    phases: list[PhaseGoodput] = []
    for phase in ("prefill", "decode"):
        tasks = [
            GoodputTask(
                System("phase", workload.model, DISTSERVE_COSTS, candidate),
                workload.lengths,
                slo,
                options.requests,
                phase,
            )
            for candidate in candidates
        ]
        rates = measure_goodputs(tasks, options)
        goodputs = [PhaseGoodput(*pair) for pair in zip(candidates, rates, strict=True)]
        phases.append(max(goodputs, key=lambda goodput: goodput.per_gpu))
    prefill, decode = phases
    return _replicate(workload.model, prefill, decode), prefill, decode


def _replicate(model: str, prefill: PhaseGoodput, decode: PhaseGoodput) -> System:
    """Return the numbers of engines with the highest rate per GPU, the smallest of equal ones."""
    base = System("DistServe-High", model, DISTSERVE_COSTS, prefill.parallelism, decode.parallelism)
    best, best_rate = base, 0.0
    for num_prefill in range(1, MAX_ENGINES + 1):
        for num_decode in range(1, MAX_ENGINES + 1):
            system = replace(base, num_prefill=num_prefill, num_decode=num_decode)
            rate = min(num_prefill * prefill.rate, num_decode * decode.rate) / system.num_gpus
            if rate > best_rate * 1.001:
                best, best_rate = system, rate
    return best


def place_for_rate(model: str, rate: float, prefill: PhaseGoodput, decode: PhaseGoodput) -> System:
    """Return as many engines of both phases as a rate in requests per second needs.

    Source: Algorithm 1's n = ceil(R / goodput of an instance).
    """
    return System(
        "DistServe-High",
        model,
        DISTSERVE_COSTS,
        prefill.parallelism,
        decode.parallelism,
        count_engines(rate, prefill.rate),
        count_engines(rate, decode.rate),
    )
