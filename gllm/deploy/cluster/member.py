"""Membership of a machine in a cluster: a session with its master, and the processes of services.

Unlike the agent of an engine (`gllm.runtime.node.agent`) it has no workers of its own: each process
of a service has them. A lost session costs no process for as long as the master may return.
"""

from collections.abc import Callable

from gllm.deploy.cluster.service_processes import MakeCommand, ServiceMachine, ServiceProcesses
from gllm.messages.codec import AnyMessage, decode_for_service_node
from gllm.messages.nodes import PROTOCOL, JoinCluster, NodeFacts, NodeLoad, WelcomeNode
from gllm.messages.services import DrainServiceNode, EndServiceProcess, StartServiceProcess
from gllm.runtime.node.head_session import AgentConfig, NodeReading
from gllm.runtime.node.membership import NodeMembership


class ClusterMember(NodeMembership):
    """Membership of this machine in a cluster: runs processes of engines for the master."""

    _group = "cluster"
    _peer = "master"

    def __init__(
        self,
        config: AgentConfig,
        facts: NodeFacts,
        machine: ServiceMachine,
        read_load: Callable[[], NodeLoad] = NodeLoad,
        make_command: MakeCommand | None = None,
    ) -> None:
        """Create a node that has not started.

        Args:
            config: options of the membership; `head` is the address of the master.
            facts: version, devices and addresses of this machine, announced to the master.
            machine: address and configuration that the processes of services share.
            read_load: returns the current load of this machine.
            make_command: returns program and arguments of a process of a service; None for this
                Python.

        Raises:
            ValueError: the master's address or the secret file cannot be used.
        """
        super().__init__(config, facts, read_load, decode=decode_for_service_node)
        self._run = 0
        """Run of the master in the last session."""
        self._processes = ServiceProcesses(machine, self._dialer.send, make_command)

    @property
    def _num_processes(self) -> int:
        return len(self._processes.living)

    def _make_join(self) -> JoinCluster:
        return JoinCluster(
            PROTOCOL,
            self._config.name,
            self._agent,
            None,
            False,
            "",
            b"",
            self._facts,
            self._processes.living,
            self._run,
            runs_services=True,
        )

    def _read_node(self) -> NodeReading:
        self._load = self._read_load()
        return NodeReading([], self._load, [])

    def _on_welcome(self, welcome: WelcomeNode) -> None:
        self._run = welcome.run
        self._processes.kill_all_except(welcome.workers)

    def _handle(self, message: AnyMessage) -> None:
        match message:
            case StartServiceProcess():
                self._processes.start(message)
            case DrainServiceNode(number, node):
                self._processes.drain_node(number, node)
            case EndServiceProcess(number):
                self._processes.end(number)

    async def _before_leaving(self) -> None:
        # The master is notified of each process that ends.
        await self._processes.close()
