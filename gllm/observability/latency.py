"""Latency metrics of requests: TTFT, TPOT, ITL, E2EL and SLO attainment.

The server, the simulator and the benchmarks share these definitions. Times are arguments, in
seconds of any clock.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gllm.options.slo import Slo


@dataclass(slots=True)
class RequestTimeline:
    """Arrival time of a request and the times at which its output arrived, for latency metrics.

    Times are seconds of any clock.
    """

    arrival: float
    """Time at which the request arrived."""
    times: list[float] = field(default_factory=list)
    """Times at which output arrived, possibly several tokens at once."""
    num_tokens: int = 0
    """Number of output tokens."""

    def record_output(self, now: float, tokens: int = 1) -> None:
        """Record the arrival of output tokens; 0 tokens are ignored."""
        if tokens:
            self.times.append(now)
            self.num_tokens += tokens

    @property
    def ttft(self) -> float | None:
        """Time to first token: from arrival to the first output. None without output."""
        return self.times[0] - self.arrival if self.times else None

    @property
    def e2el(self) -> float | None:
        """End-to-end latency: from arrival to the last output. None without output."""
        return self.times[-1] - self.arrival if self.times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token: from first to last output, shared by all tokens but the first.

        None with fewer than two tokens, or if no arrival was recorded because no token had text.
        """
        if self.num_tokens < 2 or not self.times:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between consecutive arrivals of output."""
        return [after - before for before, after in pairwise(self.times)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile (0..100) of the values, interpolated linearly between neighbours.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("a percentile of no values")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def collect_latencies(timelines: Sequence[RequestTimeline]) -> dict[str, Sequence[float]]:
    """Return the TTFT, TPOT, ITL and end-to-end latencies of all requests, in seconds.

    The keys are "ttft", "tpot", "itl" and "e2el". Requests for which a metric is undefined are left
    out of it.
    """
    return {
        "ttft": [line.ttft for line in timelines if line.ttft is not None],
        "tpot": [line.tpot for line in timelines if line.tpot is not None],
        # A run has a gap for each of millions of tokens.
        "itl": array("d", (gap for line in timelines for gap in line.itl)),
        "e2el": [line.e2el for line in timelines if line.e2el is not None],
    }


def slo_attainment(timelines: Iterable[RequestTimeline], slo: Slo) -> float:
    """Return the fraction (0..1) of requests that meet the per-request latency limits of an SLO.

    A request without output misses every limit of TTFT and E2EL. A request with a single token has
    no TPOT and meets every limit of it. The result is 0 if there are no requests.
    """
    ttft, tpot, e2el = slo[:3]
    met = [
        (ttft is None or (line.ttft is not None and line.ttft <= ttft))
        and (tpot is None or line.tpot is None or line.tpot <= tpot)
        and (e2el is None or (line.e2el is not None and line.e2el <= e2el))
        for line in timelines
    ]
    return sum(met) / len(met) if met else 0.0


def meets_slo(timelines: Sequence[RequestTimeline], slo: Slo) -> bool:
    """Return True if the requests meet an SLO: attainment and percentile limits.

    A percentile limit of a metric without values counts as met.
    """
    if slo.request_limits and slo_attainment(timelines, slo) < slo.attainment:
        return False
    latencies = collect_latencies(timelines) if slo.percentiles else {}
    return all(
        not latencies[limit.metric]
        or percentile(latencies[limit.metric], limit.percent) <= limit.limit
        for limit in slo.percentiles
    )
