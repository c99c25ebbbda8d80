"""Slowdowns of requests against an idle machine, and the nine limits of Splitwise on them.

Source: Patel et al., "Splitwise", ISCA 2024 (arXiv 2311.18677), table of its SLOs: a slowdown is a
latency over that of the same request alone on a DGX-A100.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gllm.observability.latency import RequestTimeline
from gllm.options.slo import PercentileLimit
from gllm.sim.metrics.statistics import PERCENTS, summary_statistics


class RequestLatencies(NamedTuple):
    """TTFT, mean time between tokens and end-to-end latency of one request, in seconds."""

    ttft: float
    tbt: float | None
    """Mean time between tokens; None with one output token."""
    e2e: float


SPLITWISE_SLOS = tuple(
    PercentileLimit(metric, percent, limit)
    for metric, limits in {
        "ttft": (2.0, 3.0, 6.0),
        "tbt": (1.25, 1.5, 5.0),
        "e2e": (1.25, 1.5, 5.0),
    }.items()
    for percent, limit in zip(PERCENTS, limits, strict=True)
)
"""The paper's limits of the slowdown of each field of RequestLatencies."""


class SloMargin(NamedTuple):
    """A percentile of the requests' slowdowns against an idle machine, with its limit."""

    metric: str
    """Field of RequestLatencies."""
    percent: float
    """Percentile of the slowdowns, 0..100."""
    slowdown: float
    """Latency over that of the same request alone on an idle machine."""
    limit: float

    @property
    def is_met(self) -> bool:
        """True if the slowdown is at most the limit."""
        return self.slowdown <= self.limit


def measure_latencies(line: RequestTimeline) -> RequestLatencies | None:
    """Return the latencies of a request in seconds; None if it has no token yet.

    Args:
        line: Arrival time and token times of the request.
    """
    ttft, e2e = line.ttft, line.e2el
    if ttft is None or e2e is None:
        return None
    return RequestLatencies(ttft, line.tpot, e2e)


def check_slos(pairs: Iterable[tuple[RequestLatencies, RequestLatencies]]) -> list[SloMargin]:
    """Return the nine slowdown percentiles of Splitwise's SLOs with their limits.

    They are P50, P90 and P99 of TTFT, time between tokens and end-to-end latency, each relative to
    an idle machine. A metric without values has a slowdown of 0.

    Args:
        pairs: Latencies of each request, and those of the same request on an idle machine.
    """
    rows = list(pairs)
    statistics = {
        metric: summary_statistics(_slowdowns(rows, metric)) for metric in RequestLatencies._fields
    }
    return [
        SloMargin(metric, percent, statistics[metric].get(f"p{percent:g}", 0.0), limit)
        for metric, percent, limit in SPLITWISE_SLOS
    ]


def worst_margin(margins: Sequence[SloMargin]) -> SloMargin:
    """Return the slowdown percentile that is largest relative to its limit.

    Args:
        margins: At least one percentile with its limit.
    """
    return max(margins, key=lambda margin: margin.slowdown / margin.limit)


def _slowdowns(
    rows: Sequence[tuple[RequestLatencies, RequestLatencies]], metric: str
) -> list[float]:
    slowdowns = []
    for latencies, reference in rows:
        ours, alone = getattr(latencies, metric), getattr(reference, metric)
        if ours is not None and alone:
            slowdowns.append(ours / alone)
    return slowdowns
