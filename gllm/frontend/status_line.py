"""Status line: one log line every ten seconds while requests run, none while the server is idle.

A request starts the timer, and the timer restarts only while requests run: an idle server has no
timer.
"""

import asyncio
import logging
from contextvars import Context
from typing import NamedTuple

from gllm.engine.interface import EngineInterface, EngineStatus
from gllm.frontend.metrics import Metrics

log = logging.getLogger("gllm")

INTERVAL_SECONDS = 10.0
"""Time between two lines."""


class _Counters(NamedTuple):
    """Counters at one time of the loop's clock, in seconds."""

    time: float
    prompt_tokens: int
    output_tokens: int
    queries: int
    hits: int


class StatusLine:
    """Logs a line with the server's load every few seconds while requests run, as vLLM does.

    The line has running and waiting requests, tokens per second, KV cache use and hit rate.
    """

    def __init__(self, engine: EngineInterface, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._timer: asyncio.TimerHandle | None = None

    def on_request(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start logging periodically if no timer is running."""
        if self._timer is None:
            self._start_timer(loop, self._read_counters(loop, self._engine.status()))

    def close(self) -> None:
        """Stop logging."""
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self, loop: asyncio.AbstractEventLoop, before: _Counters) -> None:
        # An empty context: the line belongs to no single request.
        self._timer = loop.call_later(
            INTERVAL_SECONDS, self._log_line, loop, before, context=Context()
        )

    def _log_line(self, loop: asyncio.AbstractEventLoop, before: _Counters) -> None:
        status = self._engine.status()
        stats, now = status.stats, self._read_counters(loop, status)
        seconds = now.time - before.time
        prompt_rate = (now.prompt_tokens - before.prompt_tokens) / seconds
        output_rate = (now.output_tokens - before.output_tokens) / seconds
        hit_rate = (now.hits - before.hits) / max(now.queries - before.queries, 1)
        fields: dict[str, float] = {
            "requests_running": stats.running,
            "requests_waiting": stats.waiting,
            "prompt_tokens_per_second": prompt_rate,
            "output_tokens_per_second": output_rate,
            "kv_cache_usage": stats.kv_usage,
            "prefix_cache_hits": hit_rate,
        }
        log.info(
            "requests: %d running, %d waiting; tokens/s: %.1f prompt, %.1f generated; "
            "KV cache: %.1f %% used, prefix cache hit rate: %.1f %%",
            stats.running, stats.waiting, prompt_rate, output_rate,
            100 * stats.kv_usage, 100 * hit_rate,
            extra={"fields": {name: round(value, 4) for name, value in fields.items()}},
        )  # fmt: skip
        if status.num_requests:
            self._start_timer(loop, now)
        else:
            self._timer = None

    def _read_counters(self, loop: asyncio.AbstractEventLoop, status: EngineStatus) -> _Counters:
        stats = status.stats
        return _Counters(
            time=loop.time(),
            prompt_tokens=stats.prefill_tokens,
            output_tokens=self._metrics.output.num_tokens,
            queries=stats.prefix_queries,
            hits=stats.prefix_hits,
        )
