"""`gllm node --join` and `gllm.serve --node-rank 1` as processes, against a real hub of nodes."""

import asyncio
import json
import re
import signal
import socket
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest

from gllm import serve
from gllm.__main__ import main
from gllm.options.exit_status import UNAVAILABLE_STATUS
from gllm.recovery.join_check import JoinFacts
from gllm.runtime.head.node_hub import AgentSession, NodeHub
from gllm.runtime.messaging.security import create_secret_file
from tests.deploy.doctor.test_head_probe import make_facts, running_head

SECONDS = 60
"""Longest time for a process to start on a busy machine."""


class WelcomingListener:
    """Welcomes every node, and does nothing else."""

    def __init__(self, hub: NodeHub) -> None:
        self._hub = hub

    def on_node_joined(self, session: AgentSession) -> None:
        self._hub.welcome(session, [])

    def on_node_message(self, session: AgentSession, message: object) -> None:
        pass

    def on_node_lost(
        self, session: AgentSession, cause: str, is_death: bool, has_left: bool
    ) -> None:
        pass


@asynccontextmanager
async def node_process(*arguments):
    """Start a process; end it if the test has not."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def read_until(process, pattern):
    """Return the match of a pattern in the output, and all output until then."""
    text = ""
    async with asyncio.timeout(SECONDS):
        while (match := re.search(pattern, text)) is None:
            line = await process.stdout.readline()
            assert line, f"the process has ended: {text}"
            text += line.decode()
    return match


async def wait_for(condition):
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.02)


async def get(url):
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.json()


async def test_join_without_a_rank(tmp_path):
    secret = str(tmp_path / "secret")
    create_secret_file(tmp_path / "secret")
    async with running_head(secret) as (hub, port):
        hub.listener = WelcomingListener(hub)
        arguments = ["--node-secret-file", secret, "--node-name", "b", "--data-port", "0"]
        command = ["-m", "gllm", "node", "--join", f"127.0.0.1:{port}", *arguments, "--port", "0"]
        async with node_process(*command) as process:
            match = await read_until(process, r"metrics at (http://\S+)")
            await wait_for(lambda: "b" in hub.sessions)
            facts = hub.sessions["b"].join.facts
            assert (facts.address, facts.data_port) == ("127.0.0.1", 0)
            assert facts.certificate
            assert (await get(match[1] + "/health"))[0] == 200
            status, body = await get(match[1] + "/ready")
            assert (status, body["node"], body["head"]) == (503, "b", f"127.0.0.1:{port}")
            status, body = await get(match[1] + "/v1/models")
            assert status == 404
            process.send_signal(signal.SIGTERM)
            await wait_for(lambda: "b" not in hub.sessions)
            assert await asyncio.wait_for(process.wait(), SECONDS) == 0
        assert hub.membership.nodes["b"].status == "left"


async def test_a_machine_with_another_configuration_ends_with_all_differences():
    facts = make_facts()
    config = json.loads(facts.config) | {"dtype": "float32", "health_timeout": 7.0}
    head = JoinFacts(
        facts.protocol, facts.version, "demo", facts.model_hash, json.dumps(config).encode()
    )
    async with running_head(None, head) as (_, port):
        flags = ["--pp", "2", "--nnodes", "2", "--node-rank", "1", "--data-port", "0"]
        address = ["--master-addr", f"127.0.0.1:{port}", "--port", "0"]
        async with node_process("-m", "gllm.serve", "demo", *flags, *address) as process:
            output = (await asyncio.wait_for(process.communicate(), SECONDS))[0].decode()
            assert process.returncode == 2, output
    assert "dtype is auto on the node, but float32 on the head" in output
    assert "health_timeout is 30.0 on the node, but 7.0 on the head" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--join", "192.0.2.1"], "needs a node secret"),
        (["--join", "a:b"], "neither HOST nor HOST:PORT"),
        (["--join", "127.0.0.1:1", "--node-secret-file", "/no/such/file"], "No such file"),
        (["--join", "no-such-host.invalid", "--join-timeout", "0.1"], "node secret"),
    ],
)
def test_invalid_joins(arguments, message, capsys):
    assert main(["node", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        head = ["--join", "127.0.0.1:1", "--port"]
        assert main(["node", *head, port, "--data-port", "0"]) == UNAVAILABLE_STATUS
        assert f"--port {port}: cannot listen there" in capsys.readouterr().err
        assert main(["node", *head, "0", "--data-port", port]) == UNAVAILABLE_STATUS
        assert f"--data-port {port}: cannot listen there" in capsys.readouterr().err


def test_serve_without_a_secret_off_loopback(capsys):
    flags = ["demo", "--pp", "2", "--nnodes", "2", "--master-addr", "192.0.2.1", "--node-rank"]
    assert serve.main([*flags, "1"]) == 2
    assert "gllm node --new-secret" in capsys.readouterr().err


def test_serve_with_fewer_stages_than_machines(capsys):
    flags = ["demo", "--nnodes", "2", "--master-addr", "127.0.0.1", "--node-rank", "0"]
    assert serve.main(flags) == 2
    assert "set --pp 2 or more" in capsys.readouterr().err


def test_an_extra_process_of_a_launcher_ends(capsys, monkeypatch):
    for name, value in {
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert serve.main(["demo", "--pp", "2"]) == 0
    assert "LOCAL_RANK" in capsys.readouterr().out
