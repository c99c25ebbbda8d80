"""Ranks or stages for prefill: the M/D/1 closed forms beside simulated engines.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), section 3.1 and Figure 4.
"""

from statistics import fmean
from typing import NamedTuple

from experiments.base import ExperimentOptions
from experiments.parallel import map_parallel
from experiments.queueing import mean_latency, tensor_parallel_crossover
from gllm.plan.goodput.engines import DISTSERVE_COSTS, make_engine
from gllm.plan.goodput.systems import System, run_phase
from gllm.plan.layout import Parallelism
from gllm.scheduler.stage_work import StageWork

MODEL = "opt-13b"
PROMPT = 512
"""Tokens per prompt: L_m, so that every micro-batch has one prompt, as the closed forms assume."""
ENGINES = Parallelism(2), Parallelism(1, 2)
UTILIZATIONS = 0.2, 0.4, 0.6, 0.8, 1.0, 1.2
"""Arrival rate times the time of a prompt on one device."""
REQUESTS_FACTOR = 10
"""Simulated prompts, in requests of the other simulations: these are short."""


class QueueTask(NamedTuple):
    """One simulation of prompts on an engine."""

    engine: Parallelism
    rate: float
    """Requests per second."""
    num_requests: int


class QueuePoint(NamedTuple):
    """Mean TTFT at a rate, in seconds."""

    utilization: float
    closed: tuple[float, ...]
    """By the closed form, for each of ENGINES."""
    simulated: tuple[float, ...]


def stage_seconds(engine: Parallelism) -> float:
    """Return the time of a prompt on each stage of an engine, in seconds."""
    cost = make_engine(DISTSERVE_COSTS, MODEL, engine, "distserve").cost
    return cost.stage_seconds(0, StageWork(0, PROMPT, ((0, PROMPT),), 0, 0, 1))


def closed_form(engine: Parallelism, rate: float) -> float:
    """Return the mean TTFT in seconds; infinite under overload."""
    seconds = stage_seconds(engine)
    return mean_latency(rate, engine.pp * seconds, seconds)


def simulated_mean(task: QueueTask) -> float:
    """Return the mean TTFT in seconds of an engine that prefills only."""
    system = System("prefill", MODEL, DISTSERVE_COSTS, task.engine)
    lengths = f"fixed:{PROMPT},1"
    return fmean(run_phase(system, "prefill", lengths, task.rate, task.num_requests).ttft)


def compare_queues(options: ExperimentOptions) -> list[QueuePoint]:
    """Return the mean TTFT of two ranks and of two stages by rate."""
    one_device = stage_seconds(Parallelism(1))
    rates = [each / one_device for each in UTILIZATIONS]
    num_requests = REQUESTS_FACTOR * options.requests
    tasks = [QueueTask(engine, rate, num_requests) for rate in rates for engine in ENGINES]
    means = iter(map_parallel(simulated_mean, tasks, options.jobs, options.progress))
    return [
        QueuePoint(
            utilization,
            tuple(closed_form(engine, rate) for engine in ENGINES),
            tuple(next(means) for _ in ENGINES),
        )
        for utilization, rate in zip(UTILIZATIONS, rates, strict=True)
    ]


def measured_speedup() -> float:
    """Return the time of a prompt on one device over that on two ranks."""
    return stage_seconds(Parallelism(1)) / stage_seconds(Parallelism(2))


def predicted_crossover() -> float:
    """Return the utilization from which two stages that divide the time exactly are faster."""
    return tensor_parallel_crossover(measured_speedup())
