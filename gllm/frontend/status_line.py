"""One line in the log every ten seconds while there are requests, and silence while there are none.

Owns when the line is due and what it says. Knows nothing of HTTP. No timer runs in an idle server:
a request sets it, and it is set again only while requests are inside.
"""

import asyncio
import logging
from contextvars import Context
from typing import NamedTuple

from gllm.engine.interface import EngineLike
from gllm.frontend.metrics import Metrics

log = logging.getLogger("gllm")

SECONDS = 10.0


class _Counts(NamedTuple):
    """Counters at one moment, on the loop's clock."""

    time: float
    prompt_tokens: int
    output_tokens: int
    queries: int
    hits: int


class StatusLine:
    """The line of one server."""

    def __init__(self, engine: EngineLike, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._timer: asyncio.TimerHandle | None = None

    def wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """A request is here: unless a line is due already, one is in ten seconds."""
        if self._timer is None:
            self._wait(loop, self._counts(loop))

    def close(self) -> None:
        """No more lines."""
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, loop: asyncio.AbstractEventLoop, since: _Counts) -> None:
        # In a context of its own: the line is about no one request.
        self._timer = loop.call_later(SECONDS, self._tell, loop, since, context=Context())

    def _tell(self, loop: asyncio.AbstractEventLoop, before: _Counts) -> None:
        now = self._counts(loop)
        seconds = now.time - before.time
        told = {
            "requests_running": self._engine.stats.running,
            "requests_waiting": self._engine.stats.waiting,
            "prompt_tokens_per_second": (now.prompt_tokens - before.prompt_tokens) / seconds,
            "output_tokens_per_second": (now.output_tokens - before.output_tokens) / seconds,
            "kv_cache_usage": self._engine.stats.kv_usage,
            "prefix_cache_hits": (now.hits - before.hits) / max(now.queries - before.queries, 1),
        }
        log.info(
            "requests: %d running, %d waiting; tokens/s: %.1f prompt, %.1f generated; "
            "KV cache: %.1f %% used, %.1f %% of prompts found",
            *list(told.values())[:4], 100 * told["kv_cache_usage"], 100 * told["prefix_cache_hits"],
            extra={"fields": {name: round(value, 4) for name, value in told.items()}},
        )  # fmt: skip
        if self._engine.num_requests:
            self._wait(loop, now)
        else:
            self._timer = None

    def _counts(self, loop: asyncio.AbstractEventLoop) -> _Counts:
        stats = self._engine.stats
        output = self._metrics.output.tokens
        cache = stats.prefix_queries, stats.prefix_hits
        return _Counts(loop.time(), stats.prefill_tokens, output, *cache)
