"""Detector of lasting shifts of a workload, after which a plan is worth a new search.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), section 4.4: a profiler watches mean lengths and
rates of arrival, and the placement is computed again if they shift. The paper gives no threshold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from gllm.options.field_types import convert_fields
from gllm.options.options import option

LEAST_GAP_SECONDS = 1e-6
"""Least mean time between arrivals: a rate is finite, also for requests that arrive together."""
QUANTITIES = ("prompt tokens", "output tokens", "seconds between arrivals")


class RequestSample(NamedTuple):
    """Arrival time, prompt length and output length of a finished request."""

    arrival_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_arrivals: int = 1
    """Requests that have arrived since the sample before, this one and those without lengths."""


class WindowMeans(NamedTuple):
    """Mean prompt tokens, output tokens and seconds between arrivals of consecutive requests."""

    means: tuple[float, ...]
    """In the order of QUANTITIES."""
    errors: tuple[float, ...]
    """Standard errors of the means."""

    @property
    def prompt_tokens(self) -> float:
        """Mean tokens of a prompt."""
        return self.means[0]

    @property
    def output_tokens(self) -> float:
        """Mean tokens of the output of a request."""
        return self.means[1]

    @property
    def rate(self) -> float:
        """Requests per second."""
        return 1 / max(self.means[2], LEAST_GAP_SECONDS)


class WorkloadShift(NamedTuple):
    """Lasting change of the mean prompt length, output length or request rate."""

    quantities: tuple[str, ...]
    """Names of QUANTITIES that have shifted."""
    before: WindowMeans
    """Means of the reference windows."""
    after: WindowMeans
    """Means of the last window."""


@dataclass(frozen=True)
class ShiftRule:
    """Conditions under which a change of the workload's means counts as lasting."""

    window: int = 400
    """Requests of a window."""
    num_windows: int = 2
    """Number of windows of the reference, and of windows in a row that must show the same shift."""
    relative_change: float = 0.25
    """Least change of a mean, as a share of its value in the reference."""
    num_errors: float = 3.0
    """Least change in standard errors of the difference: heavy tails make means vary."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: A field is out of range.
        """
        if self.window < 2 or self.num_windows < 1:
            raise ValueError(
                f"window {self.window}, num_windows {self.num_windows}: give at least 2 requests "
                "and 1 window"
            )
        if self.relative_change <= 0 or self.num_errors < 0:
            raise ValueError(
                f"relative_change {self.relative_change}, num_errors {self.num_errors}: the first "
                "must be above 0, the second at least 0"
            )


@dataclass(frozen=True)
class ShiftConfig:
    """Router options for detecting lasting changes of request lengths and request rate."""

    detect_shifts: bool = option(
        False,
        "watch the lengths and the rate of requests; publish lasting shifts in GET /engines, after "
        "which a plan is worth a new search, and the lengths in GET /workload",
    )
    shift_window: int = option(
        ShiftRule.window,
        "requests of a window; two windows are the profile, and two in a row with the same change "
        "are a shift",
        ge=2,
        le=100_000,
    )
    shift_change: float = option(
        ShiftRule.relative_change,
        "least change of the mean prompt, output or time between arrivals, as a share of the "
        "profile; it is also at least 3 standard errors",
        gt=0,
    )

    def __post_init__(self) -> None:
        """Check the fields. Raises ValueError that names the field and the fix."""
        convert_fields(self)

    @property
    def rule(self) -> ShiftRule:
        """Limits of a lasting shift."""
        return ShiftRule(window=self.shift_window, relative_change=self.shift_change)


class ShiftDetector:
    """Detects lasting changes of request lengths and request rate against the first windows.

    The first windows of requests are the profile, that of the running plan, and the reference.
    After a shift the next windows are a new reference, so that a shift is reported once. The
    profile stays until `reset`: only a new plan changes what the running one is for.

    Args:
        rule: conditions of a lasting change.
    """

    def __init__(self, rule: ShiftRule | None = None) -> None:
        self._rule = rule or ShiftRule()
        self.reset()

    def reset(self) -> None:
        """Measure profile and reference anew from the next windows: a new plan runs."""
        self._samples: list[RequestSample] = []
        self._profile: WindowMeans | None = None
        self._reference: WindowMeans | None = None
        """Means of the windows after the latest shift, or the profile; None while measured."""
        self._directions = [0] * len(QUANTITIES)
        """Windows in a row with a shift of each quantity; negative: downwards."""

    @property
    def profile(self) -> WindowMeans | None:
        """Means of the workload since the running plan; None while they are measured."""
        return self._profile

    def observe(self, sample: RequestSample) -> WorkloadShift | None:
        """Add a request in order of arrival; return a shift if this request confirms one."""
        self._samples.append(sample)
        rule = self._rule
        if self._reference is None:
            if len(self._samples) > rule.window * rule.num_windows:
                self._reference = measure_means(self._samples)
                self._profile = self._profile or self._reference
                self._samples = self._samples[-1:]
            return None
        if len(self._samples) <= rule.window:
            return None
        window = measure_means(self._samples)
        self._samples = self._samples[-1:]
        return self._compare(self._reference, window)

    def _compare(self, reference: WindowMeans, window: WindowMeans) -> WorkloadShift | None:
        rule = self._rule
        columns = zip(reference.means, reference.errors, window.means, window.errors, strict=True)
        for index, (before, before_error, after, after_error) in enumerate(columns):
            change = after - before
            error = sqrt(before_error**2 + after_error**2)
            is_shift = abs(change) > max(rule.relative_change * before, rule.num_errors * error)
            count = self._directions[index]
            sign = 1 if change > 0 else -1
            self._directions[index] = sign + (count if count * sign > 0 else 0) if is_shift else 0
        shifted = tuple(
            name
            for name, count in zip(QUANTITIES, self._directions, strict=True)
            if abs(count) >= rule.num_windows
        )
        if not shifted:
            return None
        self._reference, self._directions = None, [0] * len(QUANTITIES)
        return WorkloadShift(shifted, reference, window)


def measure_means(samples: Sequence[RequestSample]) -> WindowMeans:
    """Return the mean lengths and time between arrivals of consecutive requests, with their errors.

    The first request only starts the first interval.
    """
    later = samples[1:]
    gaps: list[float] = []
    for first, second in zip(samples, later, strict=False):
        gap = (second.arrival_seconds - first.arrival_seconds) / second.num_arrivals
        gaps += [gap] * second.num_arrivals
    columns: tuple[list[int] | list[float], ...] = (
        [sample.num_prompt_tokens for sample in later],
        [sample.num_output_tokens for sample in later],
        gaps,
    )
    return WindowMeans(
        tuple(fmean(column) for column in columns),
        tuple(stdev(column) / sqrt(len(column)) for column in columns),
    )
