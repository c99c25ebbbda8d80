"""Throughput and cache hit rate of an engine over the last ten seconds, for /v1/loads."""

from collections import deque
from typing import NamedTuple

WINDOW_SECONDS = 10.0
"""Time over which the rates are measured, if there is a reading of that age."""
MIN_GAP_SECONDS = 0.1
"""Minimum time between two stored readings."""


class LoadRates(NamedTuple):
    """Decode throughput and prefix cache hit rate of an engine over the last ten seconds."""

    tokens_per_second: float
    """Generated tokens per second."""
    cache_hit_rate: float
    """Share of the prompt tokens that were found in the prefix cache."""


class LoadReading(NamedTuple):
    """Values of an engine's token and prefix cache counters at one monotonic time, in seconds."""

    time: float
    decode_tokens: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    """Prompt tokens found in the prefix cache."""


class LoadWindow:
    """Sliding window of ten seconds over an engine's counters, for the rates of /v1/loads."""

    def __init__(self) -> None:
        self._readings: deque[LoadReading] = deque()

    def add(self, reading: LoadReading) -> LoadRates:
        """Add a reading and return the rates since the oldest reading in the window.

        The rates are 0 for the first reading.
        """
        readings = self._readings
        if readings and reading.decode_tokens < readings[-1].decode_tokens:
            # Another scheduler counts from zero.
            readings.clear()
        while len(readings) > 1 and reading.time - readings[1].time >= WINDOW_SECONDS:
            readings.popleft()
        before = readings[0] if readings else reading
        if not readings or reading.time - readings[-1].time >= MIN_GAP_SECONDS:
            readings.append(reading)
        seconds = reading.time - before.time
        num_tokens = reading.decode_tokens - before.decode_tokens
        num_queries = reading.prefix_queries - before.prefix_queries
        num_hits = reading.prefix_hits - before.prefix_hits
        return LoadRates(
            num_tokens / seconds if seconds > 0 else 0.0,
            num_hits / num_queries if num_queries > 0 else 0.0,
        )
