"""Latency limits of a planner: `--slo ttft:p90=2,tbt:p99=0.2` or `--slo ttft=2,tpot=0.1`.

A limit with a percentile binds the whole run. Limits without one bind each request: a share of the
requests has to keep them all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gllm.observability.latency import (
    RequestTimeline,
    collect_latencies,
    percentile,
    slo_attainment,
)
from gllm.sim.goodput import TARGET_ATTAINMENT

METRICS = {"ttft": "ttft", "tpot": "tpot", "tbt": "itl", "itl": "itl", "e2el": "e2el"}
"""Names in a text by the name of the metric; `tbt` is Vidur's and Splitwise's word for itl."""
EXAMPLE = "ttft:p90=2,tbt:p99=0.2, or ttft=2,tpot=0.1"


class PercentileLimit(NamedTuple):
    """Limit of a percentile of a latency over a run."""

    metric: str
    """ttft, tpot, itl or e2el."""
    percent: float
    """0..100."""
    seconds: float

    def __str__(self) -> str:
        return f"{self.metric}:p{self.percent:g}={self.seconds:g}"


@dataclass(frozen=True)
class LatencyLimits:
    """Limits of a run."""

    percentiles: tuple[PercentileLimit, ...] = ()
    ttft: float | None = None
    """Limit of each request in seconds; None: no limit."""
    tpot: float | None = None
    e2el: float | None = None
    attainment: float = TARGET_ATTAINMENT
    """Share of the requests that have to keep the limits of each request, 0..1."""

    def __bool__(self) -> bool:
        """Return True if there is a limit."""
        return bool(self.percentiles) or self._has_request_limits

    @property
    def _has_request_limits(self) -> bool:
        return any(limit is not None for limit in (self.ttft, self.tpot, self.e2el))

    def attained(self, timelines: Sequence[RequestTimeline]) -> float:
        """Return the share of requests (0..1) that keep the limits of each request."""
        return slo_attainment(timelines, self.ttft, self.tpot, self.e2el)

    def are_kept(self, timelines: Sequence[RequestTimeline]) -> bool:
        """Return True if a run keeps all limits."""
        if self._has_request_limits and self.attained(timelines) < self.attainment:
            return False
        if not self.percentiles:
            return True
        latencies = collect_latencies(timelines)
        return all(
            not latencies[limit.metric]
            or percentile(latencies[limit.metric], limit.percent) <= limit.seconds
            for limit in self.percentiles
        )

    def limit_of(self, metric: str) -> tuple[float, float] | None:
        """Return the tightest limit of a metric in seconds, with its percentile; None: no limit.

        A limit of each request is that of the percentile which the attainment names.
        """
        limits = [
            (each.seconds, each.percent) for each in self.percentiles if each.metric == metric
        ]
        own = getattr(self, metric, None)
        if own is not None:
            limits.append((own, 100 * self.attainment))
        return min(limits, default=None)


NO_LIMITS = LatencyLimits()
"""Limits that every run keeps."""


def parse_limits(text: str, attainment: float = TARGET_ATTAINMENT) -> LatencyLimits:
    """Return the limits of a text such as `ttft:p90=2,tbt:p99=0.2` or `ttft=2,tpot=0.1`.

    Args:
        text: Limits in seconds, separated by commas; empty: none.
        attainment: Share of requests, 0..1.

    Raises:
        ValueError: A metric is unknown or limited twice, or a number is out of range.
    """
    percentiles: dict[tuple[str, float], PercentileLimit] = {}
    per_request: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, number = part.partition("=")
        name, has_percentile, percent_text = key.strip().partition(":")
        seconds, percent = _number(number), _number(percent_text.removeprefix("p") or "50")
        metric = METRICS.get(name, "")
        is_valid = 0 < seconds < math.inf and 0 < percent <= 100
        is_percentile = bool(has_percentile) and percent_text.startswith("p")
        is_new = (
            (metric, percent) not in percentiles if is_percentile else metric not in per_request
        )
        if not metric or not is_valid or not is_new or bool(has_percentile) != is_percentile:
            raise ValueError(
                f"--slo {text}: {part!r} has to be METRIC=SECONDS or METRIC:pPERCENT=SECONDS, each "
                f"once, with one of {', '.join(METRICS)}, as in {EXAMPLE}"
            )
        if is_percentile:
            percentiles[metric, percent] = PercentileLimit(metric, percent, seconds)
        elif metric == "itl":
            raise ValueError(
                f"--slo {text}: {part!r}: a request has many gaps between tokens: limit a "
                f"percentile, {name}:p99={seconds:g}, or tpot={seconds:g}"
            )
        else:
            per_request[metric] = seconds
    if not 0 < attainment <= 1:
        raise ValueError(f"--attainment {attainment}: give a share above 0 and at most 1")
    return LatencyLimits(tuple(percentiles.values()), **per_request, attainment=attainment)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
