"""Session of the head with the agent of another node, from its first message to its end."""

import time
from collections.abc import Callable

from gllm.cluster.liveness import ProcessSample
from gllm.messages.base import WireMessage
from gllm.messages.nodes import JoinCluster, NodeHeartbeat


class AgentSession:
    """A node that has asked to join, and the state that its heartbeats report."""

    def __init__(
        self, join: JoinCluster, address: str, send: Callable[[WireMessage], None], now: float
    ) -> None:
        """Create the session of an agent whose first message has arrived.

        Args:
            join: the message.
            address: the agent's IP address.
            send: queues a message to the agent.
            now: time in seconds.
        """
        self.join = join
        self.address = address
        self.send = send
        self.last_heard = now
        self.is_open = True
        self.heartbeat: NodeHeartbeat | None = None
        """Latest one."""

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.join.name

    @property
    def silent_seconds(self) -> float:
        """Time since the last message."""
        return time.monotonic() - self.last_heard

    def sample(self, sender: int) -> ProcessSample | None:
        """Return the state of a worker in the latest heartbeat; None if it has none."""
        samples = () if self.heartbeat is None else self.heartbeat.samples
        return next(
            (
                ProcessSample(each.is_stopped, each.cpu_seconds)
                for each in samples
                if each.sender == sender
            ),
            None,
        )
