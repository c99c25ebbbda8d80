"""Capacity searches on queues whose capacity a fine grid of rates shows."""

import os
import random
from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate, product
from math import inf
from pathlib import Path

import pytest

from gllm.sim.capacity import (
    CAPACITY_RULES,
    RATE_STEP,
    CapacityRule,
    RateTrial,
    find_capacity,
    make_rate_trial,
    stopped_trial,
)
from gllm.sim.deployment import roofline_deployment, simulate
from gllm.sim.metrics.delays import measure_rate_trial
from gllm.sim.workloads.requests import make_workload
from tests.support.full_cases import full_but

SUSTAINED, VIDUR = CAPACITY_RULES["sustained"], CAPACITY_RULES["vidur"]
SERVICE_SECONDS = 0.1
NUM_REQUESTS = 2000
STARTS = (0.3, 4.0, 9.6, 10.0, 170.0)
"""Rates at which searches start; the queue serves 10 requests per second."""


def poisson_arrivals(rate: float, seed: int, num_requests: int = NUM_REQUESTS) -> list[float]:
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(num_requests)))


def run_queue(rate: float, seed: int = 0, num_requests: int = NUM_REQUESTS) -> RateTrial:
    """Return the delays of a queue with Poisson arrivals and a constant service time."""
    free_at, delays = 0.0, []
    arrivals = poisson_arrivals(rate, seed, num_requests)
    for arrival in arrivals:
        start = max(arrival, free_at)
        delays.append(start - arrival)
        free_at = start + SERVICE_SECONDS
    return make_rate_trial(arrivals, delays)


@cache
def grid_capacity(rule: CapacityRule, seed: int) -> float:
    """Return the queue's highest sustained rate of a grid from 5 to 20 requests per second."""
    rates = [5 * 1.005**index for index in range(280)]
    return max(rate for rate in rates if rule.is_sustained(run_queue(rate, seed)))


@pytest.mark.parametrize(
    ("start_rate", "seed"),
    full_but(list(product(STARTS, (0,))), list(product(STARTS, range(5)))),
)
def test_the_capacity_is_that_of_a_fine_grid(start_rate: float, seed: int) -> None:
    """The result is within 2.5 %, in at most 20 simulations without the confirmations."""

    def run(rate: float) -> RateTrial:
        return run_queue(rate, seed)

    capacity = find_capacity(run, start_rate)
    expected = grid_capacity(SUSTAINED, seed)
    assert expected / RATE_STEP <= capacity.rate <= expected * 1.005
    # The seed decides at which rate they arrive in fact. Delays of at most 5 s at the end of 200 s
    # permit an overload of 2.5 %.
    arriving = NUM_REQUESTS / poisson_arrivals(expected, seed)[-1]
    assert 9.5 < arriving < 10 * (1 + SUSTAINED.max_p99_delay_seconds / 200)
    assert len(capacity.trials) - capacity.num_confirmations <= 20
    trials = dict(capacity.trials)
    assert SUSTAINED.is_sustained(trials[capacity.rate])
    higher = [trial for rate, trial in trials.items() if 1 < rate / capacity.rate < 1.06]
    assert len(higher) == 2
    assert not any(map(SUSTAINED.is_sustained, higher))


@pytest.mark.parametrize("start_rate", STARTS)
def test_the_bisection_of_vidur(start_rate: float) -> None:
    capacity = find_capacity(run_queue, start_rate, VIDUR)
    expected = grid_capacity(VIDUR, 0)
    assert expected / 1.03 <= capacity.rate <= expected * 1.005
    # Only the 99th percentile counts, so it goes beyond what the queue serves in the long run.
    assert capacity.rate >= find_capacity(run_queue, start_rate).rate / RATE_STEP
    assert len(capacity.trials) <= 20


def test_the_bisection_of_vidur_doubles_its_interval_by_the_delay() -> None:
    """By hand, from start 1: interval 0-2, then four times as far, twice as far, as far."""
    delays = {1.0: 0.1, 4.5: 1.0, 10.25: 3.0, 13.125: 9.0}

    def run(rate: float) -> RateTrial:
        return RateTrial(100, delays.get(rate, 9.0 if rate > 10.25 else 3.0), 0, 0)

    rates = [rate for rate, _ in find_capacity(run, 1.0, VIDUR).trials]
    assert rates[:4] == [1.0, 4.5, 10.25, 13.125]


def step_trial(sustained: Callable[[float], bool], bounded: float) -> Callable[[float], RateTrial]:
    """Return a system with bounded delays up to a rate, whose queue grows unless sustained."""

    def run(rate: float) -> RateTrial:
        p99 = 1.0 if rate <= bounded else 50.0
        return RateTrial(1000, p99, 1.0, 1.0, not sustained(rate))

    return run


def test_a_rate_that_fails_by_chance_does_not_hide_the_capacity() -> None:
    """A bisection over whole trials would take 4 x 1.025^k in the hole for the capacity."""
    run = step_trial(lambda rate: not 5 < rate < 8, bounded=9.0)
    assert 9 / RATE_STEP <= find_capacity(run, 4.0).rate <= 9
    run = step_trial(lambda rate: rate < 6 or 8 < rate < 8.5, bounded=9.0)
    assert 8.5 / RATE_STEP <= find_capacity(run, 4.0).rate <= 8.5
    # Far below the highest bounded rate the steps double, and a bisection ends the search.
    run = step_trial(lambda rate: rate < 6, bounded=9.0)
    capacity = find_capacity(run, 4.0)
    assert 6 / RATE_STEP <= capacity.rate <= 6
    assert len(capacity.trials) - capacity.num_confirmations <= 20


def test_a_sustained_rate_above_a_failed_one_is_the_capacity() -> None:
    def run(rate: float) -> RateTrial:
        is_bounded = rate <= 10 or 10.3 < rate <= 10.55
        return RateTrial(1000, 1.0 if is_bounded else 9.0, 1.0, 1.0)

    # 10 x 1.025^2 = 10.51 is one of the two confirmations.
    assert find_capacity(run, 10.0).rate == pytest.approx(10 * RATE_STEP**2)


def run_slow_queue(rate: float) -> RateTrial:
    return run_queue(rate, seed=3, num_requests=1000)


def test_confirmations_move_the_capacity_over_a_failed_rate() -> None:
    """The bisection ends one step above the start; two steps above fail, three are sustained."""

    def run(rate: float) -> RateTrial:
        is_failed = 10.3 < rate < 10.6 or rate > 10.9
        delay = 9.0 if is_failed else 0.1
        return RateTrial(NUM_REQUESTS, delay, delay, delay)

    assert find_capacity(run, 10.0).rate == pytest.approx(10.0 * RATE_STEP**3)


def log_process(folder: Path, rate: float) -> RateTrial:
    """Run a queue of 1,000 requests; leave a file per process and rate."""
    (folder / f"{os.getpid()}-{rate}").touch()
    return run_slow_queue(rate)


@pytest.mark.parametrize("rule", [SUSTAINED, VIDUR])
def test_processes_do_not_change_the_result(rule: CapacityRule, tmp_path: Path) -> None:
    run = partial(log_process, tmp_path)
    capacity = find_capacity(run, 4.0, rule, jobs=2)
    names = [path.name.partition("-") for path in tmp_path.iterdir()]
    assert capacity == find_capacity(run_slow_queue, 4.0, rule)
    assert str(os.getpid()) not in {name[0] for name in names}
    rates = {float(name[2]) for name in names}
    assert rates > {rate for rate, _ in capacity.trials}, "no rate was simulated in advance"


@pytest.mark.parametrize("rule", [SUSTAINED, VIDUR])
@pytest.mark.parametrize("jobs", [1, 2])
def test_every_trial_is_reported_once(rule: CapacityRule, jobs: int) -> None:
    reported: list[tuple[float, RateTrial]] = []

    def on_trial(rate: float, trial: RateTrial) -> None:
        reported.append((rate, trial))

    assert find_capacity(run_queue, 8.0, rule, jobs, on_trial).trials == tuple(reported)


def test_a_queue_that_grows_is_overloaded() -> None:
    """By the rule of all planners; that of Vidur looks at the delays alone."""
    assert SUSTAINED.is_sustained(RateTrial(1000, 3.0, 0.5, 0.7))
    assert not SUSTAINED.is_sustained(RateTrial(1000, 3.0, 0.5, 0.7, True))
    assert not SUSTAINED.is_sustained(RateTrial(1000, 5.1, 0.5, 0.5))
    assert VIDUR.is_sustained(RateTrial(1000, 3.0, 0.5, 0.7, True))
    for seed in range(20):
        assert not run_queue(9.0, seed).is_growing
        assert run_queue(12.0, seed).is_growing
        assert not make_rate_trial([0.0] * 100, [0.1 * index for index in range(100)]).is_growing


def test_figures_of_delays() -> None:
    trial = make_rate_trial(range(5), [1.0, 3.0, 4.0, 6.0, 8.0])
    assert trial[:-1] == pytest.approx((5, 7.92, 2.0, 6.0, False))
    assert trial.growth == 3.0
    assert make_rate_trial([0.0, 1.0], [0.0, 0.0]).growth == 1.0
    assert make_rate_trial([0.0, 1.0], [0.0, 0.1]).growth == inf
    assert make_rate_trial([0.0, 1.0], [0.0, None]).p99_delay_seconds == inf
    assert stopped_trial(5) == RateTrial(5, inf, inf, inf, True)
    assert stopped_trial(5).growth == inf


@pytest.mark.parametrize("rule", [SUSTAINED, VIDUR])
def test_a_search_without_a_result_tells_why(rule: CapacityRule) -> None:
    def overloaded(rate: float) -> RateTrial:
        return RateTrial(1000, inf, 1.0, 9.0)

    with pytest.raises(ValueError, match=r"start at another rate|is sustained"):
        find_capacity(overloaded, 1.0, rule)
    with pytest.raises(ValueError, match="start_rate is 0"):
        find_capacity(overloaded, 0.0, rule)


def test_a_short_run_shows_no_overload() -> None:
    with pytest.raises(ValueError, match="simulate at least 1000"):
        find_capacity(lambda rate: run_queue(rate, num_requests=999), 1.0)
    with pytest.raises(ValueError, match="at least 2 requests"):
        make_rate_trial([0.0], [1.0])


def run_scheduler(rate: float) -> RateTrial:
    """Return the delays of the production scheduler on one simulated device."""
    deployment = roofline_deployment("qwen2.5-14b", "L20", 1, 1024)
    jobs = make_workload("uniform:100,900,1,8", SUSTAINED.num_requests(rate, 0), rate)
    return measure_rate_trial(simulate(deployment, jobs).requests.values())


@pytest.mark.long
@pytest.mark.parametrize("start_rate", [1.0, 9.0])
def test_the_capacity_of_the_scheduler_is_that_of_a_fine_grid(start_rate: float) -> None:
    capacity = find_capacity(run_scheduler, start_rate)
    assert len(capacity.trials) - capacity.num_confirmations <= 20
    rates = [capacity.rate * 1.005**index for index in range(-4, 24)]
    best = max(rate for rate in rates if SUSTAINED.is_sustained(run_scheduler(rate)))
    # Whether a rate counts as sustained is not monotone to the last step of the grid.
    assert capacity.rate <= best <= capacity.rate * RATE_STEP * 1.005
