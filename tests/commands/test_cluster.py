"""`gllm cluster`, and peers that meet its master by another command than `gllm node --join`."""

import asyncio
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from gllm.__main__ import main
from gllm.config.cluster import ClusterConfig
from gllm.deploy.cluster.master import Master
from gllm.deploy.doctor.finding import Verdict
from gllm.deploy.doctor.head_probe import check_answer, probe_head
from gllm.options.exit_status import UNAVAILABLE_STATUS
from gllm.runtime.messaging.security import create_secret_file
from tests.commands.test_node_join import SECONDS, get, node_process, read_until
from tests.deploy.doctor.test_head_probe import make_facts
from tests.support.network.ports import free_port
from tests.support.nodes.agent_head import RunningAgent


@pytest.fixture
async def master() -> AsyncIterator[Master]:
    """A master without nodes."""
    running = Master(ClusterConfig(hub=f"127.0.0.1:{free_port()}"))
    running.start()
    yield running
    await running.stop()


def address_of(master: Master) -> tuple[str, int]:
    host, _, port = master.address.removeprefix("tcp://").partition(":")
    return host, int(port)


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ([], "needs an API key"),
        (["--api-key", "k", "--hub", "0.0.0.0:29600"], "--node-secret-file"),
        (["--api-key", "k", "--node-secret-file", "/no/such/file"], "/no/such/file"),
    ],
)
def test_a_master_that_cannot_start_says_why(
    flags: list[str], cause: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *flags]) == 2
    assert cause in capfd.readouterr().err


def raise_unknown_name(*_: object, **__: object) -> NoReturn:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_busy_port_and_an_unknown_name_are_named(
    tmp_path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    create_secret_file(tmp_path / "secret")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        hub = f"127.0.0.1:{probe.getsockname()[1]}"
        flags = ["--api-key", "k", "--hub", hub, "--port", "0"]
        flags += ["--node-secret-file", str(tmp_path / "secret")]
        assert main(["cluster", *flags]) == UNAVAILABLE_STATUS
    assert hub in capfd.readouterr().err
    monkeypatch.setattr(socket, "getaddrinfo", raise_unknown_name)
    flags[flags.index("--hub") + 1] = "nowhere"
    assert main(["cluster", *flags]) == UNAVAILABLE_STATUS
    assert "the host name of 'nowhere' is unknown" in capfd.readouterr().err


async def test_a_probe_learns_that_it_is_a_master(master: Master) -> None:
    answer = await probe_head(*address_of(master), None)
    findings = check_answer(answer, make_facts(), None)
    assert [finding.verdict for finding in findings] == [Verdict.GOOD, Verdict.GOOD]
    assert "it is the master of a cluster" in findings[0].text
    assert "the version is the same" in findings[1].text


async def test_a_machine_with_a_rank_is_sent_away(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = address_of(master)
    head: Any = SimpleNamespace(address=f"{host}:{port}")
    agent = RunningAgent(head, rank=1)
    assert await agent.ended() == 2
    assert agent.agent.is_refused_by_master
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "it is the master of a cluster, which runs services: use `gllm node --join`" in (
        record.getMessage()
    )


async def test_a_node_joins_serves_its_probes_and_ends_with_the_master(master: Master) -> None:
    host, port = address_of(master)
    flags = ["--node-name", "b", "--data-port", "0", "--port", "0"]
    command = ["-m", "gllm", "node", "--join", f"{host}:{port}", *flags]
    async with node_process(*command) as process:
        await read_until(process, "is the master of a cluster: this node runs its services")
        match = await read_until(process, r"metrics at (http://\S+)")
        await read_until(process, "is a member of the cluster")
        assert (await get(match[1] + "/ready"))[0] == 200
        assert master.node("b").report.state == "spare"
        assert master.refused_peers == {}
        await master.stop()
        assert await asyncio.wait_for(process.wait(), SECONDS) == 0
