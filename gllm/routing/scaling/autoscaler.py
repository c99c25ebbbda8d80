"""Number of engines that a fleet needs, and the engines to drain: the decisions of autoscaling.

The number follows the rate of requests by N = ceil(k5 rate + c5). The rate is that since its last
change point, extrapolated by the time that an engine takes to start. It grows as soon as the rule
says so, or if requests wait for too long; it shrinks once the rule, with a margin for chance, has
said so for a whole stabilization window. An engine is removed only after it has drained.

Source: "Aladdin" (arXiv 2405.06856), section on scaling; the start-up time, which the paper leaves
out, the draining and the stabilization window (as in Kubernetes' HorizontalPodAutoscaler) are ours.
"""

from collections import deque
from collections.abc import Sequence
from enum import Enum
from itertools import combinations
from math import ceil
from statistics import median_low
from typing import NamedTuple

from gllm.routing.scaling.arrival_rate import ArrivalRate
from gllm.routing.scaling.scale_config import ScaleConfig

DOWN_MARGIN = 2.0
"""Standard errors that are added to the rate before fewer engines are wanted."""
UP_MARGIN = -1.0
"""Standard errors that are added to the rate before more engines are wanted."""
QUEUE_PATIENCE_SECONDS = 5.0
"""Time for which the queue has to be too long: bursts end by themselves."""
NUM_STARTUPS = 5
"""Start-up times that are remembered."""
NUM_TRUSTED_STARTUPS = 3
"""Measured start-up times from which the configured one no longer counts."""
OVERDUE_FACTOR = 2.0
"""Start-up times after which an engine that was wanted counts as one that never comes."""
MIN_MARGIN = 0.01
"""Engines by which a fitted line is above those that its rates need less one: it is rounded up."""
REPLACE_FACTOR = 2.0 * OVERDUE_FACTOR
"""Start-up times after which an engine that still starts is replaced, if there may be no further
one; the time doubles for its replacement, and starts again once an engine is ready."""


class EnginePhase(Enum):
    """State of an engine for autoscaling: starting, ready or draining."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class EngineLoad(NamedTuple):
    """State and number of unfinished requests of one engine, as input of the autoscaler."""

    name: str
    phase: EnginePhase
    num_requests: int = 0
    """Unfinished requests, of all routers."""
    is_held: bool = False
    """True if an operator drains it: it is neither removed nor used again until that ends."""


class FleetLoad(NamedTuple):
    """Arrivals, waiting requests and engines of a fleet at one time, as input of the autoscaler."""

    num_arrivals: int
    """Requests that have arrived since the previous observation."""
    num_waiting: int
    """Requests that have not been sent to an engine."""
    queue_seconds: float
    """Time for which the oldest request has waited to be computed."""
    engines: Sequence[EngineLoad]
    engine_rate: float | None = None
    """Requests per second that one engine sustains; None: unknown."""


class ScaleDecision(NamedTuple):
    """Result of autoscaling: the number of engines that should run, and those to drain or stop."""

    num_wanted: int
    """Engines that should run, draining ones not counted."""
    drain: tuple[str, ...] = ()
    """Engines that should get no more requests."""
    undrain: tuple[str, ...] = ()
    """Draining engines that are needed again."""
    removable: tuple[str, ...] = ()
    """Draining engines without requests, which may be stopped."""


class ScaleRule(NamedTuple):
    """Linear rule for the number of engines by the request rate: N = ceil(k5 rate + c5)."""

    k5: float
    """Engines per request per second."""
    c5: float = 0.0
    """Engines in addition to those of the rate."""

    def num_engines(self, rate: float) -> int:
        """Return the number of engines for a request rate per second."""
        # A rate of 1.6 engines must not become 2.0000001 of them.
        return max(0, ceil(self.k5 * rate + self.c5 - 1e-9))


def fit_scale_rule(points: Sequence[tuple[float, int]]) -> ScaleRule:
    """Fit the rule engines = ceil(k5 rate + c5) to numbers of engines by request rate; k5 >= 0.

    The rule of least squares is kept if it gives the number at every rate. Otherwise the rule is
    that with the widest margin around the numbers, and where no line meets all of them, one that
    never gives fewer, with the fewest engines in excess.

    Args:
        points: request rates per second, each with the number of engines that it needs.

    Raises:
        ValueError: There are fewer than two rates.
    """
    if len({rate for rate, _ in points}) < 2:
        raise ValueError("a rule for the number of workers needs at least two rates")
    mean_rate = sum(rate for rate, _ in points) / len(points)
    mean_count = sum(count for _, count in points) / len(points)
    variance = sum((rate - mean_rate) ** 2 for rate, _ in points)
    covariance = sum((rate - mean_rate) * (count - mean_count) for rate, count in points)
    k5 = max(0.0, covariance / variance)
    # Counts are rounded up: half a worker less before that is the mean of what is needed.
    rule = ScaleRule(k5, mean_count - 0.5 - k5 * mean_rate)
    if all(rule.num_engines(rate) == count for rate, count in points):
        return rule
    slopes = {
        max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
        for first, second in combinations(points, 2)
        if first[0] != second[0]
    }
    # The margin is concave and piecewise linear in the slope, so its maximum is at one of these.
    return min((_cover(points, slope) for slope in sorted(slopes)), key=lambda cover: cover[0])[1]


def _cover(points: Sequence[tuple[float, int]], k5: float) -> tuple[tuple[int, float], ScaleRule]:
    """Return the rule with a slope that gives no fewer engines than the points have.

    Returns:
        Engines in excess, summed over the points, and the negative margin; and the rule.
    """
    least = max(count - 1 - k5 * rate for rate, count in points)
    margin = min(count - k5 * rate for rate, count in points) - least
    rule = ScaleRule(k5, least + max(margin / 2, MIN_MARGIN))
    excess = sum(rule.num_engines(rate) - count for rate, count in points)
    return (excess, -margin), rule


class Autoscaler:
    """Decides how many engines a fleet needs, from arrival rate, queueing time and start-up time.

    Reads no clock: time is an argument.

    Args:
        config: limits of the number of engines, and times.
        now: time in seconds.
        num_engines: engines at the beginning.
    """

    def __init__(self, config: ScaleConfig, now: float, num_engines: int = 0) -> None:
        self._config = config
        self._least, self._most = config.limits()
        self._c5 = config.scale_engine_offset
        self.rate = ArrivalRate(now)
        self.num_needed = min(self._most, max(self._least, num_engines))
        """Engines that the load needs; those that never came are not counted."""
        self._requested: deque[float] = deque()
        """Times since which engines are missing, the oldest first."""
        self._startups: deque[float] = deque(maxlen=NUM_STARTUPS)
        self._known: set[str] = set()
        """Engines that have been ready."""
        self._needs: deque[tuple[float, int]] = deque()
        """Times and numbers that would have sufficed, of the stabilization window."""
        self._started_at = now
        self._last_arrival = now
        self._queue_growth_at: float | None = None
        """Time of the last growth because of the queue."""
        self._queue_since: tuple[float, float] | None = None
        """Time since which the queue has been too long, and its length then, both in seconds."""
        self._least_k5 = 0.0
        """Engines per rate that a long queue has shown to be needed, since the last change
        point."""
        self._num_overdue = 0
        self._overdue_at = now
        self._starting: dict[str, tuple[float, int]] = {}
        """Time at which each engine that starts was first seen, and `_num_replacements` then."""
        self._num_replacements = 0
        """Engines in a row that were replaced, one by the next, because they did not come."""
        self._draining: set[str] = set()
        """Engines whose drain this object has requested."""

    @property
    def startup_seconds(self) -> float:
        """Start-up time of an engine: the longest of the last ones, without exceptional ones.

        One that takes more than OVERDUE_FACTOR times the median is that of an engine that was
        frozen, or lost and replaced. Until three are measured, the configured time counts as one.
        """
        known = [*self._startups]
        if len(known) < NUM_TRUSTED_STARTUPS:
            known.append(self._config.scale_startup_seconds)
        limit = OVERDUE_FACTOR * median_low(known)
        usual = [seconds for seconds in self._startups if seconds <= limit]
        return max(usual, default=limit if self._startups else known[0])

    def observe(self, load: FleetLoad, now: float) -> ScaleDecision:
        """Return the decision for the present load; call about once per second."""
        if self.rate.observe(load.num_arrivals, now):
            self._least_k5 = 0.0
        ready = [engine for engine in load.engines if engine.phase is EnginePhase.READY]
        starting = [engine for engine in load.engines if engine.phase is EnginePhase.STARTING]
        self._measure_startups(load.engines, now)
        is_busy = load.num_waiting > 0 or any(engine.num_requests for engine in load.engines)
        if load.num_arrivals or is_busy:
            self._last_arrival = now
        self._set_needed(load, len(ready), now)
        self._note_missing(len(ready), now)
        num_wanted = min(self._most, self.num_needed + self._num_overdue)
        overdue = self._replace_overdue(starting, len(ready), now)
        decision = self._decide(load.engines, ready, starting, num_wanted)
        return decision._replace(drain=(*decision.drain, *overdue))

    def _set_needed(self, load: FleetLoad, num_ready: int, now: float) -> None:
        floor = self._least
        if now - self._last_arrival < self._config.scale_idle_seconds:
            # At least one, unless there has never been a request or an engine.
            has_been_used = self.num_needed > 0 or load.num_arrivals or load.num_waiting
            floor = max(floor, 1 if has_been_used else 0)
        elif self._least == 0:
            self.num_needed = 0
            self._needs.clear()
            return
        if now - self._started_at < self._config.scale_down_seconds:
            # Engines that serve already are kept until the rate is known.
            self.num_needed = min(self._most, max(self.num_needed, num_ready))
        self._follow_rate(load.engine_rate, floor, now)
        self._follow_queue(load, num_ready, now)
        self.num_needed = min(self._most, max(floor, self.num_needed))

    def _follow_rate(self, engine_rate: float | None, floor: int, now: float) -> None:
        """Apply the rule: up at once, down after the stabilization window."""
        if engine_rate is None:
            self._needs.clear()
            return
        rule = ScaleRule(max(1.0 / engine_rate, self._least_k5), self._c5)
        growth = self.rate.slope() * self.startup_seconds
        up = rule.num_engines(self.rate.bound(UP_MARGIN) + growth)
        down = rule.num_engines(self.rate.bound(DOWN_MARGIN) + growth)
        self._needs.append((now, max(floor, down)))
        while now - self._needs[0][0] > self._config.scale_down_seconds:
            self._needs.popleft()
        if up > self.num_needed:
            self.num_needed = up
        elif now - self._needs[0][0] > 0.9 * self._config.scale_down_seconds:
            self.num_needed = min(self.num_needed, max(count for _, count in self._needs))

    def _follow_queue(self, load: FleetLoad, num_ready: int, now: float) -> None:
        """Want one more engine while requests wait too long, though all wanted ones serve."""
        if load.queue_seconds <= self._config.scale_queue_seconds or not num_ready:
            self._queue_since = None
            return
        since, length = self._queue_since = self._queue_since or (now, load.queue_seconds)
        if now - since < QUEUE_PATIENCE_SECONDS:
            return
        self._queue_since = now, load.queue_seconds
        if load.queue_seconds < length:
            # The engines catch up by themselves, with what arrived while they started.
            return
        grown_at = self._queue_growth_at
        has_waited = grown_at is None or now - grown_at > self.startup_seconds
        if num_ready >= self.num_needed and has_waited:
            self._queue_growth_at = now
            self.num_needed += 1
            self._needs.clear()
            if self.rate.rate:
                self._least_k5 = (self.num_needed - 0.5 - self._c5) / self.rate.rate

    def _measure_startups(self, engines: Sequence[EngineLoad], now: float) -> None:
        """Note how long the engines that are ready for the first time have been missing."""
        for engine in engines:
            if engine.phase is EnginePhase.READY and engine.name not in self._known:
                self._known.add(engine.name)
                self._num_replacements = 0
                if self._requested:
                    self._startups.append(max(0.1, now - self._requested.popleft()))
        self._known &= {engine.name for engine in engines}

    def _note_missing(self, num_ready: int, now: float) -> None:
        """Note since when engines are missing, and how many of them will never come."""
        num_missing = max(0, self.num_needed - num_ready)
        while len(self._requested) > num_missing:
            self._requested.pop()
        while len(self._requested) < num_missing:
            self._requested.append(now)
        if not num_missing:
            self._num_overdue = 0
            return
        patience = OVERDUE_FACTOR * self.startup_seconds
        is_overdue = now - self._requested[0] > patience
        if is_overdue and now - self._overdue_at > patience:
            self._overdue_at = now
            self._num_overdue = min(self._most, self._num_overdue + num_missing)

    def _replace_overdue(
        self, starting: Sequence[EngineLoad], num_ready: int, now: float
    ) -> list[str]:
        """Return the starting engines to drain because they take the places of others.

        They are never undrained: they would serve no request.
        """
        first_seen = now, self._num_replacements
        self._starting = {
            engine.name: self._starting.get(engine.name, first_seen) for engine in starting
        }
        if num_ready >= self.num_needed or num_ready + len(starting) < self._most:
            return []
        patience = REPLACE_FACTOR * self.startup_seconds
        overdue = []
        for name, (since, num_replacements) in self._starting.items():
            if now - since > patience * 2.0**num_replacements:
                overdue.append(name)
                self._num_replacements = max(self._num_replacements, num_replacements + 1)
        return overdue

    def _decide(
        self,
        engines: Sequence[EngineLoad],
        ready: Sequence[EngineLoad],
        starting: Sequence[EngineLoad],
        num_wanted: int,
    ) -> ScaleDecision:
        """Return the engines to drain, to undrain and to remove."""
        draining = [
            engine
            for engine in engines
            if engine.phase is EnginePhase.DRAINING and not engine.is_held
        ]
        own = [engine for engine in draining if engine.name in self._draining]
        num_lacking = max(0, self.num_needed - len(ready) - len(starting))
        back = sorted(own, key=lambda engine: (-engine.num_requests, engine.name))[:num_lacking]
        undrain = tuple(engine.name for engine in back)
        drain: list[str] = []
        if len(ready) >= self.num_needed:
            # One that has not started serves no request; one that serves few loses little.
            ordered = sorted(starting, key=lambda engine: engine.name)
            ordered += sorted(ready, key=lambda engine: (engine.num_requests, engine.name))
            num_surplus = len(ready) + len(starting) - num_wanted
            drain = [engine.name for engine in ordered[: max(0, num_surplus)]]
        self._draining = {*drain, *(engine.name for engine in own)}
        removable = tuple(
            engine.name
            for engine in draining
            if not engine.num_requests and engine.name not in undrain
        )
        return ScaleDecision(num_wanted, tuple(drain), undrain, removable)
