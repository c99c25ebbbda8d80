"""Closed forms of M/D/1 and M/D/c queues: latency of prefill, wait for one of several servers.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), section 3.1, Eq. 1 to 3: requests of one length and
batches of one request. Utilization is the arrival rate times the execution time on one device. For
several servers: Sakasegawa, "An approximation formula Lq = a rho^b / (1 - rho)", 1977.
"""

from math import inf, sqrt


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


def wait_probability(utilization: float, num_servers: float = 1.0) -> float:
    """Return the probability that a request finds all servers busy.

    Args:
        utilization: Share of the servers that are busy in the mean, 0..1.
        num_servers: At least 1.

    Raises:
        ValueError: An argument is out of range.
    """
    if not 0 <= utilization <= 1 or num_servers < 1:
        raise ValueError(
            f"utilization is {utilization}, num_servers {num_servers}: they must be in 0..1 and at "
            "least 1"
        )
    return utilization ** (sqrt(2 * (num_servers + 1)) - 1)


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


def replicated_latency(rate: float, execution: float, replicas: int) -> float:
    """Return the mean latency in seconds of replicas that get equal random shares of the requests.

    Args:
        rate: Requests per second of all replicas together.
        execution: Seconds on one device.
        replicas: Number of devices.
    """
    return mean_latency(rate / replicas, execution)


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
