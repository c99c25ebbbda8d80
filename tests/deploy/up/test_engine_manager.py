"""Engines of a plan on this machine: order of the end, first cause, engines at run time."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence

import pytest

from gllm.deploy.logged_process import LocalProcess
from gllm.deploy.up.engine_manager import EngineManager
from gllm.plan.processes import ProcessSpec
from tests.support.network.ports import free_port

SERVE = """
import signal, socket, sys

def end(number, frame):
    print("ends", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    connection, _ = server.accept()
    with connection:
        is_ready = connection.recv(4096).startswith(b"GET /ready ")
        status = b"200 OK" if is_ready else b"404 Not Found"
        end_of_head = b"Content-Length: 0\\r\\nConnection: close\\r\\n\\r\\n"
        connection.sendall(b"HTTP/1.1 %s\\r\\n" % status + end_of_head)
"""
FAIL = "import sys; print('no memory'); sys.exit(1)"
LEAVE = "print('bye')"


class Rig:
    """A manager of scripts, and what it reports."""

    def __init__(self, scripts: dict[str, str], is_scaled: bool = False) -> None:
        self.lines: list[tuple[str, str]] = []
        self.ready: list[list[str]] = []
        self.scripts = scripts
        self.manager = EngineManager(
            [self.make_spec(name) for name in scripts],
            lambda spec: LocalProcess(spec, self.on_line, self.make),
            lambda specs: self.ready.append([each.name for each in specs]),
            is_scaled,
            probe_seconds=0.02,
        )

    def make_spec(self, name: str) -> ProcessSpec:
        """Return a process with a port of its own."""
        module, port = (
            "gllm.commands.router" if name == "router" else "gllm.serve",
            str(free_port()),
        )
        url = f"http://127.0.0.1:{port}"
        return ProcessSpec(name, module, [port], url, shutdown_seconds=20.0)

    def make(self, spec: ProcessSpec) -> Sequence[str]:
        return [sys.executable, "-S", "-c", self.scripts[spec.name], *spec.arguments]

    def on_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_router_before_the_engines(number: int) -> None:
    rig = Rig({"a": SERVE, "router": SERVE, "b": SERVE})
    run = asyncio.create_task(rig.manager.run())
    await rig.until(lambda: rig.ready)
    assert rig.ready == [["a", "router", "b"]]
    os.kill(os.getpid(), number)
    assert await run == 0
    ends = [name for name, line in rig.lines if line == "ends"]
    assert ends[0] == "router"
    assert sorted(ends[1:]) == ["a", "b"]
    assert rig.manager.cause == ""


async def test_the_first_failure_ends_all_and_is_named() -> None:
    rig = Rig({"router": SERVE, "a": FAIL})
    assert await rig.manager.run() == 1
    assert rig.manager.cause == "engine a: it exited with 1: no memory"
    assert rig.manager.running == []


async def test_a_program_that_does_not_exist_is_a_failure() -> None:
    specs = [ProcessSpec("a", "gllm.serve", [], "")]
    manager = EngineManager(
        specs,
        lambda spec: LocalProcess(spec, lambda name, line: None, lambda _: ["/no/such/program"]),
        lambda specs: None,
    )
    assert await manager.run() == 1
    assert "engine a: it could not be started: [Errno 2]" in manager.cause


async def test_the_node_ends_when_its_last_process_has_left() -> None:
    rig = Rig({"a": LEAVE, "b": LEAVE})
    assert await rig.manager.run() == 0


async def test_engines_are_drained_and_started_while_the_others_serve() -> None:
    rig = Rig({"router": SERVE, "a": SERVE})
    run = asyncio.create_task(rig.manager.run())
    await rig.until(lambda: rig.ready)
    await rig.manager.drain_engine("a")
    assert rig.manager.running == ["router"]
    with pytest.raises(ValueError, match="no engine 'a' runs"):
        await rig.manager.drain_engine("a")
    await rig.manager.start_engine("a")
    assert rig.manager.running == ["router", "a"]
    with pytest.raises(ValueError, match="runs already"):
        await rig.manager.start_engine("a")
    with pytest.raises(ValueError, match="there is no engine 'router'"):
        await rig.manager.start_engine("router")
    rig.manager.stop()
    assert await run == 0


async def test_an_engine_that_ends_before_it_is_ready_is_a_failure() -> None:
    rig = Rig({"router": SERVE, "a": SERVE})
    run = asyncio.create_task(rig.manager.run())
    await rig.until(lambda: rig.ready)
    await rig.manager.drain_engine("a")
    rig.scripts["a"] = FAIL
    with pytest.raises(ValueError, match="before it was ready: engine a: it exited with 1"):
        await rig.manager.start_engine("a")
    assert await run == 1
