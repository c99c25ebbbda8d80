"""Wait for one of several servers against simulated queues."""

from heapq import heapify, heapreplace
from itertools import product
from random import Random

import pytest

from gllm.plan.engine_bounds import wait_probability
from tests.support.full_cases import full_but

NUM_ARRIVALS = 400_000


def test_one_server_is_busy_for_its_utilization() -> None:
    assert wait_probability(0.7) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("utilization", "num_servers"),
    full_but([(0.85, 4)], list(product([0.7, 0.85, 0.95], [4, 32]))),
)
def test_the_wait_for_servers_matches_a_simulated_queue(
    utilization: float, num_servers: int
) -> None:
    rng = Random(2)
    free_times = [0.0] * num_servers
    heapify(free_times)
    now = total = 0.0
    for _ in range(NUM_ARRIVALS):
        now += rng.expovariate(utilization * num_servers)
        begin = max(now, free_times[0])
        heapreplace(free_times, begin + 1.0)
        total += begin - now
    wait = wait_probability(utilization, num_servers) / (2 * num_servers * (1 - utilization))
    # The approximation is of exponential service times; long waits are what limits a rate.
    assert wait == pytest.approx(total / NUM_ARRIVALS, rel=0.25, abs=2e-3)


@pytest.mark.parametrize(("utilization", "num_servers"), [(-0.1, 1), (1.1, 1), (0.5, 0)])
def test_impossible_queues_are_refused(utilization: float, num_servers: int) -> None:
    with pytest.raises(ValueError, match="utilization is"):
        wait_probability(utilization, num_servers)
