"""Node of another machine, as the head sees it: its agent carries everything out."""

import time
from pathlib import Path

from gllm.messages.nodes import AssignStages, DumpStacks, EndWorker, StartWorker
from gllm.options.addresses import format_host_port
from gllm.recovery.liveness import ProcessSample
from gllm.runtime.head.agent_session import AgentSession
from gllm.runtime.head.assignment import (
    NodeAssignment,
    StageAssignment,
    WorkerIdentity,
    encode_node_assignment,
)
from gllm.runtime.head.node import Node, OnExit
from gllm.transport.link.commands import LinkPeer

SILENT_SECONDS = 2.5
"""Time without a heartbeat after which the state of a node's workers is unknown."""


class RemoteNode(Node):
    """Workers of a machine whose agent has a session with the head."""

    def __init__(self, session: AgentSession) -> None:
        """Create the node of a session."""
        super().__init__(node_name=session.name)
        self.session = session
        self.workers: set[int] = set()
        """Senders of the workers that were started and have not exited."""
        self._stacks: dict[int, str] = {}
        """Stacks that workers have written, by sender."""
        self._on_exit: OnExit | None = None

    @property
    def is_silent(self) -> bool:
        """True if the agent has sent nothing for some time."""
        return time.monotonic() - self.session.last_heard > SILENT_SECONDS

    @property
    def peer(self) -> LinkPeer:
        """Data connections of the machine."""
        facts = self.session.join.facts
        address = facts.advertised
        if not address and facts.data_port:
            address = format_host_port(facts.address, facts.data_port)
        return LinkPeer(self.node_name, address, facts.certificate)

    def watch(self, on_exit: OnExit) -> None:
        """See Node."""
        self._on_exit = on_exit

    def spawn(self, identity: WorkerIdentity) -> None:
        """See Node; the address of the worker's hub is the agent's."""
        logs = identity.logs
        self.session.send(StartWorker(identity.sender, logs.level, logs.format))

    def kill(self, sender: int) -> None:
        """See Node."""
        self.session.send(EndWorker(sender))

    def sample(self, sender: int) -> ProcessSample | None:
        """See Node; as of the agent's last heartbeat."""
        return self.session.sample(sender)

    def dump_stacks(self, sender: int) -> None:
        """See Node."""
        self.session.send(DumpStacks(sender))

    def read_stacks(self, sender: int) -> str:
        """See Node; as the agent has reported them."""
        return self._stacks.get(sender, "")

    def on_stacks(self, sender: int, stacks: str) -> None:
        """Keep the stacks that the agent reports of a worker."""
        if stacks and sender in self.workers:
            self._stacks[sender] = stacks

    def on_exited(self, sender: int, description: str, stacks: str) -> None:
        """Report the exit of a worker."""
        self.on_stacks(sender, stacks)
        if self._on_exit is not None:
            self._on_exit(sender, f"{description}, on node {self.node_name}")

    def forget(self, sender: int) -> None:
        """Forget a worker that has exited."""
        self.workers.discard(sender)
        self._stacks.pop(sender, None)

    def assign(
        self,
        assignment: NodeAssignment,
        folder: Path,
        plan_record: int | None = None,
        output_lengths: dict[int, list[int]] | None = None,
    ) -> None:
        """See Node; the agent knows its own folder of the model, and the driver is elsewhere."""
        generation = assignment.placement.generation
        self.session.send(AssignStages(generation, encode_node_assignment(assignment)))

    async def stop(self) -> None:
        """Wait for nothing: the agent ends its workers."""

    def _send(self, assignment: StageAssignment) -> None:
        raise AssertionError("the agent sends the assignments of its workers")
