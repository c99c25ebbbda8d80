"""All nodes of an engine as one: each worker is handled by the node on which it runs."""

from pathlib import Path

from gllm.cluster.liveness import ProcessSample
from gllm.cluster.placement import Placement
from gllm.config.engine import EngineConfig
from gllm.runtime.assignment import NodeAssignment, StageAssignment, WorkerIdentity
from gllm.runtime.node import Node, OnExit
from gllm.runtime.remote_node import RemoteNode


class NodeGroup(Node):
    """The head's own node and the nodes of the agents, by name."""

    def __init__(self, local: Node) -> None:
        """Create the group of an engine on this machine.

        local: node of this machine.
        """
        super().__init__()
        self.local = local
        self.remotes: dict[str, RemoteNode] = {}
        """Nodes of agents that have joined, by name."""
        self._nodes: dict[int, Node] = {}
        """Node of each worker of another machine."""
        self._on_exit: OnExit | None = None

    def watch(self, on_exit: OnExit) -> None:
        """See Node."""
        self._on_exit = on_exit
        self.local.watch(on_exit)

    def spawn(self, identity: WorkerIdentity) -> None:
        """See Node; the worker runs where `place` has put it, by default on this machine."""
        self._node_of(identity.sender).spawn(identity)

    def kill(self, sender: int) -> None:
        """See Node."""
        self._node_of(sender).kill(sender)

    def sample(self, sender: int) -> ProcessSample | None:
        """See Node."""
        return self._node_of(sender).sample(sender)

    def dump_stacks(self, sender: int) -> None:
        """See Node."""
        self._node_of(sender).dump_stacks(sender)

    def read_stacks(self, sender: int) -> str:
        """See Node."""
        return self._node_of(sender).read_stacks(sender)

    async def stop(self) -> None:
        """See Node; agents end their own workers."""
        await self.local.stop()

    def measure(self, placement: Placement, config: EngineConfig, folder: Path) -> None:
        """See Node."""
        self.local.measure(placement, config, folder)

    def assign(
        self,
        assignment: NodeAssignment,
        folder: Path,
        plan_record: int | None = None,
        output_lengths: dict[int, list[int]] | None = None,
    ) -> None:
        """See Node."""
        self.local.assign(assignment, folder, plan_record, output_lengths)

    def on_generation_ready(self) -> None:
        """See Node."""
        self.local.on_generation_ready()

    def _send(self, assignment: StageAssignment) -> None:
        raise AssertionError("each node sends the assignments of its workers")

    def _node_of(self, sender: int) -> Node:
        return self._nodes.get(sender, self.local)
