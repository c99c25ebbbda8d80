"""Actors that own a process, and the agent's command line."""

import socket
import subprocess
import sys
from pathlib import Path

from gllm.commands.node import make_parser
from gllm.deploy.ray.actors import agent_command, free_port
from gllm.observability.child_process import module_command
from tests.support.servers.server import alive, wait_until


def test_the_command_line_is_one_of_gllm_node_with_free_ports() -> None:
    ports = {"--data-port": free_port(0), "--port": free_port(0)}
    command = agent_command(["--join", "10.0.0.1:29600", "--spare"], "ray-x", ports, 0)
    start = module_command("gllm", "node")
    assert command[: len(start)] == start
    values = make_parser().parse_args(command[len(start) :])
    assert (values.join, values.spare, values.node_name) == ("10.0.0.1:29600", True, "ray-x")
    assert (values.data_port, values.port) == (ports["--data-port"], ports["--port"])


def test_an_agent_that_accepts_no_data_keeps_port_0_at_any_offset() -> None:
    command = agent_command([], "ray-x", {"--data-port": 0}, 3)
    assert command[-2:] == ["--data-port", "0"]


def test_a_port_in_use_is_replaced() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        port = free_port(taken)
    assert port not in (0, taken)
    assert free_port(port) == port


def test_the_agent_dies_with_its_actor(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    agent = (
        "import os, sys, time, pathlib\n"
        f"path = pathlib.Path({str(pid_file)!r})\n"
        "path.with_suffix('.new').write_text(str(os.getpid()))\n"
        "path.with_suffix('.new').rename(path)\n"
        "time.sleep(600)"
    )
    actor = (
        "import threading\n"
        "from gllm.deploy.ray.actors import ChildActor\n"
        f"ChildActor().start('agent', [{sys.executable!r}, '-c', {agent!r}])\n"
        "threading.Event().wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", actor])
    try:
        wait_until(lambda: pid_file.exists() or process.poll() is not None)
        pid = int(pid_file.read_text())
        assert alive(pid)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not alive(pid))


def test_an_actor_ends_some_time_after_its_agent_so_that_ray_restarts_it() -> None:
    program = (
        "import sys, threading\n"
        "from gllm.deploy.ray import actors\n"
        "actors.RESTART_SECONDS = 0.1\n"
        "command = [sys.executable, '-c', 'raise SystemExit(7)']\n"
        "actors.ChildActor().start('agent', command)\n"
        "threading.Event().wait()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90
    )
    assert result.returncode == 1
    assert "it exited with 7" in result.stderr
