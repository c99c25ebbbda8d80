"""Node of another machine, as the head sees it: its agent carries everything out."""

from gllm.cluster.liveness import ProcessSample
from gllm.messages.nodes import AssignStages, DumpStacks, EndWorker, StartWorker
from gllm.runtime.agent_session import AgentSession
from gllm.runtime.assignment import StageAssignment, WorkerIdentity
from gllm.runtime.node import Node, OnExit


class RemoteNode(Node):
    """Workers of a machine whose agent has a session with the head."""

    def __init__(self, session: AgentSession) -> None:
        """Create the node of a session."""
        super().__init__()
        self.session = session
        self.workers: set[int] = set()
        """Senders of the workers that were started and have not exited."""
        self._stacks: dict[int, str] = {}
        """Stacks that workers have written, by sender."""
        self._on_exit: OnExit | None = None

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.session.name

    def watch(self, on_exit: OnExit) -> None:
        """See Node."""
        self._on_exit = on_exit

    def spawn(self, identity: WorkerIdentity) -> None:
        """See Node; the address of the worker's hub is the agent's."""
        self.workers.add(identity.sender)
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
        """Keep the stacks of a worker."""
        if sender in self.workers:
            self._stacks[sender] = stacks

    def on_exited(self, sender: int, description: str, stacks: str) -> bool:
        """Report the exit of a worker; return False if it is none of this node."""
        if sender not in self.workers:
            return False
        if stacks:
            self._stacks[sender] = stacks
        if self._on_exit is not None:
            self._on_exit(sender, description)
        self.workers.discard(sender)
        self._stacks.pop(sender, None)
        return True

    def assign_stages(self, generation: int, assignment: bytes) -> None:
        """Begin a generation on the node.

        Args:
            generation: its number.
            assignment: a NodeAssignment as JSON.
        """
        self.session.send(AssignStages(generation, assignment))

    async def stop(self) -> None:
        """Wait for nothing: the agent ends its workers."""

    def _send(self, assignment: StageAssignment) -> None:
        raise AssertionError("the agent sends the assignments of its workers")
