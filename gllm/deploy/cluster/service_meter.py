"""Rates of a service: throughput and utilization from its counters over the last seconds.

Time is an argument.
"""

from collections import deque
from typing import NamedTuple

from gllm.messages.services import ServiceReading

WINDOW_SECONDS = 10.0
"""Time over which rates are measured."""


class ServiceRates(NamedTuple):
    """Throughput and utilization of a service."""

    requests_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    generated_tokens_per_second: float = 0.0
    stages: tuple[float, ...] = ()
    """Share of time in which each stage computed, 0 to 1."""


class ServiceMeter:
    """Readings of the last WINDOW_SECONDS, and the rates between the oldest and the newest one."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, ServiceReading]] = deque()

    def add(self, reading: ServiceReading, now: float) -> None:
        """Add a reading; counters that decrease belong to another engine and begin anew.

        Args:
            reading: of the engine.
            now: time in seconds.
        """
        if self._readings and not _follows(reading, self._readings[-1][1]):
            self._readings.clear()
        self._readings.append((now, reading))
        while len(self._readings) > 2 and self._readings[1][0] <= now - WINDOW_SECONDS:
            self._readings.popleft()

    @property
    def rates(self) -> ServiceRates:
        """Rates over the window; 0 before there are two readings."""
        if len(self._readings) < 2:
            return ServiceRates()
        (begin, first), (end, last) = self._readings[0], self._readings[-1]
        seconds = end - begin
        if seconds <= 0:
            return ServiceRates()
        return ServiceRates(
            (last.num_finished + last.num_failed - first.num_finished - first.num_failed) / seconds,
            (last.num_prompt_tokens - first.num_prompt_tokens) / seconds,
            (last.num_generated_tokens - first.num_generated_tokens) / seconds,
            tuple(
                min(1.0, (after - before) / seconds)
                for before, after in zip(
                    first.stage_busy_seconds, last.stage_busy_seconds, strict=True
                )
            ),
        )


def _follows(later: ServiceReading, earlier: ServiceReading) -> bool:
    """Return True if two readings can be of the same engine with the same stages."""
    return (
        later.num_finished >= earlier.num_finished
        and later.num_failed >= earlier.num_failed
        and later.num_prompt_tokens >= earlier.num_prompt_tokens
        and later.num_generated_tokens >= earlier.num_generated_tokens
        and len(later.stage_busy_seconds) == len(earlier.stage_busy_seconds)
        and all(
            after >= before
            for after, before in zip(
                later.stage_busy_seconds, earlier.stage_busy_seconds, strict=True
            )
        )
    )
