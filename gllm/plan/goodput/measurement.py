"""Goodput of simulated systems, and of one phase alone."""

from math import ceil, inf
from typing import NamedTuple

from gllm.plan.goodput.systems import Outcome, System, run_phase, run_system
from gllm.sim.goodput import TARGET_ATTAINMENT, find_goodput

PRECISION = 1 / 32
"""Precision of a search, as a share of its first interval."""
FIRST_RATES = {"opt-13b": 2.0, "opt-66b": 0.5, "opt-175b": 0.2}
"""Requests per second per GPU at which searches begin, where a task states none."""
PHASE_TARGET = 0.95
"""Attainment of each phase alone, so that both together attain 0.9."""
MIN_SECONDS = 40.0
"""Shortest time in which requests arrive: queues of overloaded systems need it to grow."""
MAX_GROWTH = 8
"""Largest factor by which that raises the number of requests."""


class RunTask(NamedTuple):
    """One simulation."""

    system: System
    lengths: str
    rate: float
    """Requests per second of the whole system."""
    num_requests: int
    """Least number; more if they arrive in less than MIN_SECONDS."""
    seed: int = 0


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
    seed: int = 0
    first_rate: float | None = None
    """First upper end of the search, requests per second of the whole system."""
    most_rate: float = inf
    """Rate that no system reaches by closed forms; few requests may attain the target above it."""


def run_task(task: RunTask) -> Outcome:
    """Simulate a system."""
    num_requests = _count_requests(task.rate, task.num_requests)
    return run_system(task.system, task.lengths, task.rate, num_requests, task.seed)


def _count_requests(rate: float, num_requests: int) -> int:
    return max(num_requests, min(ceil(rate * MIN_SECONDS), MAX_GROWTH * num_requests))


def measure_goodput(task: GoodputTask) -> float:
    """Return the goodput in requests per second of the whole system."""
    system, lengths, seed = task.system, task.lengths, task.seed

    def attainment(rate: float) -> float:
        if rate > task.most_rate:
            return 0.0
        num_requests = _count_requests(rate, task.num_requests)
        if task.phase:
            outcome = run_phase(system, task.phase, lengths, rate, num_requests, seed)
        else:
            outcome = run_system(system, lengths, rate, num_requests, seed)
        return outcome.attainment(task.ttft, task.tpot)

    highest = task.first_rate or FIRST_RATES[system.model] * system.num_gpus
    return find_goodput(attainment, highest, highest * PRECISION, task.target)
