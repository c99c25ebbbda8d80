"""Arrival times of requests: Poisson, gamma, bursts, or all at once."""

import math
import random
from itertools import accumulate

from gllm.sim.workloads.distributions import parse_numbers


def sample_arrival_times(kind: str, count: int, rate: float, seed: int) -> list[float]:
    """Sample arrival times in seconds.

    Args:
        kind: poisson; gamma:CV, gaps with that coefficient of variation; burst:SIZE, bursts at
            equal intervals; static, all at time 0.
        count: Number of arrivals.
        rate: Arrivals per second.
        seed: Seed of the random numbers.

    Raises:
        ValueError: The kind is unknown or the rate is not positive.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"rate is {rate}, but must be above 0 requests per second")
    rng = random.Random(seed + 1)
    name, _, value = kind.partition(":")
    if kind == "static":
        return [0.0] * count
    if name == "burst":
        size = parse_numbers(value)
        if len(size) != 1 or size[0] < 1 or size[0] % 1:
            raise ValueError(f"arrivals {kind!r}: burst takes a whole number, as in burst:8")
        return [index // int(size[0]) * size[0] / rate for index in range(count)]
    if kind != "poisson" and name != "gamma":
        raise ValueError(
            f"arrivals {kind!r} is none of poisson, gamma:CV, burst:SIZE, static, replay"
        )
    variation = [1.0] if kind == "poisson" else parse_numbers(value)
    if len(variation) != 1 or variation[0] <= 0:
        raise ValueError(f"arrivals {kind!r}: gamma takes a CV above 0, as in gamma:2")
    shape = variation[0] ** -2
    gaps = [rng.gammavariate(shape, 1 / (rate * shape)) for _ in range(count)]
    return list(accumulate(gaps))
