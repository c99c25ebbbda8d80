"""Servers that the tests of one process share, by model and flags."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.servers.server import Server, serving

TINY = "tiny"
"""Stands for the model of the fixture `tiny_model`."""
SMALL = ("--kv-cache-memory", "64MiB")


class ServerFlags(NamedTuple):
    """A server that tests share: who needs other flags, or destroys it, starts one of its own."""

    name: str
    """In ids of tests, by which one process of pytest-xdist runs all tests of a server."""
    model: str
    flags: tuple[str, ...]


def _tiny_stages(num_stages: int) -> ServerFlags:
    # Prompts of more than 32 tokens have several chunks.
    chunks = ("--max-prefill-tokens", "32", "--max-num-batched-tokens", "48")
    flags = ("--pp", str(num_stages), *SMALL, *chunks)
    return ServerFlags(f"tiny-pp{num_stages}", TINY, flags)


TINY_ONE_STAGE, TINY_TWO_STAGES, TINY_FOUR_STAGES = map(_tiny_stages, (1, 2, 4))
DEMO_TWO_STAGES = ServerFlags("demo-pp2", "demo", ("--pp", "2", *SMALL, "--dtype", "float32"))

SHARED_SERVERS = TINY_ONE_STAGE, TINY_TWO_STAGES, TINY_FOUR_STAGES, DEMO_TWO_STAGES


class _Running(NamedTuple):
    server: Server
    context: AbstractContextManager[Server]

    @property
    def is_usable(self) -> bool:
        return self.server.process.poll() is None and self.server.status("/ready") == 200

    def close(self) -> None:
        self.context.__exit__(None, None, None)


class ServerPool:
    """Servers that stay for the next test with the same flags.

    Args:
        max_servers: Most servers that run at a time; one more ends the one that waits longest.
    """

    def __init__(self, max_servers: int) -> None:
        self._max_servers = max_servers
        self._running: dict[ServerFlags, _Running] = {}

    def get(self, wanted: ServerFlags, tiny_model: Path) -> Server:
        """Return a server that is ready; one that is not any more is replaced."""
        running = self._running.pop(wanted, None)
        if running is not None and not running.is_usable:
            running.close()
            running = None
        if running is None:
            while len(self._running) >= self._max_servers:
                self._running.pop(next(iter(self._running))).close()
            model = str(tiny_model) if wanted.model == TINY else wanted.model
            context = serving(model, *wanted.flags)
            running = _Running(context.__enter__(), context)
        self._running[wanted] = running
        return running.server

    def close(self) -> None:
        """End all servers."""
        for running in self._running.values():
            running.close()
        self._running.clear()


def share(*servers: Any) -> Any:
    """Return a fixture for the tests of a file, usually `server`: a server of each of the flags.

    Args:
        servers: ServerFlags, or `pytest.param` of them with marks.
    """

    @pytest.fixture(params=servers, ids=lambda server: server.name)
    def server(request: pytest.FixtureRequest, pool: ServerPool, tiny_model: Path) -> Server:
        return pool.get(request.param, tiny_model)

    return server
