"""Closed forms of the M/D/1 queue against simulated queues."""

from collections.abc import Callable
from heapq import heapify, heapreplace
from itertools import product
from math import inf
from random import Random

import pytest

from gllm.sim.queueing import (
    mean_latency,
    pipeline_latency,
    replicated_latency,
    tensor_parallel_crossover,
    tensor_parallel_latency,
    wait_probability,
)
from tests.support.full_cases import full_but

NUM_ARRIVALS = 400_000


def simulate_mean_latency(rate: float, stages: list[float]) -> float:
    """Return the mean latency of Poisson arrivals in a row of stages with fixed times."""
    rng = Random(1)
    free_times = [0.0] * len(stages)
    now = total = 0.0
    for _ in range(NUM_ARRIVALS):
        now += rng.expovariate(rate)
        end = now
        for stage, seconds in enumerate(stages):
            end = free_times[stage] = max(end, free_times[stage]) + seconds
        total += end - now
    return total / NUM_ARRIVALS


@pytest.mark.parametrize("utilization", full_but([0.6], [0.3, 0.6, 0.8]))
@pytest.mark.parametrize(
    ("latency", "stages"),
    [
        (lambda rate: mean_latency(rate, 1.0), [1.0]),
        (lambda rate: pipeline_latency(rate, 1.0, 2), [0.5, 0.5]),
        (lambda rate: tensor_parallel_latency(rate, 1.0, 1.6), [1 / 1.6]),
    ],
    ids=["one", "pipeline", "tensor-parallel"],
)
def test_closed_forms_match_simulated_queues(
    latency: Callable[[float], float], stages: list[float], utilization: float
) -> None:
    assert latency(utilization) == pytest.approx(
        simulate_mean_latency(utilization, stages), rel=0.02
    )


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


def test_replicas_share_the_rate() -> None:
    assert replicated_latency(1.2, 1.0, 2) == mean_latency(0.6, 1.0)


def test_the_equations_of_the_paper() -> None:
    """Eq. 1 and 3, and Eq. 2 as it is derived: D + R D^2 / (4 (2 - R D))."""
    rate, execution, speedup = 1.1, 0.7, 1.4
    load = rate * execution
    assert mean_latency(rate, execution) == pytest.approx(
        execution + load * execution / (2 * (1 - load))
    )
    assert pipeline_latency(rate, execution, 2) == pytest.approx(
        execution + load * execution / (4 * (2 - load))
    )
    assert tensor_parallel_latency(rate, execution, speedup) == pytest.approx(
        execution / speedup + load * execution / (2 * speedup * (speedup - load))
    )


@pytest.mark.parametrize(
    ("speedup", "utilization", "tolerance"),
    [(1.5, 0.936, 0.005), (1.3, 0.61, 0.01), (1.7, 1.26, 0.01)],
)
def test_ranks_win_below_a_utilization(
    speedup: float, utilization: float, tolerance: float
) -> None:
    assert tensor_parallel_crossover(speedup) == pytest.approx(utilization, abs=tolerance)


def test_overload_has_no_mean_latency() -> None:
    assert mean_latency(1.0, 1.0) == inf


@pytest.mark.parametrize("arguments", [(-1.0, 1.0), (1.0, 0.0), (1.0, 1.0, -1.0)])
def test_bad_arguments_are_named(arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="slowest"):
        mean_latency(*arguments)
    with pytest.raises(ValueError, match="speedup"):
        tensor_parallel_crossover(2.0)
