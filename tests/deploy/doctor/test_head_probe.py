"""Questions to a real hub of nodes, and `gllm doctor` as a whole."""

import asyncio
import socket
import threading
from contextlib import asynccontextmanager, contextmanager

import pytest

from gllm import __version__
from gllm.__main__ import main
from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.deploy.doctor.finding import Verdict
from gllm.deploy.doctor.head_probe import (
    HeadAnswer,
    check_answer,
    check_node_name,
    probe_head,
)
from gllm.engine.preflight import make_join_facts
from gllm.messages.nodes import PROTOCOL
from gllm.models.hub import DEMO
from gllm.recovery.join_check import JoinFacts
from gllm.recovery.placement import LOCAL_NODE
from gllm.runtime.head.node_hub import NodeHub
from gllm.runtime.messaging.security import SecretFile, create_secret_file


def make_facts() -> JoinFacts:
    return make_join_facts(EngineConfig("demo", pipeline_parallel_size=2), DEMO, 512)


@asynccontextmanager
async def running_head(secret_file=None, facts=None):
    """A hub at a free port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = NodesConfig(nnodes=2, node_rank=0, master_addr=f"127.0.0.1:{port}")
    hub = NodeHub(config, secret_file, 1, facts or make_facts(), "big")
    hub.start()
    try:
        yield hub, port
    finally:
        await hub.stop("the end of the test")


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    create_secret_file(path)
    return str(path)


@pytest.fixture
def other_secret(tmp_path):
    path = tmp_path / "other"
    create_secret_file(path)
    return str(path)


async def ask(port, secret_file=None):
    keys = None if secret_file is None else SecretFile(secret_file).keys[0]
    return await probe_head("127.0.0.1", port, keys)


async def test_a_probe_does_not_join(secret):
    async with running_head(secret) as (hub, port):
        answer = await ask(port, secret)
        assert answer.facts is not None
        assert replace_facts(answer.facts) == replace_facts(hub.facts)
        assert answer.facts.nodes == ("big", LOCAL_NODE)
        assert hub.sessions == {}
        assert hub.refused_peers == {}
        findings = check_answer(answer, replace_facts(hub.facts), secret)
    assert [each.verdict for each in findings] == [Verdict.GOOD, Verdict.GOOD]
    assert "version and model" in findings[1].text


def replace_facts(facts, **changes):
    """Facts of another machine, which a probe compares without a configuration."""
    values = {
        "protocol": facts.protocol, "version": facts.version, "model": facts.model,
        "model_hash": facts.model_hash, "config": b"",
    }  # fmt: skip
    return JoinFacts(**(values | changes))


async def test_a_name_that_another_machine_has(secret):
    async with running_head(secret) as (_, port):
        answer = await ask(port, secret)

    def verdict(name):
        finding = check_node_name(answer, name, is_head=False)
        assert finding is not None
        return finding.verdict

    bad = check_node_name(answer, "big", is_head=False)
    assert bad is not None
    assert bad.verdict == Verdict.BAD
    assert "--node-name" in bad.fix
    assert verdict(LOCAL_NODE) == Verdict.BAD
    assert check_node_name(answer, "big", is_head=True) is None
    assert verdict("laptop") == Verdict.GOOD
    assert check_node_name(HeadAnswer(cause="no answer"), "pc", is_head=False) is None


async def test_another_version_and_model(secret):
    facts = replace_facts(make_facts(), version="9.9", model_hash="b" * 64)
    async with running_head(secret, facts) as (_, port):
        answer = await ask(port, secret)
    own = JoinFacts(PROTOCOL, __version__, "demo", "a" * 64, b"")
    _, version, model = check_answer(answer, own, secret)
    assert version.verdict == model.verdict == Verdict.BAD
    assert version.fix == "install gllm 9.9 on the node"
    assert "hash aaaaaaaaaaaa" in model.text
    assert "copy the head's model files" in model.fix


async def test_wrong_secret(secret, other_secret):
    async with running_head(secret) as (_, port):
        answer = await ask(port, other_secret)
    (finding,) = check_answer(answer, replace_facts(make_facts()), other_secret)
    assert finding.verdict == Verdict.BAD
    assert f"scp HEAD:FILE {other_secret}" in finding.fix


@pytest.mark.parametrize("has_head_secret", [True, False])
async def test_a_secret_at_one_end_only(secret, has_head_secret):
    async with running_head(secret if has_head_secret else None) as (_, port):
        own = None if has_head_secret else secret
        answer = await ask(port, own)
    (finding,) = check_answer(answer, replace_facts(make_facts()), own)
    assert finding.verdict == Verdict.BAD
    assert "secret" in finding.text + finding.fix


async def test_something_else_at_the_port():
    async def answer_http(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer_http, "127.0.0.1", 0)
    async with server:
        answer = await ask(server.sockets[0].getsockname()[1])
    (finding,) = check_answer(answer, replace_facts(make_facts()), None)
    assert finding.verdict == Verdict.BAD
    assert "not of the API" in finding.fix


@contextmanager
def head_in_thread(secret_file):
    """A hub on an event loop of its own, because the command has one too."""
    ports, end = [], threading.Event()
    started = threading.Event()

    async def serve():
        async with running_head(secret_file) as (_, port):
            ports.append(port)
            started.set()
            while not end.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(30)
        yield ports[0]
    finally:
        end.set()
        thread.join()


def test_doctor_of_a_good_machine(secret, capsys):
    with head_in_thread(secret) as port:
        arguments = ["--master-addr", f"127.0.0.1:{port}", "--node-secret-file", secret]
        assert main(["doctor", *arguments, "--model", "demo", "--data-port", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "nothing keeps this machine from joining"
    assert any("version and model are the same as on the head" in line for line in lines)


def test_doctor_lists_problems_with_their_fixes(secret, other_secret, capsys):
    with head_in_thread(secret) as port:
        head = f"127.0.0.1:{port}"
        arguments = ["--master-addr", head, "--node-secret-file", other_secret, "--data-port", "0"]
        assert main(["doctor", *arguments, "--model", "/no/such/model"]) == 1
    output = capsys.readouterr()
    assert "FAIL  model:" in output.out
    assert "FAIL  session with the head:" in output.out
    assert output.out.count("fix: ") >= 2
    assert "2 problem(s)" in output.err


def test_doctor_without_a_head(capsys):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert main(["doctor", "--master-addr", f"127.0.0.1:{port}", "--data-port", "0"]) == 1
    assert "refuses connections" in capsys.readouterr().out
    assert main(["doctor", "--master-addr", "no-such-host.invalid"]) == 1
    assert "is not known here" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    assert "not checked" in capsys.readouterr().out
