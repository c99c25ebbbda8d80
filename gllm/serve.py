"""`python -m gllm.serve MODEL`: one pipeline behind HTTP, this process being parent and frontend.

Owns the process's life: command line, signals, exit status. Knows nothing of routes and requests.
Exit status: 0 after SIGTERM or SIGINT, 1 when the engine died, 2 for a command line or a model that
cannot be.
"""

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys

import setproctitle
import uvloop
from aiohttp import web

from gllm import __version__
from gllm.config import EngineConfig, ServerConfig, add_flags, from_flags
from gllm.engine import Engine, EngineError
from gllm.frontend.app import make_app, make_runner

log = logging.getLogger("gllm")

DEAD_SECONDS = 5.0
"""For how long a server whose engine died still answers, with 503, before it ends."""


def parser() -> argparse.ArgumentParser:
    """The command line: the model, and a flag for each field of the configurations."""
    made = argparse.ArgumentParser(
        prog="gllm.serve", description="Serve a model over HTTP in OpenAI's API."
    )
    made.add_argument("positional", nargs="?", metavar="MODEL", help="the same as --model")
    made.add_argument("--version", action="version", version=__version__)
    add_flags(made, EngineConfig)
    add_flags(made, ServerConfig)
    return made


def main(argv: list[str] | None = None) -> int:
    """Serve until told to end; the exit status."""
    values = parser().parse_args(argv)
    values.model = values.positional or values.model
    logging.basicConfig(level=values.log_level.upper(), format="%(levelname)s %(message)s")
    setproctitle.setproctitle("gllm-frontend")
    try:
        engine_config = from_flags(EngineConfig, values)
        server_config = from_flags(ServerConfig, values)
        return uvloop.run(Server(engine_config, server_config).run())
    except (ValueError, OSError, EngineError) as error:
        print(f"gllm: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineError) else 2


class Server:
    """The engine, the HTTP server, and the signals that end them."""

    def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        self._config = server
        self._engine = Engine(engine, server.served_model_name, server.log_level, progress=True)
        self._told_to_end = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal or the engine's death; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        runner = make_runner(make_app(self._engine, self._config), self._config)
        await runner.setup()
        site = web.TCPSite(runner, self._config.host, self._config.port)
        await site.start()
        try:
            return await self._serve(runner)
        finally:
            await runner.cleanup()

    async def _serve(self, runner: web.AppRunner) -> int:
        told = asyncio.ensure_future(self._told_to_end.wait())
        started = asyncio.ensure_future(self._engine.start())
        await asyncio.wait({told, started}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await asyncio.wait({started})
            return 0
        await started
        self._greet(runner)
        # What start-up made stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        died = asyncio.ensure_future(self._engine.died.wait())
        await asyncio.wait({told, died}, return_when=asyncio.FIRST_COMPLETED)
        if not died.done():
            log.info("draining %d requests", self._engine.num_requests)
            await self._engine.drain(self._config.shutdown_timeout)
        if self._engine.state == "dead":
            log.error("the engine is down: %s", self._engine.cause)
            await asyncio.wait({told}, timeout=DEAD_SECONDS)
            await self._engine.stop()
            return 1
        await self._engine.stop()
        return 0

    def _on_signal(self) -> None:
        if self._told_to_end.is_set():
            # Workers die with their parent.
            os._exit(1)
        self._told_to_end.set()

    def _greet(self, runner: web.AppRunner) -> None:
        """Say what is served, how much fits, and how to ask."""
        engine = self._engine
        host, port = runner.addresses[0][:2]
        length, blocks = engine.model.max_model_len, engine.num_blocks
        tokens = blocks * engine.config.scheduler.block_size
        log.info(
            "KV cache: %.1f MiB, %d blocks, %.1f requests of full length (%d tokens)",
            engine.kv_bytes / 2**20, blocks, tokens / length, length,
        )  # fmt: skip
        question = '{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}'
        log.info(
            "%s is ready:\ncurl -N http://%s:%d/v1/chat/completions "
            "-H 'Content-Type: application/json' -d '%s'",
            engine.model.name, host, port, question,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
