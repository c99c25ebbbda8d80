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


def throughput_by_degree(
    model: str,
    device: str,
    tpot_seconds: float,
    context: float,
    rank_link: str = "nvlink",
    degrees: Sequence[int] = DEGREES,
) -> list[WorkerType]:
    """Return the decode throughput of an engine for each tensor-parallel degree.

    Degrees at which the model does not fit are left out.

    Args:
        model: A name of MODELS.
        device: A name of DEVICES.
        tpot_seconds: Limit of the time per output token in seconds (T_dec in Aladdin).
        context: Mean number of KV cache tokens of a request over its lifetime (m_r in Aladdin).
        rank_link: Link between the GPUs of an engine: a name of LINKS.
        degrees: Tensor-parallel degrees to try.

    Raises:
        ValueError: A name is unknown, or the model does not fit at any degree.
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
    """Return the engine type with the highest throughput per GPU (N* in Aladdin).

    Among equals the fewest GPUs win.
    """
    return max(workers, key=lambda worker: (worker.rate, -worker.num_gpus))
