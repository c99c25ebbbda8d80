"""Supervisor of a node's processes: order of the end, first cause, engines at run time."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence

import pytest

from gllm.launch.supervisor import ProcessSupervisor
from gllm.plan.processes import ProcessSpec

SERVE = """
import signal, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, *words):
        pass

server = HTTPServer(("127.0.0.1", 0), Handler)

def end(number, frame):
    print("ends", flush=True)
    threading.Thread(target=server.shutdown).start()

signal.signal(signal.SIGTERM, end)
print("port", server.server_port, flush=True)
server.serve_forever()
"""
FAIL = "import sys; print('no memory'); sys.exit(1)"
LEAVE = "print('bye')"


class Rig:
    """A supervisor of scripts, and what it reports."""

    def __init__(self, scripts: dict[str, str]) -> None:
        self.lines: list[tuple[str, str]] = []
        self.ready: list[list[str]] = []
        self.scripts = scripts
        specs = [
            ProcessSpec(name, "gllm.router" if name == "router" else "gllm.serve", [], "")
            for name in scripts
        ]
        self.supervisor = ProcessSupervisor(
            specs, self.on_line, lambda specs: self.ready.append([s.name for s in specs]), self.make
        )

    def make(self, spec: ProcessSpec) -> Sequence[str]:
        return [sys.executable, "-S", "-c", self.scripts[spec.name]]

    def on_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        word, _, port = line.partition(" ")
        if word == "port":
            # The port is not known before.
            spec = self.supervisor._processes[name].spec
            self.supervisor._processes[name].spec = ProcessSpec(
                name, spec.module, [], f"http://127.0.0.1:{port}", shutdown_seconds=20.0
            )

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_router_before_the_engines(number: int) -> None:
    rig = Rig({"a": SERVE, "router": SERVE, "b": SERVE})
    run = asyncio.create_task(rig.supervisor.run())
    await rig.until(lambda: rig.ready)
    assert rig.ready == [["a", "router", "b"]]
    os.kill(os.getpid(), number)
    assert await run == 0
    ends = [name for name, line in rig.lines if line == "ends"]
    assert ends[0] == "router"
    assert sorted(ends[1:]) == ["a", "b"]
    assert rig.supervisor.cause == ""


async def test_the_first_failure_ends_all_and_is_named() -> None:
    rig = Rig({"router": SERVE, "a": FAIL})
    assert await rig.supervisor.run() == 1
    assert rig.supervisor.cause == "engine a: it exited with 1: no memory"
    assert rig.supervisor.running == []


async def test_a_program_that_does_not_exist_is_a_failure() -> None:
    rig = Rig({"a": FAIL})
    rig.supervisor._make_command = lambda spec: ["/no/such/program"]
    assert await rig.supervisor.run() == 1
    assert "engine a: it could not be started: [Errno 2]" in rig.supervisor.cause


async def test_the_node_ends_when_its_last_process_has_left() -> None:
    rig = Rig({"a": LEAVE, "b": LEAVE})
    assert await rig.supervisor.run() == 0


async def test_engines_are_drained_and_started_while_the_others_serve() -> None:
    rig = Rig({"router": SERVE, "a": SERVE})
    run = asyncio.create_task(rig.supervisor.run())
    await rig.until(lambda: rig.ready)
    await rig.supervisor.drain_engine("a")
    assert rig.supervisor.running == ["router"]
    with pytest.raises(ValueError, match="no engine 'a' runs"):
        await rig.supervisor.drain_engine("a")
    await rig.supervisor.start_engine("a")
    assert rig.supervisor.running == ["router", "a"]
    with pytest.raises(ValueError, match="runs already"):
        await rig.supervisor.start_engine("a")
    with pytest.raises(ValueError, match="there is no engine 'router'"):
        await rig.supervisor.start_engine("router")
    rig.supervisor.stop()
    assert await run == 0


async def test_an_engine_that_ends_before_it_is_ready_is_a_failure() -> None:
    rig = Rig({"router": SERVE, "a": SERVE})
    run = asyncio.create_task(rig.supervisor.run())
    await rig.until(lambda: rig.ready)
    await rig.supervisor.drain_engine("a")
    rig.scripts["a"] = FAIL
    with pytest.raises(ValueError, match="before it was ready: engine a: it exited with 1"):
        await rig.supervisor.start_engine("a")
    assert await run == 1
