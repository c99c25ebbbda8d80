"""GPUs per worker: the degree of tensor parallelism with the highest throughput per GPU.

Source: "Aladdin" (arXiv 2405.06856), equations 5 and 6:

    T_max(N) = min(M / (N m_r (t_comp + t_comm)), B / (N T_dec))

M is the memory of N GPUs without the weights, m_r the mean KV cache of a request, the times are
those of an iteration with the batch M / m_r, and B is the largest batch that meets T_dec. The best
N does not depend on the load.
"""

from collections.abc import Sequence
from typing import NamedTuple

from gllm.plan.engine_times import EngineTimes, decode_step_work
from gllm.sim.deployment import roofline_deployment

DEGREES = (1, 2, 4, 8)
MAX_BATCH = 4096
"""Largest batch that is tried, in requests."""
MAX_MODEL_LEN = 4096
"""Longest request in tokens."""


class WorkerType(NamedTuple):
    """Throughput of an engine on N GPUs."""

    num_gpus: int
    memory_rate: float
    """Tokens per second and GPU of the batch that fills the memory."""
    slo_rate: float
    """Tokens per second and GPU of the largest batch within T_dec; 0 if none is."""
    memory_batch: float
    """M / m_r."""
    slo_batch: int
    """B."""

    @property
    def rate(self) -> float:
        """T_max: tokens per second per GPU."""
        return min(self.memory_rate, self.slo_rate)


def rate_workers(
    model: str,
    device: str,
    tpot_seconds: float,
    context: float,
    rank_link: str = "nvlink",
    degrees: Sequence[int] = DEGREES,
) -> list[WorkerType]:
    """Return the throughput of an engine for each tensor-parallel degree that fits the model.

    Args:
        model: A name of MODELS.
        device: A name of DEVICES.
        tpot_seconds: T_dec.
        context: Mean tokens of a request over its life: m_r in tokens.
        rank_link: A name of LINKS.
        degrees: Numbers of GPUs.

    Raises:
        ValueError: A name is unknown, or no degree holds the model.
    """
    workers, refusals = [], []
    for degree in degrees:
        try:
            deployment = roofline_deployment(
                model, device, 1, MAX_MODEL_LEN, degrees=(degree,), rank_link=rank_link
            )
        except ValueError as error:
            refusals.append(str(error))
            continue
        capacity = deployment.scheduler.num_blocks * deployment.scheduler.block_size
        batch = capacity / context
        times = EngineTimes(deployment.cost)
        seconds = times.total(decode_step_work(max(1, round(batch)), context))
        largest = times.largest_batch(context, tpot_seconds, MAX_BATCH)
        by_memory, by_slo = batch / (degree * seconds), largest / (degree * tpot_seconds)
        workers.append(WorkerType(degree, by_memory, by_slo, batch, largest))
    if not workers:
        raise ValueError(refusals[0])
    return workers


def best_worker(workers: Sequence[WorkerType]) -> WorkerType:
    """Return N*: the worker type with the highest throughput per GPU, the smallest of equals."""
    return max(workers, key=lambda worker: (worker.rate, -worker.num_gpus))
