"""GPUs per worker: the degree of tensor parallelism with the highest throughput per GPU.

Source: "Aladdin" (arXiv 2405.06856), equations 5 and 6:

    T_max(N) = min(M / (N m_r (t_comp + t_comm)), B / (N T_dec))

M is the memory of N GPUs without the weights, m_r the mean KV cache of a request, the times are
those of an iteration with the batch M / m_r, and B is the largest batch that meets T_dec. The best
N does not depend on the load.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gllm.plan.engine_checks import with_planned_length
from gllm.plan.engine_times import EngineTimes, decode_step_work
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.deployment import Deployment, roofline_deployment
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.hardware.stages import look_up

DEGREES = (1, 2, 4, 8)
MAX_BATCH = 4096
"""Largest batch that is tried, in requests."""


class WorkerType(NamedTuple):
    """Throughput per GPU of an engine on a number of GPUs, limited by memory and by latency."""

    num_gpus: int
    memory_rate: float
    """Output tokens per second per GPU with the largest batch that fits the KV cache."""
    slo_rate: float
    """Output tokens per second per GPU with the largest batch within the TPOT limit; may be 0."""
    memory_batch: float
    """Requests of the largest batch that fits the KV cache (M / m_r in the paper)."""
    slo_batch: int
    """Requests of the largest batch whose step time is within the TPOT limit (B in the paper)."""

    @property
    def rate(self) -> float:
        """Output tokens per second per GPU: the smaller of both (T_max in the paper)."""
        return min(self.memory_rate, self.slo_rate)


def build_engines(
    model: str,
    device: str,
    rank_link: str,
    degrees: Sequence[int],
    longest: int,
    scheduler: SchedulerConfig | None = None,
) -> tuple[dict[int, Deployment], dict[int, str]]:
    """Build an engine for each tensor-parallel degree, with the step times of the roofline.

    Args:
        model: A name of MODELS.
        device: A name of DEVICES.
        rank_link: Link between the GPUs of an engine: a name of LINKS.
        degrees: Tensor-parallel degrees to try.
        longest: Prompt and output tokens of the longest request that an engine has to accept.
        scheduler: Scheduler options; default: those of `gllm serve`.

    Returns:
        Engines by degree, and reasons by degree why the model does not fit.

    Raises:
        ValueError: A name is unknown, the longest request exceeds the model's context, or the model
            fits at no degree.
    """
    shape = look_up("model", model, MODELS)
    context = shape.max_context or shape.context
    if longest > context:
        raise ValueError(
            f"the workload has a request of {longest} tokens, but the context of {model} is "
            f"{context}: cut the requests (--max-request-tokens {context}), or choose another "
            "workload or model"
        )
    engines, reasons = {}, {}
    for degree in degrees:
        try:
            engine = roofline_deployment(
                model, device, 1, longest,
                scheduler=scheduler, degrees=(degree,), rank_link=rank_link,
            )  # fmt: skip
        except ValueError as error:
            reasons[degree] = str(error)
            continue
        engines[degree] = with_planned_length(engine, longest)
    if not engines:
        raise ValueError(
            f"{reasons[max(reasons)]} (the longest request has {longest} tokens: "
            "--max-request-tokens cuts it)"
        )
    return engines, reasons


def throughput_by_degree(
    engines: Mapping[int, Deployment], tpot_seconds: float, context: float
) -> list[WorkerType]:
    """Return the decode throughput of an engine for each tensor-parallel degree.

    Args:
        engines: Engines by tensor-parallel degree.
        tpot_seconds: Limit of the time per output token in seconds (T_dec in Aladdin).
        context: Mean number of KV cache tokens of a request over its lifetime (m_r in Aladdin).
    """
    workers = []
    for degree, engine in engines.items():
        capacity = engine.scheduler.num_blocks * engine.scheduler.block_size
        batch = capacity / context
        times = EngineTimes(engine.cost)
        seconds = times.total(decode_step_work(max(1, round(batch)), context))
        largest = times.largest_batch(context, tpot_seconds, MAX_BATCH)
        by_memory, by_slo = batch / (degree * seconds), largest / (degree * tpot_seconds)
        workers.append(WorkerType(degree, by_memory, by_slo, batch, largest))
    return workers


def best_worker(workers: Sequence[WorkerType]) -> WorkerType:
    """Return the engine type with the highest throughput per GPU (N* in Aladdin).

    Among equals the fewest GPUs win.
    """
    return max(workers, key=lambda worker: (worker.rate, -worker.num_gpus))
