"""A router with engines in processes of their own, as a user starts them."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gllm.commands.router import make_parser
from gllm.config.engine import EngineConfig
from gllm.options.flags import FlagParser, add_flags
from tests.support.network.ports import free_port
from tests.support.servers.server import (
    DEADLINE,
    ProcessLog,
    Server,
    end_with_the_tests,
    wait_until,
)


def split_flags(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of the engines and of the router among those of a server; some are of both."""
    of_engine = FlagParser()
    add_flags(of_engine, EngineConfig)
    of_router = make_parser()
    engine: list[str] = []
    router: list[str] = []
    targets: list[list[str]] = []
    for word in flags:
        if word.startswith("--"):
            name = word.partition("=")[0]
            targets = [engine] if has_flag(of_engine, name) else []
            targets += [router] if has_flag(of_router, name) and name != "--policy" else []
        for target in targets:
            target.append(word)
    return engine, router


def has_flag(parser: ArgumentParser, name: str) -> bool:
    """True if a parser knows a flag."""
    assert isinstance(parser, FlagParser)
    try:
        return name in parser.action_of(name.removeprefix("--")).option_strings
    except ValueError:
        return False


class EngineProcess:
    """`gllm serve MODEL --router ...` in a process group of its own."""

    def __init__(self, model: str, name: str, routers: str, *flags: str) -> None:
        command = [sys.executable, "-m", "gllm.serve", model, "--port", "0", "--name", name]
        command += ["--router", routers, "--kv-cache-memory", "64MiB", *flags]
        self.name = name
        self._log = ProcessLog()
        self.process = subprocess.Popen(
            command,
            stderr=self._log.descriptor,
            start_new_session=True,
            preexec_fn=end_with_the_tests(),
        )

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the head process and its workers."""
        os.killpg(self.process.pid, number)

    def terminate(self) -> tuple[int, str]:
        """Let the engine drain and end; its exit status and what it wrote to stderr."""
        self.process.terminate()
        return self.process.wait(timeout=DEADLINE), self._log.read()

    def close(self) -> None:
        """Kill the engine if it still runs."""
        if self.process.poll() is None:
            self.kill(signal.SIGCONT)
            self.kill()
        self.process.wait()


class Router(Server):
    """A router on free ports, and the engines that were started for it."""

    module = "gllm.commands.router"

    def __init__(
        self, model: str, *flags: str, certificate: str | None = None, hub: int | None = None
    ) -> None:
        self.model = model
        self.hub = hub or free_port()
        self.second_hub = free_port()
        """Port that no router has yet."""
        self.engines: dict[str, EngineProcess] = {}
        keys = dict(itertools.pairwise(flags))
        self._headers = {"x-api-key": keys["--api-key"]} if "--api-key" in keys else {}
        super().__init__(model, "--hub", str(self.hub), *flags, certificate=certificate)

    def start_engine(self, name: str, *flags: str, routers: str = "") -> EngineProcess:
        """Start an engine that dials this router, or others."""
        engine = EngineProcess(self.model, name, routers or f"127.0.0.1:{self.hub}", *flags)
        self.engines[name] = engine
        return engine

    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of /engines by name."""
        with self.open("/engines", None, **self._headers) as answer:
            return {row["name"]: row for row in json.load(answer)["engines"]}

    def change_role(self, name: str, role: str) -> float:
        """Change the role of an engine; the seconds until the router shows it."""
        begin = time.monotonic()
        assert self.post(f"/engines/{name}/role", {"role": role})[0] == 200
        wait_until(lambda: self.rows()[name]["role"] == role)
        return time.monotonic() - begin

    def losses(self) -> list[dict[str, int]]:
        """Counters of lost engines, and of requests that were taken to another engine."""
        with self.open("/engines", None, **self._headers) as answer:
            totals = json.load(answer)["router"]
        return [totals["lost_engines"], totals["migrations"]]

    def wait_until_ready(self, *names: str) -> None:
        """Wait until engines of these names take requests."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.end()[1]
            for engine in self.engines.values():
                assert engine.name not in names or engine.process.poll() is None, engine.name
            if not self.status("/version"):
                return False
            rows = self.rows()
            return all(rows.get(name, {}).get("state") == "ready" for name in names)

        wait_until(is_ready)

    def close(self) -> None:
        """Kill all processes that still run."""
        for engine in self.engines.values():
            engine.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextmanager
def serving_fleet(
    model: Path | str,
    *flags: str,
    names: Sequence[str] = ("a", "b"),
    router_flags: Sequence[str] = (),
    certificate: str | None = None,
) -> Iterator[Router]:
    """A router whose engines are ready; `flags` are those of a server, for whom they concern.

    `router_flags` are of the router alone: --policy means another thing to an engine.
    """
    of_engines, of_router = split_flags(flags)
    router = Router(str(model), *of_router, *router_flags, certificate=certificate)
    try:
        for name in names:
            router.start_engine(name, *of_engines)
        router.wait_until_ready(*names)
        yield router
    finally:
        router.close()
