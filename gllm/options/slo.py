"""Service-level objectives: latency limits of each request or of percentiles, and their texts.

`gllm.observability.latency` has the latencies, and the share of requests that are within limits.
"""

import math
from typing import NamedTuple

METRICS = {
    "ttft": "ttft", "tpot": "tpot", "atgt": "tpot", "tbt": "itl", "itl": "itl", "e2el": "e2el",
}  # fmt: skip
"""Metrics by their names in a text; `tbt` is Vidur's and Splitwise's word, `atgt` Aladdin's."""
EXAMPLE = "ttft:p90=2,tbt:p99=0.2, or ttft=2,tpot=0.1"
TARGET_ATTAINMENT = 0.9
"""Default share of the requests that have to keep the limits of each request."""


class PercentileLimit(NamedTuple):
    """Limit of a latency percentile over all requests of a run, such as P99 of the TTFT."""

    metric: str
    """ttft, tpot, itl or e2el; for slowdowns a field of RequestLatencies."""
    percent: float
    """Percentile, 0..100."""
    limit: float
    """Seconds; for slowdowns a multiple of the latency of the same request on an idle machine."""


class Slo(NamedTuple):
    """Service-level objective: latency limits of each request and of percentiles of a run.

    Limits are in seconds; None: no limit.
    """

    ttft_seconds: float | None = None
    """Limit of each request: time to the first token, from the request's arrival."""
    tpot_seconds: float | None = None
    """Limit of each request: mean time per output token after the first."""
    e2el_seconds: float | None = None
    """Limit of each request: time to the last token, from the request's arrival."""
    percentiles: tuple[PercentileLimit, ...] = ()
    """Limits of percentiles over all requests of a run, in seconds."""
    attainment: float = TARGET_ATTAINMENT
    """Share of requests that have to meet the per-request limits, 0..1."""

    def __bool__(self) -> bool:
        """Return True if there is a limit."""
        return bool(self.percentiles or self.request_limits)

    @property
    def request_limits(self) -> dict[str, float]:
        """Limits of each request in seconds, by metric."""
        values = zip(("ttft", "tpot", "e2el"), self[:3], strict=True)
        return {metric: seconds for metric, seconds in values if seconds is not None}

    def with_defaults(self, defaults: "Slo") -> "Slo":
        """Return this SLO; missing per-request limits are those of `defaults`."""
        pairs = zip(self[:3], defaults[:3], strict=True)
        ttft, tpot, e2el = (default if own is None else own for own, default in pairs)
        return self._replace(ttft_seconds=ttft, tpot_seconds=tpot, e2el_seconds=e2el)

    def remaining(self, age_seconds: float, has_first_token: bool) -> "Slo":
        """Return the limits that a request of some age can still keep.

        Args:
            age_seconds: Time since its arrival, by which the limit of the first token is less.
            has_first_token: True if that limit does not matter any more, as it does not once it is
                missed.
        """
        ttft = None if self.ttft_seconds is None else self.ttft_seconds - age_seconds
        if has_first_token or (ttft is not None and ttft <= 0):
            ttft = None
        return self._replace(ttft_seconds=ttft)

    def limit_of(self, metric: str) -> tuple[float, float] | None:
        """Return the tightest limit of a metric as (seconds, percentile); None: no limit.

        A per-request limit counts as one of the percentile 100 * `attainment`.
        """
        limits = [
            (seconds, percent) for name, percent, seconds in self.percentiles if name == metric
        ]
        if metric in self.request_limits:
            limits.append((self.request_limits[metric], 100 * self.attainment))
        return min(limits, default=None)

    def require(self, *metrics: str) -> tuple[float, ...]:
        """Return the per-request limits of some metrics in seconds, if there are no other limits.

        Raises:
            ValueError: One of them is missing, or there are other limits.
        """
        limits = self.request_limits
        if self.percentiles or set(limits) != set(metrics):
            raise ValueError(
                f"--slo: limit {' and '.join(metrics)} of each request and nothing else, as in "
                f"{','.join(f'{metric}=0.2' for metric in metrics)}"
            )
        return tuple(limits[metric] for metric in metrics)


NO_SLO = Slo()
"""Objective without limits."""


def parse_slo(text: str, attainment: float = TARGET_ATTAINMENT) -> Slo:
    """Parse latency limits such as `ttft:p90=2,tbt:p99=0.2`, `ttft=2,tpot=0.1` or `ttft:200`.

    `METRIC=SECONDS` and `METRIC:MILLISECONDS` (the form of vLLM's benchmark) limit each request.
    `METRIC:pPERCENT=SECONDS` limits a percentile over all requests.

    Args:
        text: Limits, separated by commas; empty: none.
        attainment: Share of requests that have to meet the limits of each request, 0..1.

    Raises:
        ValueError: A metric is unknown or limited twice, or a number is out of range.
    """
    percentiles: dict[tuple[str, float], PercentileLimit] = {}
    per_request: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, has_seconds, number = part.partition("=")
        name, has_colon, suffix = key.strip().partition(":")
        metric = METRICS.get(name, "")
        is_percentile = bool(has_seconds and suffix.startswith("p"))
        percent = _number(suffix[1:]) if is_percentile else 50.0
        seconds = _number(number) if has_seconds else _number(suffix) / 1e3
        is_form = is_percentile or not (has_seconds and has_colon)
        is_new = metric not in per_request
        if is_percentile:
            is_new = (metric, percent) not in percentiles
        if not (metric and is_form and is_new and 0 < seconds < math.inf and 0 < percent <= 100):
            raise ValueError(
                f"--slo {text}: {part!r} has to be METRIC=SECONDS, METRIC:MILLISECONDS or "
                f"METRIC:pPERCENT=SECONDS, each once, with one of {', '.join(METRICS)}, as in "
                f"{EXAMPLE}"
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
    ttft, tpot, e2el = map(per_request.get, ("ttft", "tpot", "e2el"))
    return Slo(ttft, tpot, e2el, tuple(percentiles.values()), attainment)


def parse_class_slos(text: str) -> dict[str, Slo]:
    """Parse TTFT and TPOT limits by request class, such as `chat:0.5:0.05,batch:30:`.

    Args:
        text: CLASS:TTFT:TPOT in seconds, separated by commas; an empty number is no limit.

    Raises:
        ValueError: A class lacks a name, occurs twice, or has a limit that is not a number above 0.
    """
    limits: dict[str, Slo] = {}
    for part in text.split(","):
        name, *numbers = (word.strip() for word in part.split(":"))
        values = [_number(number) if number else None for number in numbers]
        is_valid = all(value is None or 0 < value < math.inf for value in values)
        if not name or name in limits or len(values) != 2 or not is_valid:
            raise ValueError(
                f"--slo-limits {text}: {part!r} has to be NAME:TTFT:TPOT with limits in seconds, "
                "each name once, as in chat:0.5:0.05,batch:30:"
            )
        limits[name] = Slo(values[0], values[1])
    return limits


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
