"""Closed forms of the M/D/1 queue against simulated queues."""

from collections.abc import Callable
from math import inf
from random import Random

import pytest

from experiments.queueing import (
    mean_latency,
    pipeline_latency,
    tensor_parallel_crossover,
    tensor_parallel_latency,
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
