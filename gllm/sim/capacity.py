"""Capacity of a deployment: the highest request rate that it sustains.

Searches the rates; the simulation of one rate is an argument. `find_capacity` has two searches, one
for each kind of rule: `sustained` does not assume that a higher rate has longer delays, because
scheduling has anomalies (Graham, "Bounds on multiprocessing timing anomalies", 1969); `vidur` is
the bisection of Vidur's configuration search (Agrawal et al., MLSys 2024; capacity_search.py of
github.com/microsoft/vidur).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil, inf
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple

from gllm.observability.latency import percentile
from gllm.sim.monotone_search import bisect_last, find_last
from gllm.sim.simulation_pool import end_simulations, open_simulation_pool
from gllm.sim.stability import has_growth, num_in_system

RATE_STEP = 1.025
"""Ratio of neighbouring rates of the search: the capacity is exact to 2.5 %."""
FIRST_STEP = 4
"""Rates between the first two trials; doubles from trial to trial until the capacity is between."""
MAX_SINGLE_STEPS = 4
"""Rates that are tried one by one below the highest with bounded delays, before steps double."""


class RateTrial(NamedTuple):
    """Scheduling delays of the requests simulated at one request rate: P99, means and growth.

    A request's scheduling delay is the time from its arrival until the scheduler first includes it
    in a batch.
    """

    num_requests: int
    p99_delay_seconds: float
    """99th percentile of the delays of all requests."""
    first_half_delay_seconds: float
    """Mean delay of the first half of the requests, by arrival."""
    second_half_delay_seconds: float
    """Mean delay of the second half of the requests."""
    is_growing: bool = False
    """True if the number of requests that wait grows: `gllm.sim.stability`."""
    figures: Any = None
    """Figures of the simulation beside its delays, for the caller of the search."""

    @property
    def growth(self) -> float:
        """Mean delay of the second half divided by that of the first half; 1 if both are 0."""
        if self.second_half_delay_seconds == inf:
            return inf
        if not self.first_half_delay_seconds:
            return inf if self.second_half_delay_seconds else 1.0
        return self.second_half_delay_seconds / self.first_half_delay_seconds


def make_rate_trial(arrivals: Sequence[float], delays: Sequence[float | None]) -> RateTrial:
    """Return the scheduling delays of one simulation as figures, from those of its requests.

    Args:
        arrivals: Arrival of each request in seconds, ascending. Requests that arrive all at once
            have no rate that could be too high.
        delays: Seconds from each request's arrival until it is first scheduled, in order of
            arrival; None for a request that was never scheduled, which counts as an infinite delay.

    Raises:
        ValueError: There are fewer than two requests.
    """
    if len(delays) < 2:
        raise ValueError(f"a capacity needs at least 2 requests, not {len(delays)}")
    values = [inf if delay is None else delay for delay in delays]
    half = len(values) // 2
    p99 = inf if inf in values else percentile(values, 99)
    starts = [arrival + delay for arrival, delay in zip(arrivals, values, strict=True)]
    is_growing = arrivals[-1] > arrivals[0] and has_growth(num_in_system(arrivals, starts).counts)
    return RateTrial(len(values), p99, fmean(values[:half]), fmean(values[half:]), is_growing)


def stopped_trial(num_requests: int) -> RateTrial:
    """Return a RateTrial with infinite delays, for a simulation stopped early because of overload.

    Args:
        num_requests: Number of requests of the workload.
    """
    return RateTrial(num_requests, inf, inf, inf, True)


@dataclass(frozen=True)
class CapacityRule:
    """Conditions under which a request rate counts as sustained, and limits of the capacity search.

    A rate is sustained if the P99 scheduling delay is below a limit and the number of requests that
    wait does not grow during the run. The search looks for the highest such rate.
    """

    max_p99_delay_seconds: float = 5.0
    """Limit of the 99th percentile of the scheduling delays."""
    permits_growth: bool = False
    """True if only the P99 counts, also where the queue grows."""
    num_confirmations: int = 2
    """Number of next higher rates, in steps of 2.5 %, that must not be sustained."""
    min_requests: int = 1000
    """Minimum number of requests of a simulation; fewer do not show overload."""
    usual_requests: int = 2000
    """Number of requests to simulate at low rates, where `min_seconds` asks for fewer. It exceeds
    the minimum, because the first requests find an empty system, which lowers the mean delay of the
    first half."""
    min_seconds: float = 100.0
    """Minimum time in which the simulated requests arrive: at an overload of 5 %, the last ones
    then wait 5 s."""
    max_trials: int = 20
    """Maximum number of simulations before the confirmations."""
    rate_step: float = RATE_STEP
    """Relative precision of the bisection: it ends when the bounds differ by less than this
    ratio."""
    is_bisection: bool = False
    """True to search by Vidur's bisection, which assumes that delays grow with the rate."""

    def num_requests(self, rate: float, requests: int) -> int:
        """Return the number of requests to simulate at a rate per second, at least `requests`."""
        return max(requests, self.usual_requests, ceil(rate * self.min_seconds))

    def is_bounded(self, trial: RateTrial) -> bool:
        """Return True if the delays of a run are within the limit."""
        return trial.p99_delay_seconds <= self.max_p99_delay_seconds

    def is_sustained(self, trial: RateTrial) -> bool:
        """Return True if the delays of a run are within the limit and its queue does not grow."""
        return self.is_bounded(trial) and (self.permits_growth or not trial.is_growing)

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
        permits_growth=True,
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
    """Result of a capacity search: the highest sustained request rate and all rates tried."""

    rate: float
    """Highest sustained request rate, requests per second."""
    trials: tuple[tuple[float, RateTrial], ...]
    """Each simulated request rate that the search used, with its delays, in order."""
    num_confirmations: int = 0
    """Number of the trials that only confirm that higher rates are not sustained."""
    note: str = ""
    """Reason why the search ended early, so that higher rates may be sustained; empty if it did
    not."""


INTERRUPTED = "stopped by Ctrl-C"
"""Reason of a search that an interrupt ended."""


class SearchEndedError(Exception):
    """Raised when a capacity search ends before its result is exact; the message says why."""


@dataclass(frozen=True)
class SimulationDeadline:
    """Time at which running simulations end, on a clock that all processes of a machine share.

    A call raises SearchEndedError once the time has come: the check of an `EventLoop`.
    """

    time: float
    """Time in seconds of the clock."""
    reason: str
    """Message of the error."""
    clock: Callable[[], float] = monotonic
    """Returns the current time in seconds."""

    def __call__(self) -> None:
        """Raise SearchEndedError if the deadline has passed."""
        if self.clock() >= self.time:
            raise SearchEndedError(self.reason)


Refusal = Callable[[], str]
"""Returns the reason why no further rate may be simulated; empty if one may."""

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
    """Return the highest request rate that a deployment sustains, exact to 2.5 %.

    Args:
        run: Function that simulates one request rate. With several jobs it runs in other processes
            and must be picklable.
        start_rate: First rate to try, in requests per second; the closer to the capacity, the fewer
            simulations.
        rule: Conditions under which a rate counts as sustained: an entry of CAPACITY_RULES or
            another CapacityRule.
        jobs: Number of processes that simulate rates in parallel. The result does not depend on it.
        on_trial: Callback with each tried rate and its delays, called in this process.
        refusal: Called before each simulation. A non-empty reason ends the search, which then
            returns the highest sustained rate so far, as an interrupt (KeyboardInterrupt) does.

    Raises:
        ValueError: No tried rate is sustained, or `run` simulates too few requests.
    """
    if not 0 < start_rate < inf:
        raise ValueError(f"start_rate is {start_rate}, but must be above 0 requests per second")
    with ExitStack() as stack:
        executor = stack.enter_context(open_simulation_pool(jobs)) if jobs > 1 else None
        search = _CapacitySearch(run, start_rate, rule, executor, on_trial, refusal)
        stack.callback(search.cancel)
        note = ""
        try:
            rate = search.bisect_as_vidur() if rule.is_bisection else search.search_grid()
        except SearchEndedError as error:
            note = str(error)
            rate = search.highest_sustained(note)
        return Capacity(rate, tuple(search.trials.items()), search.num_confirmations, note)


class _CapacitySearch:
    """Trials by request rate, each simulated once, and the searches over them.

    With an executor, rates that a search may need next are simulated at the same time. Only trials
    that it looks at count, so the result does not depend on the number of processes.

    Indices of the grid are rates: start_rate x 1.025 ** index.
    """

    def __init__(
        self,
        run: RunAtRate,
        start_rate: float,
        rule: CapacityRule,
        executor: Executor | None,
        on_trial: TrialObserver,
        refusal: Refusal,
    ) -> None:
        self._run, self._start_rate, self._rule = run, start_rate, rule
        self._executor, self._on_trial, self._refusal = executor, on_trial, refusal
        self._futures: dict[float, Future[RateTrial]] = {}
        self.trials: dict[float, RateTrial] = {}
        self.num_confirmations = 0

    def _get(self, rate: float, *next_rates: float) -> RateTrial:
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
            try:
                trial = self._simulate(rate, next_rates)
            except KeyboardInterrupt:
                end_simulations()
                raise SearchEndedError(INTERRUPTED) from None
            self._rule.check_length(trial)
            self.trials[rate] = trial
            self._on_trial(rate, trial)
        return self.trials[rate]

    def _simulate(self, rate: float, next_rates: Sequence[float]) -> RateTrial:
        if self._executor is None:
            return self._run(rate)
        for needed in (rate, *next_rates):
            if needed not in self._futures:
                self._futures[needed] = self._executor.submit(self._run, needed)
        return self._futures[rate].result()

    def cancel(self) -> None:
        """Cancel simulations that have not started."""
        for future in self._futures.values():
            future.cancel()

    def highest_sustained(self, reason: str) -> float:
        """Return the highest simulated rate that is sustained; ValueError(reason) without one."""
        sustained = [rate for rate, trial in self.trials.items() if self._rule.is_sustained(trial)]
        if not sustained:
            raise ValueError(reason)
        return max(sustained)

    def bisect_as_vidur(self) -> float:
        """Return the capacity by the bisection of Vidur's capacity_search.py."""
        low, high, least_failed = 0.0, 2 * self._start_rate, inf
        last_rate, limit = 0.0, self._rule.max_p99_delay_seconds
        while (
            len(self.trials) < self._rule.max_trials
            and high - low >= (self._rule.rate_step - 1) * last_rate
        ):
            last_rate = rate = (low + high) / 2
            trial = self._get(rate, (low + rate) / 2, (rate + high) / 2)
            if self._rule.is_sustained(trial):
                low = rate
                # The shorter the delays, the farther away is the capacity.
                delay = trial.p99_delay_seconds
                if delay < limit / 8:
                    high = min(4 * high, least_failed)
                elif delay < limit / 4 or rate > 0.8 * high:
                    high = min(2 * high, least_failed)
            else:
                high = rate
                least_failed = min(least_failed, rate)
        return self.highest_sustained(
            f"no rate from {last_rate:.3g} requests per second up is sustained"
        )

    def search_grid(self) -> float:
        """Return the highest sustained rate of the grid, from above.

        The 99th percentile separates the rates into low and high ones but for anomalies, so a
        bisection finds where that is. Growth of the queue depends on chance as well, so from there
        down the rates are tried one by one.
        """
        best = self._descend(self._highest_bounded())
        num_before = len(self.trials)
        best = self._confirm(best)
        self.num_confirmations = len(self.trials) - num_before
        return self._rate(best)

    def _rate(self, index: int) -> float:
        """Return the rate of an index in requests per second."""
        return self._start_rate * RATE_STEP**index

    def _is_bounded(self, *indices: int) -> bool:
        return self._rule.is_bounded(self._get(*map(self._rate, indices)))

    def _is_sustained(self, *indices: int) -> bool:
        return self._rule.is_sustained(self._get(*map(self._rate, indices)))

    def _highest_bounded(self) -> int:
        """Return a rate with bounded delays whose next higher one has unbounded ones."""
        # A bisection between the last two steps takes as many trials as there were steps.
        num_doublings = (self._rule.max_trials - 1 - FIRST_STEP.bit_length()) // 2
        reach = FIRST_STEP * (2 ** (num_doublings + 1) - 1)
        index = find_last(self._is_bounded, 0, FIRST_STEP, -reach, reach)
        if index is None or index == reach:
            raise self._no_capacity(-reach if index is None else reach)
        return index

    def _descend(self, index: int) -> int:
        """Return the first sustained rate at or below a rate."""
        step, num_single_steps = 1, 0
        following = index
        while not self._is_sustained(following, following - 1):
            index = following
            if len(self.trials) + step.bit_length() > self._rule.max_trials:
                raise self._no_capacity(index)
            num_single_steps += 1
            if num_single_steps > MAX_SINGLE_STEPS:
                step *= 2
            following = index - step
        if following < index - 1:
            return bisect_last(self._is_sustained, following, index)
        return following

    def _confirm(self, index: int) -> int:
        """Return the first rate at or above a sustained one after which none of the next is."""
        ahead = range(1, self._rule.num_confirmations + 1)
        while True:
            higher = [index + offset for offset in ahead]
            sustained = [offset for offset in higher if self._is_sustained(offset, *higher)]
            if not sustained:
                return index
            index = max(sustained)

    def _no_capacity(self, index: int) -> ValueError:
        return ValueError(
            f"{len(self.trials)} simulations found no capacity near "
            f"{self._rate(index):.3g} requests per second: start at another rate"
        )
