"""Sequential test of a design: is the share of requests within the SLO at least the goal?

Every planner judges its designs by this test. A run of fixed length cannot: neighbouring requests
wait in the same queue, so thousands of them may say as little as ten independent ones, and an
overloaded system looks well while its queue is still short. The test therefore extends a run until
the figures decide:

    test = AttainmentTest(goals_of(slo))
    result = test.run(simulate)
    if result.is_met: ...

`simulate(count)` returns the `JudgedRequest` of the first `count` requests; `judge_line` makes one
from the latencies of a request. The requests of a shorter run have to be the first ones of a longer
run, with the same arrivals and lengths. Give two designs the same seed to compare them by common
random numbers. Simulations are not called with more than `max_requests` requests.

- Warm-up is left out (MSER-5; White, "An effective truncation heuristic for bias reduction in
  simulation output", 1997), and so are the last requests, which run in a system that empties.
- The interval of a share is Wilson's, for the number of independent requests that batch means of
  the run are worth.
- A run whose number of requests in the system grows is overloaded, whatever its share
  (`gllm.sim.stability`). A design is accepted only if that number has gone up and down often enough
  to be called stationary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from gllm.observability.latency import RequestTimeline
from gllm.options.slo import Slo
from gllm.sim.capacity import SearchEndedError
from gllm.sim.stability import (
    NumberSeries,
    count_relaxations,
    is_growing,
    num_in_system,
    slope_deviations,
    warm_up_length,
)

NUM_BATCHES = 20
"""Batches of a run whose means estimate the variance of its share."""
MIN_MISSING_BATCHES = NUM_BATCHES // 2
"""Batches with a request beyond the limits from which their means say how such requests cluster."""
MIN_RELAXATIONS = 20.0
"""Relaxation times that an accepted run lasts at least."""
MAX_SLOPE_DEVIATIONS = 2.0
"""Slope of the number in the system, in standard errors, up to which a run may be accepted."""
MIN_SOJOURNS = 8.0
"""Least length of an accepted run, in mean times that a request spends in the system."""
EXTENSION = 2
"""Factor by which a run is extended."""


class AttainmentVerdict(StrEnum):
    """Result of a sequential test."""

    MET = "met"
    MISSED = "missed"
    OVERLOADED = "overloaded"
    UNDECIDED = "undecided"


class JudgedRequest(NamedTuple):
    """One simulated request: times in seconds, and its score for each goal."""

    arrival: float
    finish: float
    """Time of its last token; infinite if it never finished."""
    scores: tuple[float, ...]
    """By goal: 1 if the request is within the limit, 0 if not. For gaps between tokens the share of
    its gaps within the limit."""


def goals_of(slo: Slo) -> tuple[float, ...]:
    """Return the share (0..1) that each objective of an SLO demands, in the order of `judge_line`.

    The limits of each request together are one objective, each limit of a percentile is another.
    """
    shares = (slo.attainment,) if slo.request_limits else ()
    return (*shares, *(limit.percent / 100 for limit in slo.percentiles))


def judge_line(line: RequestTimeline, slo: Slo) -> JudgedRequest:
    """Return the scores of a request of a simulation for the objectives of an SLO.

    A request without output misses every limit. One without a TPOT or without gaps between tokens
    meets the limits of these.
    """
    if not line.times:
        return JudgedRequest(line.arrival, np.inf, (0.0,) * len(goals_of(slo)))
    values = {"ttft": line.ttft, "tpot": line.tpot, "e2el": line.e2el}

    def meets(metric: str, seconds: float) -> bool:
        value = values[metric]
        return value is None or value <= seconds

    scores = []
    if limits := slo.request_limits:
        scores.append(float(all(meets(*limit) for limit in limits.items())))
    for metric, _, seconds in slo.percentiles:
        if metric == "itl":
            gaps = line.itl
            scores.append(sum(gap <= seconds for gap in gaps) / len(gaps) if gaps else 1.0)
        else:
            scores.append(float(meets(metric, seconds)))
    return JudgedRequest(line.arrival, line.times[-1], tuple(scores))


@dataclass(frozen=True)
class Attainment:
    """Verdict of a test, with the share of requests within the limits and its interval."""

    verdict: AttainmentVerdict
    share: float
    """Share (0..1) of the requests after the warm-up that are within the limits; of several goals
    the one that is nearest to being missed."""
    low: float
    """Lower end of the confidence interval of the share."""
    high: float
    """Upper end."""
    num_requests: int
    """Requests of the longest run."""
    goal: float = 0.0
    """Goal (0..1) of the share."""
    reaches_goals: bool = False
    """True if every share, without its interval, is at least its goal, in a run that lasts several
    times as long as a request."""

    @property
    def is_met(self) -> bool:
        """True if the share is at least the goal and the system is stable."""
        return self.verdict is AttainmentVerdict.MET

    @property
    def is_open(self) -> bool:
        """True if a longer run may decide."""
        return self.verdict is AttainmentVerdict.UNDECIDED

    @property
    def is_likely(self) -> bool:
        """True if the goals are met, or reached by a run that is too short to decide.

        A planner that takes the second for an answer has to say that it is undecided.
        """
        return self.is_met or (self.is_open and self.reaches_goals)

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {100 * self.share:.1f} % of {self.num_requests} requests within the "
            f"limits ({100 * self.low:.1f} to {100 * self.high:.1f} %; goal {100 * self.goal:g} %)"
        )


@dataclass(frozen=True)
class AttainmentTest:
    """Sequential test of the share of requests within the SLO against goals.

    Raises:
        ValueError: A number is out of range.
    """

    goals: tuple[float, ...]
    """Share (0..1) of the requests that has to be within the limits, for each score of a request;
    empty to test only that the system is stable."""
    min_requests: int = 1000
    """Requests of the first run."""
    max_requests: int = 32_000
    """Requests of the longest run. A test that it does not decide is undecided."""
    confidence: float = 0.95
    """Probability that the verdict is right, for shares at the goal."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        for goal in self.goals:
            if not 0 < goal <= 1:
                raise ValueError(f"goal is {goal}: give shares above 0 and at most 1")
        if not 0 < self.min_requests <= self.max_requests:
            raise ValueError(
                f"min_requests is {self.min_requests} and max_requests {self.max_requests}: give "
                "at least 1, and no fewer at most"
            )
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence is {self.confidence}: give a number in (0.5, 1)")

    def run(self, simulate: Callable[[int], Sequence[JudgedRequest]]) -> Attainment:
        """Extend a run until it decides for or against the goals, and return the verdict.

        Args:
            simulate: Simulates the first `count` requests of the workload and returns them in the
                order of arrival. If it raises SearchEndedError in an extension, the shorter run
                counts.

        Raises:
            SearchEndedError: The first run was cut off.
        """
        count, result = self.min_requests, None
        while True:
            try:
                result = self.judge(simulate(count))
            except SearchEndedError:
                if result is None:
                    raise
                return result
            if result.verdict is not AttainmentVerdict.UNDECIDED or count >= self.max_requests:
                return result
            count = min(EXTENSION * count, self.max_requests)

    def _count_looks(self) -> int:
        """Return the number of runs at most."""
        count, looks = self.min_requests, 1
        while count < self.max_requests:
            count, looks = EXTENSION * count, looks + 1
        return looks

    def judge(self, requests: Sequence[JudgedRequest]) -> Attainment:
        """Return the verdict of one run. It is undecided if a longer run may decide.

        Args:
            requests: Requests of the run in the order of arrival.
        """
        series = num_in_system(
            [request.arrival for request in requests], [request.finish for request in requests]
        )
        first = warm_up_length(series.counts)
        last = len(requests) - _num_cool_down(series)
        scores = np.asarray([request.scores for request in requests], np.float64)[first:last]
        intervals = [
            (*self._interval(scores[:, index], count_relaxations(series.counts[first:])), goal)
            for index, goal in enumerate(self.goals)
        ]
        share, low, high, goal = min(
            intervals, key=lambda interval: interval[1] - interval[3], default=(1.0, 1.0, 1.0, 0.0)
        )
        if is_growing(series, first):
            verdict = AttainmentVerdict.OVERLOADED
        elif any(most < goal for _, _, most, goal in intervals):
            verdict = AttainmentVerdict.MISSED
        elif low >= goal and _is_stationary(series, first):
            verdict = AttainmentVerdict.MET
        else:
            verdict = AttainmentVerdict.UNDECIDED
        reaches_goals = _has_lasted(series, first) and all(
            each >= least for each, _, _, least in intervals
        )
        return Attainment(verdict, share, low, high, len(requests), goal, reaches_goals)

    def _interval(self, scores: np.ndarray, relaxations: float) -> tuple[float, float, float]:
        """Return the mean of scores in the order of arrival, and the ends of its interval."""
        count = len(scores)
        size = count // NUM_BATCHES
        if not size:
            return (float(scores.mean()) if count else 0.0), 0.0, 1.0
        share = float(scores.mean())
        means = scores[: size * NUM_BATCHES].reshape(NUM_BATCHES, size).mean(axis=1)
        spread = share * (1 - share)
        correlation = size * float(means.var(ddof=1)) / spread if spread else 1.0
        effective = count / max(1.0, correlation)
        if (means < 1).sum() < MIN_MISSING_BATCHES:
            # Too few busy periods to tell how long they are.
            effective = min(effective, relaxations)
        # Each look at the run may err, so all looks share the permitted error.
        error = (1 - self.confidence) / self._count_looks()
        return share, *_wilson(share, effective, float(stdtrit(NUM_BATCHES - 1, 1 - error)))


def _wilson(share: float, count: float, z: float) -> tuple[float, float]:
    """Return Wilson's interval of a share of `count` independent requests."""
    scale = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / scale
    half = z / scale * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _num_cool_down(series: NumberSeries) -> int:
    """Return how many of the last requests run in a system that empties, a quarter at most."""
    late = series.arrivals[-1] - series.mean_sojourn
    return min(int((series.arrivals > late).sum()), len(series.arrivals) // 4)


def _has_lasted(series: NumberSeries, first: int) -> bool:
    """Return True if a run is several times as long as a request takes, without its warm-up."""
    return bool(series.arrivals[-1] - series.arrivals[first] >= MIN_SOJOURNS * series.mean_sojourn)


def _is_stationary(series: NumberSeries, first: int) -> bool:
    counts = series.counts[first:]
    return (
        _has_lasted(series, first)
        and count_relaxations(counts) >= MIN_RELAXATIONS
        and slope_deviations(counts) <= MAX_SLOPE_DEVIATIONS
    )
