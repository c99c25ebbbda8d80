"""Closed forms of M/D/1 queues: latency of prefill with one device, stages and ranks.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), section 3.1, Eq. 1 to 3: requests of one length and
batches of one request. Utilization is the arrival rate times the execution time on one device.
"""

from math import inf


def mean_latency(rate: float, execution: float, slowest: float | None = None) -> float:
    """Return the mean time in seconds from arrival to completion; infinite under overload.

    Args:
        rate: Requests per second.
        execution: Seconds that a request takes on all stages together.
        slowest: Seconds on the slowest stage; default: one stage.

    Raises:
        ValueError: The rate is negative, or a time is not above 0.
    """
    slowest = execution if slowest is None else slowest
    if rate < 0 or execution <= 0 or slowest <= 0:
        raise ValueError(
            f"rate is {rate}, execution {execution} and slowest {slowest}: the rate must be at "
            "least 0, the times above 0"
        )
    utilization = rate * slowest
    if utilization >= 1:
        return inf
    return execution + rate * slowest**2 / (2 * (1 - utilization))


def pipeline_latency(rate: float, execution: float, stages: int) -> float:
    """Return the mean latency in seconds with equal stages on as many devices.

    Args:
        rate: Requests per second.
        execution: Seconds on one device.
        stages: Number of stages.
    """
    return mean_latency(rate, execution, execution / stages)


def tensor_parallel_latency(rate: float, execution: float, speedup: float) -> float:
    """Return the mean latency in seconds with tensor parallelism.

    Args:
        rate: Requests per second.
        execution: Seconds on one device.
        speedup: Execution time on one device over that on all of them.
    """
    return mean_latency(rate, execution / speedup)


def tensor_parallel_crossover(speedup: float) -> float:
    """Return the utilization from which two stages are faster than two ranks.

    Args:
        speedup: Of two ranks, above 1 and below 2.

    Raises:
        ValueError: The speedup is out of range: one of both is always faster.
    """
    if not 1 < speedup < 2:
        raise ValueError(f"speedup is {speedup}, but must be above 1 and below 2")
    low, high = 0.0, speedup
    for _ in range(60):
        middle = (low + high) / 2
        if tensor_parallel_latency(middle, 1.0, speedup) < pipeline_latency(middle, 1.0, 2):
            low = middle
        else:
            high = middle
    return low
