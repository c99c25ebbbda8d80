"""Rates of an engine's counters over the last seconds, for load reports."""

from collections import deque
from typing import NamedTuple

from gllm.scheduler.plan import SchedulerStats

WINDOW_SECONDS = 10.0
"""Time that the rates cover, if there was a reading that long ago."""
MIN_GAP_SECONDS = 0.1
"""Minimum time between two readings that are kept."""


class LoadRates(NamedTuple):
    """Rates of an engine."""

    tokens_per_second: float
    """Tokens computed in decode."""
    cache_hit_rate: float
    """Share of the prompt tokens that were found in the prefix cache."""


class _Reading(NamedTuple):
    time: float
    stats: SchedulerStats


class LoadWindow:
    """Readings of an engine's counters, taken whenever somebody asks for its load."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque()

    def add(self, now: float, stats: SchedulerStats) -> LoadRates:
        """Add a reading and return the rates since the oldest one; 0 without an earlier one."""
        readings = self._readings
        if readings and stats.decode_tokens < readings[-1].stats.decode_tokens:
            # Another scheduler counts from zero.
            readings.clear()
        while len(readings) > 1 and now - readings[1].time >= WINDOW_SECONDS:
            readings.popleft()
        before = readings[0] if readings else _Reading(now, stats)
        if not readings or now - readings[-1].time >= MIN_GAP_SECONDS:
            readings.append(_Reading(now, stats))
        seconds = now - before.time
        num_queries = stats.prefix_queries - before.stats.prefix_queries
        num_hits = stats.prefix_hits - before.stats.prefix_hits
        num_tokens = stats.decode_tokens - before.stats.decode_tokens
        return LoadRates(
            num_tokens / seconds if seconds > 0 else 0.0,
            num_hits / num_queries if num_queries > 0 else 0.0,
        )
