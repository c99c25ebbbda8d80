"""Sequential test of attainment against queues whose distribution of waits is known."""

from collections.abc import Callable, Sequence
from decimal import Decimal, getcontext
from functools import partial
from math import exp, factorial, inf, log
from typing import Any

import numpy as np
import pytest

from gllm.observability.latency import RequestTimeline
from gllm.options.slo import parse_slo
from gllm.plan.attainment import (
    AttainmentTest,
    AttainmentVerdict,
    JudgedRequest,
    goals_of,
    judge_line,
)
from gllm.sim.capacity import SearchEndedError
from gllm.sim.stability import is_growing, num_in_system
from tests.support.examples import num_examples

GOAL = 0.9
NUM_SEEDS = num_examples(4, 60)
SERVICES = ("exponential", "constant")
"""M/M/1 and M/D/1, with a mean service time of 1 s."""


def served(arrivals: Any, services: Any, limit: float = inf) -> list[JudgedRequest]:
    """Return the requests of a first-come queue; those that wait up to the limit are within it."""
    work = np.cumsum(services)
    finishes = work + np.maximum.accumulate(arrivals - (work - services))
    waits = finishes - services - arrivals
    scores = (waits <= limit).astype(float).tolist()
    rows = zip(arrivals.tolist(), finishes.tolist(), scores, strict=True)
    return [JudgedRequest(arrival, finish, (score,)) for arrival, finish, score in rows]


def queue(service: str, load: float, limit: float, seed: int, count: int) -> list[JudgedRequest]:
    """Return the first requests of a queue with Poisson arrivals: a prefix of any longer run."""
    arrivals = np.cumsum(np.random.default_rng([seed, 0]).exponential(1 / load, count))
    is_constant = service == "constant"
    draws = np.random.default_rng([seed, 1]).exponential(1.0, count)
    return served(arrivals, np.ones(count) if is_constant else draws, limit)


def share_within(service: str, load: float, limit: float) -> float:
    """Return the share of waits up to a limit: closed forms of M/M/1 and M/D/1 (Erlang)."""
    if service == "exponential":
        return 1 - load * exp(-(1 - load) * limit)
    getcontext().prec = 60
    rho, x = Decimal(load), Decimal(limit)
    terms = (
        (rho * (k - x)) ** k / factorial(k) * (-(rho * (k - x))).exp()
        for k in range(int(limit) + 1)
    )
    return float((1 - rho) * sum(terms))


def limit_for(service: str, load: float, share: float) -> float:
    """Return the wait that a share of the requests does not exceed."""
    low, high = 0.0, 2 * log(load / (1 - share)) / (1 - load)
    for _ in range(30):
        middle = (low + high) / 2
        is_below = share_within(service, load, middle) < share
        low, high = (middle, high) if is_below else (low, middle)
    return high


def verdicts(service: str, load: float, limit: float) -> list[AttainmentVerdict]:
    """Return the verdict of each seed."""
    test = AttainmentTest((GOAL,))
    return [
        test.run(partial(queue, service, load, limit, seed)).verdict for seed in range(NUM_SEEDS)
    ]


def share_of(found: Sequence[AttainmentVerdict], *right: AttainmentVerdict) -> float:
    return sum(verdict in right for verdict in found) / len(found)


def loads(*quick: float, slow: Sequence[float]) -> pytest.MarkDecorator:
    """Run a test with some loads; with the slow ones, whose runs are long, in `make test-all`."""
    full = [pytest.param(load, marks=pytest.mark.full) for load in slow]
    return pytest.mark.parametrize("load", [*quick, *full])


@pytest.mark.parametrize("service", SERVICES)
@loads(0.5, slow=(0.8, 0.9))
def test_stable_queues_are_judged_as_their_closed_forms(service: str, load: float) -> None:
    met = verdicts(service, load, limit_for(service, load, 0.99))
    missed = verdicts(service, load, limit_for(service, load, 0.8))
    # A queue close to its capacity may stay undecided, which is not met either.
    undecided = {AttainmentVerdict.UNDECIDED} if load > 0.8 else set()
    assert share_of(met, AttainmentVerdict.MET) >= (0.9 if undecided else 0.95)
    assert share_of(missed, AttainmentVerdict.MISSED, *undecided) >= 0.95


@pytest.mark.parametrize("service", SERVICES)
@loads(1.1, 1.2, slow=(1.0, 1.05))
def test_a_queue_at_its_capacity_or_above_is_not_accepted(service: str, load: float) -> None:
    assert share_of(verdicts(service, load, 40.0), AttainmentVerdict.MET) <= 0.05
    # However loose the limit is.
    endless = verdicts(service, load, inf)
    assert AttainmentVerdict.MET not in endless
    assert load < 1.1 or share_of(endless, AttainmentVerdict.OVERLOADED) >= 0.95


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("load", [0.5, 0.8, 0.9, 0.95])
def test_a_stable_queue_is_not_called_overloaded(service: str, load: float) -> None:
    for count in (100, 300, 1000, 4000):
        for seed in range(NUM_SEEDS):
            requests = queue(service, load, inf, seed, count)
            arrivals = [request.arrival for request in requests]
            finishes = [request.finish for request in requests]
            assert not is_growing(num_in_system(arrivals, finishes))


def test_bursts_at_half_the_capacity_are_not_overloaded() -> None:
    # 400 requests at once, each of 1 s, every 800 s.
    times = np.sort(np.repeat(np.arange(5) * 800.0, 400) + np.tile(np.arange(400) * 1e-3, 5))
    for count in (500, 1000, 1700, 2000):
        requests = served(times[:count], np.ones(count))
        assert AttainmentTest(()).judge(requests).verdict is not AttainmentVerdict.OVERLOADED


@pytest.mark.parametrize("goals", [(GOAL,), ()])
def test_a_system_that_fills_is_not_overloaded_and_not_accepted_before_it_is_full(
    goals: tuple[float, ...],
) -> None:
    # Endless servers: each request takes 100 s, so about 1,000 of them run at 10 per second.
    times = np.cumsum(np.random.default_rng(0).exponential(0.1, 32_000))
    found = []
    for count in (500, 1000, 2000, 4000, 32_000):
        scores = (1.0,) * len(goals)
        requests = [JudgedRequest(time, time + 100, scores) for time in times[:count].tolist()]
        found.append(AttainmentTest(goals).judge(requests).verdict)
    assert found == [AttainmentVerdict.UNDECIDED] * 4 + [AttainmentVerdict.MET]


@pytest.mark.parametrize(("num_whole", "seconds"), [(0, 10.0), (1, 10.0), (2, 10.0), (1, 0.1)])
def test_a_run_that_is_cut_off_leaves_the_shorter_one(num_whole: int, seconds: float) -> None:
    """It is likely to meet the goal if it has lasted several times as long as a request."""
    runs: list[int] = []

    def simulate(count: int) -> list[JudgedRequest]:
        if len(runs) == num_whole:
            raise SearchEndedError("the budget is spent")
        runs.append(count)
        return [JudgedRequest(seconds * i, seconds * i + 9, (1.0,)) for i in range(count)]

    test = AttainmentTest((0.99,), min_requests=50)
    if not num_whole:
        with pytest.raises(SearchEndedError):
            test.run(simulate)
        return
    result = test.run(simulate)
    assert result.verdict is AttainmentVerdict.UNDECIDED
    assert result.num_requests == runs[-1] == 50 * num_whole
    assert result.is_likely == (seconds == 10.0)
    assert "goal 99 %" in str(result)


@pytest.mark.parametrize(("share", "lengths"), [(1.0, [100, 200, 400, 800]), (0.5, [100])])
def test_a_run_is_extended_until_it_decides(share: float, lengths: list[int]) -> None:
    seen = []

    def simulate(count: int) -> list[JudgedRequest]:
        seen.append(count)
        scores = (np.random.default_rng(3).random(count) < share).astype(float).tolist()
        return [JudgedRequest(10.0 * i, 10.0 * i + 1, (score,)) for i, score in enumerate(scores)]

    test = AttainmentTest((0.99,), min_requests=100, max_requests=900)
    result = test.run(simulate)
    assert seen == lengths
    assert result.is_met == (share == 1.0)
    assert result.num_requests == lengths[-1]
    assert result.low <= result.share <= result.high
    # A test that may simulate no more is not met.
    short = AttainmentTest((0.99,), min_requests=100, max_requests=150).run(simulate)
    assert not short.is_met
    assert short.num_requests == min(lengths[-1], 150)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.97])
def test_intervals_of_independent_requests_hold_their_share(share: float) -> None:
    test = AttainmentTest((GOAL,), min_requests=1000, max_requests=1000)
    num_held = 0
    for seed in range(20):
        scores = (np.random.default_rng(seed).random(1000) < share).astype(float).tolist()
        requests = [JudgedRequest(float(i), i + 0.5, (score,)) for i, score in enumerate(scores)]
        result = test.judge(requests)
        assert abs(result.share - share) < 0.06
        assert result.high - result.low < 0.12
        num_held += result.low <= share <= result.high
    assert num_held >= 18


def test_every_objective_of_an_slo_has_a_score() -> None:
    slo = parse_slo("ttft=1,tpot=0.5,itl:p99=0.4,e2el:p50=3", 0.8)
    assert goals_of(slo) == (0.8, 0.99, 0.5)
    # TTFT 1 s, gaps 0.3, 0.3, 0.6 s, TPOT 0.4 s, E2EL 2.2 s.
    line = RequestTimeline(10.0, [11.0, 11.3, 11.6, 12.2], 4)
    assert judge_line(line, slo) == JudgedRequest(10.0, 12.2, (1.0, 2 / 3, 1.0))
    late = RequestTimeline(10.0, [11.5], 1)
    assert judge_line(late, slo).scores == (0.0, 1.0, 1.0)
    assert judge_line(RequestTimeline(10.0), slo) == JudgedRequest(10.0, inf, (0.0, 0.0, 0.0))


def test_the_objective_nearest_to_its_goal_is_reported() -> None:
    requests = [JudgedRequest(10.0 * i, 10.0 * i + 1, (1.0, float(i % 2))) for i in range(1000)]
    result = AttainmentTest((0.9, 0.4)).judge(requests)
    assert result.is_met
    assert result.share == pytest.approx(0.5, abs=0.01)
    assert AttainmentTest((0.9, 0.6)).judge(requests).verdict is AttainmentVerdict.MISSED
    assert str(result).startswith("met: 49.9 % of 1000 requests within the limits")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttainmentTest((0.0,)), "goal is 0"),
        (lambda: AttainmentTest((0.9,), 100, 50), "max_requests 50"),
        (lambda: AttainmentTest((0.9,), confidence=1.0), "confidence is 1"),
        (lambda: AttainmentTest((0.9,)).judge([]), "simulate at least 1"),
    ],
)
def test_invalid_tests_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
