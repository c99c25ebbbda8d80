"""Processes of services on a node: command lines, ends and their causes, lost sessions."""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gllm import __version__, serve
from gllm.config.cluster import ClusterConfig
from gllm.config.join import JoinConfig
from gllm.config.nodes import NodesConfig
from gllm.deploy.cluster.master import Master
from gllm.deploy.cluster.member import ClusterMember
from gllm.deploy.cluster.selection import NodeRequirements
from gllm.deploy.cluster.service import ServiceRequest
from gllm.deploy.cluster.service_processes import (
    ServiceMachine,
    ServicePorts,
    ServiceProcesses,
    make_service_spec,
)
from gllm.messages.base import WireMessage
from gllm.messages.nodes import NodeFacts
from gllm.messages.services import (
    ServiceProcessExited,
    ServiceProcessStarted,
    StartServiceProcess,
)
from gllm.options.flags import config_from_flags
from gllm.plan.processes import ProcessSpec
from gllm.runtime.node.head_session import AgentConfig
from tests.support.network.ports import free_port
from tests.support.network.proxies import Proxy
from tests.support.nodes.scripted_cluster import until

MACHINE = ServiceMachine("a", "127.0.0.1", JoinConfig(service_ports=(29710, 29719)))
START = StartServiceProcess(1, "chat", "demo", 0, [2, 1], "auto", {}, "", "sk-x", 30.0)
SLEEP = """
import os, sys, time
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(60)
"""
"""Writes its process id into the file that its argument names."""


def test_the_command_line_is_one_of_gllm_serve() -> None:
    machine = ServiceMachine(
        "a",
        "10.0.0.2",
        JoinConfig(
            node_secret_file="/secret",
            data_port=29601,
            advertise="relay:1",
            link_congestion="bbr",
            link_policy="molink",
            device="cpu",
            threads=3,
            gpu_memory_utilization=0.5,
        ),
    )
    parameters = {"max_model_len": 64, "prefix_cache": False, "dtype": "float32", "seed": None}
    start = msgspec.structs.replace(START, parameters=parameters)
    spec = make_service_spec(machine, start, ServicePorts(5, 6), "10.0.0.2:6")
    assert (spec.module, spec.url) == ("gllm.serve", "http://10.0.0.2:5")
    assert not any("sk-x" in word for word in spec.arguments)
    assert spec.environment == {"GLLM_API_KEY": "sk-x"}
    values = serve.make_parser().parse_args(spec.arguments)
    assert (values.model, values.host, values.port) == ("demo", "10.0.0.2", 5)
    assert (values.tensor_parallel_size, values.layers) == ((2, 1), "auto")
    assert (values.max_model_len, values.prefix_cache, values.dtype) == (64, False, "float32")
    assert (values.threads, values.device, values.gpu_memory_utilization) == (3, "cpu", 0.5)
    assert values.node_secret_file == "/secret"
    nodes = config_from_flags(NodesConfig, values)
    assert (nodes.nnodes, nodes.node_rank, nodes.master_addr) == (2, 0, "10.0.0.2:6")
    assert (nodes.node_name, nodes.data_port, nodes.advertise) == ("a", 29601, "relay:1")
    assert (nodes.link_congestion, nodes.link_policy) == ("bbr", "molink")
    member = msgspec.structs.replace(start, node_rank=1, api_key="")
    spec = make_service_spec(machine, member, ServicePorts(), "10.0.0.9:6")
    assert spec.environment == {}
    values = serve.make_parser().parse_args(spec.arguments)
    assert (values.node_rank, values.master_addr) == (1, "10.0.0.9:6")
    assert (values.host, values.port) == ("127.0.0.1", 0)


def test_a_node_refuses_parameters_that_services_may_not_set() -> None:
    start = msgspec.structs.replace(START, parameters={"step_log": "/etc/passwd"})
    with pytest.raises(ValueError, match="step_log"):
        make_service_spec(MACHINE, start, ServicePorts(5, 6), "x:6")


class Scripts:
    """Scripts in place of `gllm serve`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = SLEEP
        self._numbers = itertools.count(1)

    def make_command(self, spec: ProcessSpec) -> list[str]:
        # Processes are started in the order of their numbers.
        path = self.folder / str(next(self._numbers))
        return [sys.executable, "-S", "-c", self.script, str(path)]

    @property
    def pids(self) -> dict[int, int]:
        """Ids of the processes that run, by their numbers."""
        files = [path for path in self.folder.iterdir() if not path.suffix]
        pids = {int(path.name): int(path.read_text()) for path in files}
        return {number: pid for number, pid in pids.items() if is_alive(pid)}


class Node:
    """Processes of a node, and what it reports."""

    def __init__(self, scripts: Scripts) -> None:
        self.scripts = scripts
        self.sent: list[WireMessage] = []
        self.processes = ServiceProcesses(
            MACHINE, self.sent.append, scripts.make_command, kill_seconds=0.1
        )

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.sent if isinstance(each, kind)]

    async def start(self, number: int = 1, **fields: Any) -> None:
        self.processes.start(msgspec.structs.replace(START, process=number, **fields))

        def has_started() -> bool:
            # The process may write its id before its start is reported.
            reported = [start.process for start in self.of(ServiceProcessStarted)]
            is_member = fields.get("node_rank", 0) > 0
            return number in self.scripts.pids and (is_member or number in reported)

        await until(lambda: has_started() or self.of(ServiceProcessExited))


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


@pytest.fixture
async def node(scripts: Scripts) -> AsyncIterator[Node]:
    under_test = Node(scripts)
    yield under_test
    await under_test.processes.close()


async def test_a_head_reports_its_addresses_and_its_end(node: Node) -> None:
    await node.start()
    (started,) = node.of(ServiceProcessStarted)
    assert started.head.startswith("127.0.0.1:297")
    assert started.url.startswith("http://127.0.0.1:297")
    assert started.url != f"http://{started.head}"
    assert node.processes.living == [1]
    # The master of another session learns of it.
    node.processes.kill_all_except([1])
    assert node.of(ServiceProcessStarted) == [started, started]
    node.processes.end(1)
    assert node.processes.living == []
    await until(lambda: node.of(ServiceProcessExited))
    assert node.of(ServiceProcessExited) == [ServiceProcessExited(1, "it was killed by SIGTERM")]


async def test_two_heads_have_different_ports_and_members_none(node: Node) -> None:
    await node.start(1)
    await node.start(2)
    await node.start(3, node_rank=1, head="10.0.0.1:5")
    heads = node.of(ServiceProcessStarted)
    assert len({*(each.head for each in heads), *(each.url[7:] for each in heads)}) == 4
    assert [each.process for each in heads] == [1, 2]


async def test_the_environment_has_the_key_and_no_launcher(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("GLLM_API_KEY", "SLURM_NODEID", "GROUP_RANK")
    for name in names:
        monkeypatch.setenv(name, "mine")
    node.scripts.script = f"import os, sys; sys.exit([os.environ.get(name) for name in {names}])"
    for number, fields in ((1, {}), (2, {"node_rank": 1, "api_key": ""})):
        node.processes.start(msgspec.structs.replace(START, process=number, **fields))
        await until(lambda: not node.processes.living)
    causes = [exited.cause for exited in node.of(ServiceProcessExited)]
    assert causes == [
        "it exited with 1: ['sk-x', None, None]",
        "it exited with 1: [None, None, None]",
    ]


async def test_failures_to_start_are_reported(node: Node) -> None:
    node.scripts.script = "import sys; print('x'); sys.exit('gllm: no such model')"
    await node.start()
    assert "it exited with 1: gllm: no such model" in node.of(ServiceProcessExited)[0].cause
    machine = ServiceMachine("a", "127.0.0.1", JoinConfig(service_ports=(29710, 29710)))
    processes = ServiceProcesses(machine, node.sent.append)
    processes.start(msgspec.structs.replace(START, process=2))
    await until(lambda: len(node.of(ServiceProcessExited)) == 2)
    assert "too few ports of --service-ports 29710-29710" in node.of(ServiceProcessExited)[1].cause


async def test_a_process_that_ignores_its_end_is_killed(node: Node) -> None:
    node.scripts.script = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEP}"
    await node.start(shutdown_seconds=0.0)
    node.processes.end(1)
    await until(lambda: node.of(ServiceProcessExited))
    assert node.of(ServiceProcessExited)[0].cause == "it was killed by SIGKILL"
    node.processes.end(1)
    assert node.of(ServiceProcessExited)[1].cause == "it does not run"


async def test_output_without_line_ends_does_not_stop_a_process(node: Node) -> None:
    node.scripts.script = f"print('x' * 300000)\n{SLEEP}"
    await node.start()
    assert list(node.scripts.pids) == [1]


class RunningNode:
    """A node of a master in this process."""

    def __init__(self, address: str, scripts: Scripts) -> None:
        facts = NodeFacts("host", "Linux", __version__, "127.0.0.1", 29601, "", b"", [], 2, 2**33)
        self.scripts = scripts
        self._proxy = Proxy(int(address.rpartition(":")[2]))
        config = AgentConfig(head=self._proxy.address, name="a")
        self.node = ClusterMember(config, facts, MACHINE, make_command=scripts.make_command)
        self.task = asyncio.create_task(self.node.run())

    @property
    def pids(self) -> list[int]:
        """Processes of services."""
        return list(self.scripts.pids.values())

    def cut(self) -> None:
        """Reset the connection to the master."""
        self._proxy.reset()

    async def ended(self) -> int:
        """Wait for the end of the node; its exit status."""
        status = await asyncio.wait_for(self.task, 30)
        self._proxy.close()
        return status


def start_master(**options: Any) -> Master:
    hub = f"127.0.0.1:{free_port()}"
    master = Master(ClusterConfig(hub=hub, node_timeout=2.0, **options), 0.0)
    master.start()
    return master


def is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_a_lost_session_keeps_the_processes_and_the_master_ends_them(
    scripts: Scripts,
) -> None:
    master = start_master()
    member = RunningNode(master.address, scripts)
    await until(lambda: master.nodes())
    master.deploy(ServiceRequest("chat", "demo", NodeRequirements(1)))
    await until(lambda: member.pids and master.service("chat").url)
    (pid,) = member.pids
    num_sessions = member.node.status().num_sessions
    member.cut()
    await until(lambda: member.node.status().num_sessions == num_sessions + 1)
    assert (member.pids, member.node.status().state) == ([pid], "member")
    # Lost while its process ends: the master learns of it when the node returns.
    member.cut()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: master.service("chat").state == "failed")
    master.delete("chat")
    assert master.services() == []
    master.deploy(ServiceRequest("next", "demo"))
    await until(lambda: member.pids)
    (pid,) = member.pids
    await master.stop()
    assert await member.ended() == 0
    assert not is_alive(pid)
    assert member.node.status().state == "ended"


async def test_a_node_that_leaves_ends_its_processes(scripts: Scripts) -> None:
    master = start_master()
    member = RunningNode(master.address, scripts)
    await until(lambda: master.nodes())
    master.deploy(ServiceRequest("chat", "demo"))
    await until(lambda: member.pids)
    (pid,) = member.pids
    member.node.leave("it got SIGTERM")
    assert await member.ended() == 0
    assert not is_alive(pid)
    await until(lambda: master.nodes() == [])
    assert master.service("chat").state == "failed"
    await master.stop()
