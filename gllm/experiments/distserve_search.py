"""Goodput of systems, and the placement of DistServe's Algorithm 1, in the simulator."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from gllm.experiments.base import ExperimentOptions
from gllm.experiments.distserve_workloads import HIGH_CANDIDATES, PaperWorkload
from gllm.experiments.parallel import map_parallel
from gllm.plan.goodput.systems import (
    Outcome,
    Parallelism,
    System,
    run_phase,
    run_system,
)
from gllm.sim.goodput import TARGET_ATTAINMENT, find_goodput

PRECISION = 1 / 32
"""Precision of a search, as a share of its first interval."""
FIRST_RATES = {"opt-13b": 2.0, "opt-66b": 0.5, "opt-175b": 0.2}
"""Requests per second per GPU at which searches begin."""
PHASE_TARGET = 0.95
"""Attainment of each phase alone, so that both together attain 0.9."""
MIN_SECONDS = 40.0
"""Shortest time in which requests arrive: queues of overloaded systems need it to grow."""
MAX_GROWTH = 8
"""Largest factor by which that raises the number of requests."""
MAX_ENGINES = 3
"""Engines per phase of Algorithm 1's placement: further ones repeat the pattern."""


class RunTask(NamedTuple):
    """One simulation."""

    system: System
    lengths: str
    rate: float
    """Requests per second of the whole system."""
    num_requests: int
    """Least number; more if they arrive in less than MIN_SECONDS."""


class GoodputTask(NamedTuple):
    """Search for the goodput of a system, or of one phase alone."""

    system: System
    lengths: str
    ttft: float
    """Limit in seconds."""
    tpot: float
    """Limit in seconds."""
    num_requests: int
    phase: str = ""
    """prefill or decode; empty for both."""
    target: float = TARGET_ATTAINMENT


def run_task(task: RunTask) -> Outcome:
    """Simulate a system."""
    num_requests = _count_requests(task.rate, task.num_requests)
    return run_system(task.system, task.lengths, task.rate, num_requests)


def _count_requests(rate: float, num_requests: int) -> int:
    return max(num_requests, min(ceil(rate * MIN_SECONDS), MAX_GROWTH * num_requests))


def measure_goodput(task: GoodputTask) -> float:
    """Return the goodput in requests per second of the whole system."""
    system, lengths = task.system, task.lengths

    def attainment(rate: float) -> float:
        num_requests = _count_requests(rate, task.num_requests)
        if task.phase:
            outcome = run_phase(system, task.phase, lengths, rate, num_requests)
        else:
            outcome = run_system(system, lengths, rate, num_requests)
        return outcome.attainment(task.ttft, task.tpot)

    highest = FIRST_RATES[system.model] * system.num_gpus
    return find_goodput(attainment, highest, highest * PRECISION, task.target)


def measure_goodputs(tasks: Sequence[GoodputTask], options: ExperimentOptions) -> list[float]:
    """Return goodputs in requests per second.

    Systems that differ by name only are measured once.
    """
    keys = [task._replace(system=replace(task.system, name="")) for task in tasks]
    unique = list(dict.fromkeys(keys))
    rates = map_parallel(measure_goodput, unique, options.jobs, options.progress)
    known = dict(zip(unique, rates, strict=True))
    return [known[key] for key in keys]


@dataclass(frozen=True)
class PhaseGoodput:
    """Engine of one phase and its goodput."""

    parallelism: Parallelism
    rate: float
    """Requests per second of one engine."""

    @property
    def per_gpu(self) -> float:
        """Requests per second per GPU."""
        return self.rate / self.parallelism.num_gpus


def place_high_affinity(
    workload: PaperWorkload, options: ExperimentOptions
) -> tuple[System, PhaseGoodput, PhaseGoodput]:
    """Return the placement of Algorithm 1, which chooses each phase for itself.

    Returns:
        The system, and the engine of each phase.
    """
    candidates = HIGH_CANDIDATES[workload.model]
    limits = workload.ttft, workload.tpot
    phases: list[PhaseGoodput] = []
    for phase in ("prefill", "decode"):
        tasks = [
            GoodputTask(
                System("phase", workload.model, "distserve", each),
                workload.lengths,
                *limits,
                options.requests,
                phase,
                PHASE_TARGET,
            )
            for each in candidates
        ]
        rates = measure_goodputs(tasks, options)
        goodputs = [PhaseGoodput(*pair) for pair in zip(candidates, rates, strict=True)]
        phases.append(max(goodputs, key=lambda each: each.per_gpu))
    prefill, decode = phases
    return _replicate(workload.model, prefill, decode), prefill, decode


def _replicate(model: str, prefill: PhaseGoodput, decode: PhaseGoodput) -> System:
    """Return the numbers of engines with the highest rate per GPU, the smallest of equal ones."""
    base = System("DistServe-High", model, "distserve", prefill.parallelism, decode.parallelism)
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
        "distserve",
        prefill.parallelism,
        decode.parallelism,
        ceil(rate / prefill.rate),
        ceil(rate / decode.rate),
    )
