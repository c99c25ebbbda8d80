"""Capacity of a deployment: the highest request rate that it sustains.

Searches the rates; the simulation of one rate is an argument. `find_capacity` has two searches, one
for each kind of rule: `sustained` does not assume that a higher rate has longer delays, because
scheduling has anomalies (Graham, "Bounds on multiprocessing timing anomalies", 1969); `vidur` is
the bisection of Vidur's configuration search (Agrawal et al., MLSys 2024; capacity_search.py of
github.com/microsoft/vidur).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil, inf
from statistics import fmean
from typing import NamedTuple

from gllm.observability.latency import percentile

RATE_STEP = 1.025
"""Ratio of neighbouring rates of the search: the capacity is exact to 2.5 %."""
FIRST_STEP = 4
"""Rates between the first two trials; doubles from trial to trial until the capacity is between."""
MAX_SINGLE_STEPS = 4
"""Rates that are tried one by one below the highest with bounded delays, before steps double."""


class RateTrial(NamedTuple):
    """Scheduling delays of a run at one request rate.

    A scheduling delay is the time from a request's arrival until its first row is scheduled.
    """

    num_requests: int
    p99_delay_seconds: float
    """99th percentile over all requests."""
    first_half_delay_seconds: float
    """Mean over the requests of the first half, by arrival."""
    second_half_delay_seconds: float
    """Mean over the other requests."""

    @property
    def growth(self) -> float:
        """Mean delay of the second half over that of the first one; 1 where both are 0."""
        if self.second_half_delay_seconds == inf:
            return inf
        if not self.first_half_delay_seconds:
            return inf if self.second_half_delay_seconds else 1.0
        return self.second_half_delay_seconds / self.first_half_delay_seconds


def make_rate_trial(delays: Sequence[float | None]) -> RateTrial:
    """Return the figures of a run's scheduling delays.

    Args:
        delays: Scheduling delay of each request in seconds, in order of arrival; None for a request
            that was never scheduled, which counts as an infinite delay.

    Raises:
        ValueError: There are fewer than two requests.
    """
    if len(delays) < 2:
        raise ValueError(f"a capacity needs at least 2 requests, not {len(delays)}")
    values = [inf if delay is None else delay for delay in delays]
    half = len(values) // 2
    p99 = inf if inf in values else percentile(values, 99)
    return RateTrial(len(values), p99, fmean(values[:half]), fmean(values[half:]))


def stopped_trial(num_requests: int) -> RateTrial:
    """Return the figures of a run that ended early because its delays were too long."""
    return RateTrial(num_requests, inf, inf, inf)


@dataclass(frozen=True)
class CapacityRule:
    """Conditions under which a request rate counts as sustained, and the search for the highest."""

    max_p99_delay_seconds: float = 5.0
    max_growth: float | None = 1.2
    """Limit of the second half's mean delay over the first half's; None: no limit."""
    min_growing_delay_seconds: float = 0.5
    """Mean delay of the second half up to which growth is no overload: a queue this short grows and
    shrinks by chance. At an overload of 2.5 %, 1,000 requests exceed it at up to 30 per second."""
    num_confirmations: int = 2
    """Number of next higher rates, in steps of 2.5 %, that must not be sustained."""
    min_requests: int = 1000
    """Least number of requests of a run: in shorter ones, overload does not show."""
    usual_requests: int = 2000
    """Number of requests of a run that is not short: half of 1,000 can be so few that the delays of
    the first ones, which find an empty system, show in their mean."""
    min_seconds: float = 100.0
    """Least time in which the requests of a run should arrive: at an overload of 5 %, the last ones
    then wait 5 s."""
    max_trials: int = 20
    """Most simulations before the confirmations."""
    rate_step: float = RATE_STEP
    """Ratio of rates to which the bisection is exact."""
    is_bisection: bool = False
    """Search by Vidur's bisection, which assumes that delays grow with the rate."""

    def num_requests(self, rate: float, requests: int) -> int:
        """Return the number of requests to simulate at a rate per second, at least `requests`."""
        return max(requests, self.usual_requests, ceil(rate * self.min_seconds))

    def is_bounded(self, trial: RateTrial) -> bool:
        """Return True if the delays of a run are within the limit."""
        return trial.p99_delay_seconds <= self.max_p99_delay_seconds

    def is_sustained(self, trial: RateTrial) -> bool:
        """Return True if the delays of a run are within the limit and do not grow."""
        return self.is_bounded(trial) and not self._is_growing(trial)

    def _is_growing(self, trial: RateTrial) -> bool:
        return (
            self.max_growth is not None
            and trial.growth > self.max_growth
            and trial.second_half_delay_seconds > self.min_growing_delay_seconds
        )

    def check_length(self, trial: RateTrial) -> None:
        """Raise ValueError if a run has too few requests to show overload."""
        if trial.num_requests < self.min_requests:
            raise ValueError(
                f"a run of {trial.num_requests} requests does not show overload: "
                f"simulate at least {self.min_requests}"
            )


CAPACITY_RULES = {
    "sustained": CapacityRule(),
    "vidur": CapacityRule(
        max_growth=None,
        num_confirmations=0,
        min_requests=2,
        usual_requests=2,
        min_seconds=0.0,
        is_bisection=True,
    ),
}
"""Rules by name: this project's, and that of Vidur's paper."""


@dataclass(frozen=True)
class Capacity:
    """Result of a search."""

    rate: float
    """Highest sustained request rate, requests per second."""
    trials: tuple[tuple[float, RateTrial], ...]
    """(request rate, its figures) of all simulations that the search looked at, in this order."""
    num_confirmations: int = 0
    """Number of the trials that only confirm the result."""
    note: str = ""
    """Reason why the search ended early: higher rates may be sustained. Empty: it did not."""


class SearchEndedError(Exception):
    """The search may not simulate another rate; the message is the reason."""


Refusal = Callable[[], str]
"""Returns the reason against another simulation; empty: there is none."""

RunAtRate = Callable[[float], RateTrial]
"""Simulates a workload at a request rate in requests per second."""

TrialObserver = Callable[[float, RateTrial], None]
"""Receives each rate in requests per second, with its figures, when the search looks at it."""


def find_capacity(
    run: RunAtRate,
    start_rate: float,
    rule: CapacityRule = CAPACITY_RULES["sustained"],
    jobs: int = 1,
    on_trial: TrialObserver = lambda rate, trial: None,
    refusal: Refusal = lambda: "",
) -> Capacity:
    """Return the highest request rate that a rule calls sustained, exact to 2.5 %.

    Args:
        run: Simulates one rate. With several jobs it runs in other processes and must be picklable.
        start_rate: First rate in requests per second; the closer to the capacity, the fewer
            simulations.
        rule: A rule of CAPACITY_RULES, or another one.
        jobs: Number of processes. The result does not depend on it.
        on_trial: Called in this process after each simulation that the search looks at.
        refusal: Asked before each of them. A reason ends the search, with the highest sustained
            rate so far.

    Raises:
        ValueError: No rate is sustained, or `run` simulates too few requests.
    """
    if not 0 < start_rate < inf:
        raise ValueError(f"start_rate is {start_rate}, but must be above 0 requests per second")
    with ExitStack() as stack:
        executor = stack.enter_context(ProcessPoolExecutor(jobs)) if jobs > 1 else None
        trials = _RateTrials(run, executor, rule, on_trial, refusal)
        stack.callback(trials.cancel)
        if rule.is_bisection:
            return _bisect_as_vidur(trials, start_rate, rule)
        search = _SustainedRateSearch(trials, start_rate, rule)
        try:
            best = search.descend(search.highest_bounded())
            num_before = len(trials.trials)
            rate, note = search.rate(search.confirm(best)), ""
        except SearchEndedError as error:
            rate, num_before, note = search.best_so_far(str(error)), len(trials.trials), str(error)
        num_confirmations = len(trials.trials) - num_before
        return Capacity(rate, tuple(trials.trials.items()), num_confirmations, note)


def _bisect_as_vidur(trials: "_RateTrials", start_rate: float, rule: CapacityRule) -> Capacity:
    """Return the capacity by the bisection of Vidur's capacity_search.py."""
    low, high, best, least_failed = 0.0, 2 * start_rate, 0.0, inf
    last_rate, limit, note = 0.0, rule.max_p99_delay_seconds, ""
    while len(trials.trials) < rule.max_trials:
        rate = (low + high) / 2
        if abs(high - low) < (rule.rate_step - 1) * last_rate:
            break
        try:
            trial = trials.get(rate, (low + rate) / 2, (rate + high) / 2)
        except SearchEndedError as error:
            note = str(error)
            break
        last_rate = rate
        if rule.is_sustained(trial):
            best = low = rate
            # The shorter the delays, the farther away is the capacity.
            delay = trial.p99_delay_seconds
            if delay < limit / 8:
                high = min(4 * high, least_failed)
            elif delay < limit / 4 or rate > 0.8 * high:
                high = min(2 * high, least_failed)
        else:
            high = rate
            least_failed = min(least_failed, rate)
    if note and not best:
        raise ValueError(note)
    if not best:
        raise ValueError(f"no rate from {last_rate:.3g} requests per second up is sustained")
    return Capacity(best, tuple(trials.trials.items()), note=note)


class _RateTrials:
    """Trials by request rate, each simulated once.

    With an executor, rates that the search may need next are simulated at the same time. Only
    trials that it looks at count, so the result does not depend on the number of processes.
    """

    def __init__(
        self,
        run: RunAtRate,
        executor: Executor | None,
        rule: CapacityRule,
        on_trial: TrialObserver,
        refusal: Refusal,
    ) -> None:
        self._run = run
        self._rule = rule
        self._refusal = refusal
        self._on_trial = on_trial
        self._executor = executor
        self._futures: dict[float, Future[RateTrial]] = {}
        self.trials: dict[float, RateTrial] = {}

    def get(self, rate: float, *next_rates: float) -> RateTrial:
        """Return the trial of a rate.

        Args:
            rate: Requests per second.
            next_rates: Rates that may be needed after it.

        Raises:
            SearchEndedError: No other rate may be simulated.
            ValueError: The run has too few requests to show overload.
        """
        if rate not in self.trials:
            if reason := self._refusal():
                raise SearchEndedError(reason)
            if self._executor is None:
                trial = self._run(rate)
            else:
                for each in (rate, *next_rates):
                    if each not in self._futures:
                        self._futures[each] = self._executor.submit(self._run, each)
                trial = self._futures[rate].result()
            self._rule.check_length(trial)
            self.trials[rate] = trial
            self._on_trial(rate, trial)
        return self.trials[rate]

    def cancel(self) -> None:
        """Cancel simulations that have not begun."""
        for future in self._futures.values():
            future.cancel()


class _SustainedRateSearch:
    """Search for the highest sustained rate from above.

    The 99th percentile separates the rates into low and high ones but for anomalies, so a bisection
    finds where that is. Growth of the delays depends on chance as well, so from there down the
    rates are tried one by one. An index is a rate: start_rate x 1.025 ** index.
    """

    def __init__(self, trials: _RateTrials, start_rate: float, rule: CapacityRule) -> None:
        self._trials = trials
        self._start_rate = start_rate
        self._rule = rule

    def rate(self, index: int) -> float:
        """Return the rate of an index in requests per second."""
        return self._start_rate * RATE_STEP**index

    def _get_trial(self, index: int, *next_indices: int) -> RateTrial:
        return self._trials.get(self.rate(index), *map(self.rate, next_indices))

    def _is_bounded(self, index: int, *next_indices: int) -> bool:
        return self._rule.is_bounded(self._get_trial(index, *next_indices))

    def _is_sustained(self, index: int, *next_indices: int) -> bool:
        return self._rule.is_sustained(self._get_trial(index, *next_indices))

    def best_so_far(self, reason: str) -> float:
        """Return the highest rate that is known to be sustained; ValueError(reason) if none is."""
        known = self._trials.trials
        best = max((each for each in known if self._rule.is_sustained(known[each])), default=None)
        if best is None:
            raise ValueError(reason)
        return best

    def highest_bounded(self) -> int:
        """Return a rate with bounded delays whose next higher one has unbounded ones."""
        step, index = FIRST_STEP, 0
        direction = 1 if self._is_bounded(0, FIRST_STEP, -FIRST_STEP) else -1
        while True:
            following = index + direction * step
            # The bisection of an interval of 2^n rates takes n more trials.
            self._check_budget(following, step.bit_length())
            is_bounded = self._is_bounded(following, following + direction * 2 * step)
            if is_bounded != (direction > 0):
                break
            index, step = following, 2 * step
        low, high = sorted((index, following))
        return self._bisect(low, high, self._is_bounded)

    def descend(self, index: int) -> int:
        """Return the first sustained rate at or below a rate."""
        step, num_single_steps = 1, 0
        following = index
        while not self._is_sustained(following, following - 1):
            index = following
            self._check_budget(index, step.bit_length())
            num_single_steps += 1
            if num_single_steps > MAX_SINGLE_STEPS:
                step *= 2
            following = index - step
        if following < index - 1:
            return self._bisect(following, index, self._is_sustained)
        return following

    def confirm(self, index: int) -> int:
        """Return the first rate at or above a sustained one after which none of the next is."""
        ahead = range(1, self._rule.num_confirmations + 1)
        while True:
            higher = [index + each for each in ahead]
            sustained = [each for each in higher if self._is_sustained(each, *higher)]
            if not sustained:
                return index
            index = max(sustained)

    def _bisect(self, low: int, high: int, holds: Callable[..., bool]) -> int:
        """Return a rate where a condition holds and does not at the next one, as at the ends."""
        while high - low > 1:
            middle = (low + high) // 2
            if holds(middle, (middle + high) // 2, (low + middle) // 2):
                low = middle
            else:
                high = middle
        return low

    def _check_budget(self, index: int, num_reserved: int) -> None:
        """Raise ValueError if the trials before the confirmations will be too many."""
        if len(self._trials.trials) + num_reserved > self._rule.max_trials:
            raise ValueError(
                f"{len(self._trials.trials)} simulations found no capacity near "
                f"{self.rate(index):.3g} requests per second: start at another rate"
            )
