"""Scheduling delays of a run, and its load: the rates offered and sustained."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from gllm.sim.capacity import RateTrial, make_rate_trial
from gllm.sim.metrics.batch_statistics import measure_micro_batches
from gllm.sim.metrics.run_record import RunRecord, ServedRequest


def scheduling_delays(requests: Iterable[ServedRequest]) -> list[float | None]:
    """Return the time from each request's arrival until it is first scheduled, in seconds.

    Args:
        requests: Requests of a run in any order.

    Returns:
        Delays in order of arrival; None for a request that was never scheduled.
    """
    return [
        None
        if request.first_scheduled_time is None
        else max(0.0, request.first_scheduled_time - request.line.arrival)
        for request in sorted(requests, key=lambda request: request.line.arrival)
    ]


def measure_rate_trial(requests: Collection[ServedRequest]) -> RateTrial:
    """Return the scheduling delays of a run as figures, for a capacity search.

    Args:
        requests: Requests of the run at one request rate, in any order.

    Raises:
        ValueError: There are fewer than two requests.
    """
    arrivals = sorted(request.line.arrival for request in requests)
    return make_rate_trial(arrivals, scheduling_delays(requests))


MAX_CHECKS = 100
"""Decisions of DelayLimitStop while requests arrive: a run at a low rate takes days of its time."""


class DelayLimitStop:
    """Condition that stops a simulation when its P99 scheduling delay is certain to exceed a limit.

    Args:
        arrivals: Arrival times of all requests of the run in seconds, ascending.
        limit_seconds: Limit of the 99th percentile of the scheduling delays.
    """

    def __init__(self, arrivals: Sequence[float], limit_seconds: float) -> None:
        num_requests = len(arrivals)
        span = arrivals[-1] - arrivals[0]
        self.interval_seconds = max(limit_seconds, span / MAX_CHECKS)
        self._limit_seconds = limit_seconds
        self.has_stopped = False
        """True if the condition has ended the run."""
        # As in `percentile`: delays from this position on are above the limit.
        self._num_enough = num_requests - int((num_requests - 1) * 99 / 100)

    def is_met(self, requests: Mapping[int, ServedRequest], now: float) -> bool:
        """Return True if more requests than the P99 permits have waited longer than the limit."""
        num_late = 0
        for served in requests.values():
            first = served.first_scheduled_time
            delay = (now if first is None else first) - served.line.arrival
            num_late += delay > self._limit_seconds
        self.has_stopped = num_late >= self._num_enough
        return self.has_stopped


def steady_throughput(run: RunRecord) -> tuple[float, float]:
    """Return tokens and requests per second while the first 80 % of all tokens were computed.

    The end of a run is left out, when few requests are left and batches are small.

    Args:
        run: Record of the run.
    """
    batches = measure_micro_batches(run.micro_batches)
    return batches.steady_rates(run.begin_time(), len(run.requests))


class RunLoad(NamedTuple):
    """Offered and sustained request rate of a run in requests per second, and scheduling delays."""

    offered_rate: float | None
    """Arrivals per second; None if all requests arrive at once."""
    sustained_rate: float
    """Finished requests per second while the first 80 % of all tokens were computed."""
    trial: RateTrial
    """P99 and mean scheduling delays, and if the queue grows."""

    @property
    def is_overloaded(self) -> bool:
        """True if the queue grows, or some requests are never scheduled.

        Long delays alone are none: a burst, or a queue close to its capacity, has them as well.
        """
        return self.trial.is_growing or self.trial.p99_delay_seconds == inf

    @property
    def overload(self) -> float | None:
        """Share of the offered rate beyond the sustained one; None if all arrive at once."""
        if self.offered_rate is None or not self.sustained_rate:
            return None
        return max(0.0, self.offered_rate / self.sustained_rate - 1)


def measure_load(requests: Sequence[ServedRequest], sustained_rate: float) -> RunLoad | None:
    """Return the offered and sustained request rate of a run; None with fewer than two requests.

    Args:
        requests: All requests of the run.
        sustained_rate: Requests per second of `steady_throughput`, summed over the engines.
    """
    if len(requests) < 2:
        return None
    arrivals = sorted(served.line.arrival for served in requests)
    seconds = arrivals[-1] - arrivals[0]
    offered = (len(arrivals) - 1) / seconds if seconds else None
    return RunLoad(offered, sustained_rate, measure_rate_trial(requests))
