"""HTTP server of one engine: start, signals, drain and exit status."""

import asyncio
import gc
import logging
import sys
import time

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.engine.interface import EngineInterface
from gllm.frontend.app import make_app
from gllm.frontend.connection import ConnectionRunner
from gllm.frontend.listening import listen, raise_open_files_limit, tls_context, watch_signals
from gllm.options.addresses import format_host_port

log = logging.getLogger("gllm")

DEAD_ANSWER_SECONDS = 5.0
"""Time for which a server whose engine died answers 503 before it exits."""


MIN_CLOSE_SECONDS = 1.0
"""Minimum time for clients to read the end of their answers after the drain."""


THREAD_SWITCH_SECONDS = 0.001
"""Switch interval of threads. Python's 5 ms would delay every token while a thread tokenizes."""


class Server:
    """Serves an engine over HTTP until SIGINT, SIGTERM or the death of the engine.

    Args:
        engine: Engine to serve; the server starts it.
        config: Configuration of the server.
        dead_answer_seconds: Time for which requests are answered with 503 after the engine's death.
    """

    def __init__(
        self,
        engine: EngineInterface,
        config: ServerConfig,
        dead_answer_seconds: float = DEAD_ANSWER_SECONDS,
    ) -> None:
        self._config = config
        self._engine = engine
        self._dead_answer_seconds = dead_answer_seconds

    async def run(self) -> int:
        """Serve HTTP until a signal or the engine's death; return the exit status of the process.

        Raises:
            ValueError: A flag has a value that cannot be used; the message names the flag.
        """
        should_stop = watch_signals()
        raise_open_files_limit()
        sys.setswitchinterval(THREAD_SWITCH_SECONDS)
        tls = tls_context(self._config)
        runner = ConnectionRunner(make_app(self._engine, self._config), self._config)
        await runner.setup()
        await listen(runner, self._config.host, self._config.port, tls)
        try:
            return await self._serve(runner, should_stop)
        finally:
            await runner.cleanup()

    async def _serve(self, runner: ConnectionRunner, should_stop: asyncio.Event) -> int:
        stop_requested = asyncio.ensure_future(should_stop.wait())
        started = asyncio.ensure_future(self._engine.start())
        await asyncio.wait({stop_requested, started}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await asyncio.wait({started})
            return 0
        await started
        self._log_ready(runner)
        # Objects of the start live forever: exempt them from garbage collection.
        gc.collect()
        gc.freeze()
        died = asyncio.ensure_future(self._engine.wait_until_dead())
        await asyncio.wait({stop_requested, died}, return_when=asyncio.FIRST_COMPLETED)
        if not died.done():
            log.info("draining %d requests", self._engine.num_requests)
            deadline = time.monotonic() + self._config.shutdown_timeout
            await self._engine.drain(self._config.shutdown_timeout)
            # Slow readers get the rest of the time to read their answers.
            runner.set_shutdown_timeout(max(MIN_CLOSE_SECONDS, deadline - time.monotonic()))
        status = self._engine.status()
        if status.state == "dead":
            log.error("the engine is down: %s", status.cause_of_death)
            await asyncio.wait({stop_requested}, timeout=self._dead_answer_seconds)
            await self._engine.stop()
            return 1
        await self._engine.stop()
        return 0

    def _log_ready(self, runner: web.AppRunner) -> None:
        """Log the model, the size of the KV cache and an example request."""
        engine = self._engine
        host, port = runner.addresses[0][:2]
        status, length = engine.status(), engine.model.max_model_len
        blocks = status.num_kv_blocks
        tokens = blocks * status.block_size
        if engine.fleet is None:
            log.info(
                "KV cache: %.1f MiB, %d blocks, %.1f requests of full length (%d tokens)",
                status.kv_cache_bytes / 2**20, blocks, tokens / length, length,
            )  # fmt: skip
        body = '{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}'
        scheme = "https" if self._config.ssl_certfile else "http"
        url = f"{scheme}://{format_host_port(str(host), int(port))}"
        key = ""
        if self._config.api_key or self._config.api_key_file:
            key = '-H "Authorization: Bearer $KEY" '
        log.info(
            "%s is ready: chat at %s/, or\ncurl -N %s/v1/chat/completions %s"
            "-H 'Content-Type: application/json' -d '%s'",
            engine.model.name, url, url, key, body,
        )  # fmt: skip
