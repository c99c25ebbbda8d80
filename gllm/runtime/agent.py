"""Agent of a machine other than the head's: runs its part of an engine's workers.

It has one session with the head at a time. Losing that costs no process and no weights: the agent
closes its stage instances, dials again and offers the workers that it has. This module imports no
torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gllm.messages.nodes import LinkState, NodeFacts, NodeLoad
from gllm.runtime.link_process import LinkProcess
from gllm.runtime.node import Node

FindModel = Callable[[str, str], Path]
"""Returns the folder of a model on this machine, given its name and its hash; blocks. Raises
ValueError or OSError with the cause."""


@dataclass(frozen=True)
class AgentConfig:
    """Membership that an agent asks for."""

    head: str
    """HOST:PORT of the head's hub."""
    name: str
    """Name of this machine, unique in the cluster."""
    rank: int | None = None
    """Node rank; None for a machine that joins without one."""
    is_spare: bool = False
    """True if the machine shall get stages only when another one is lost."""
    model_hash: str = ""
    """Digest of the model; empty if the machine learns the model from the head."""
    engine_config: bytes = b""
    """Own engine configuration as JSON. The head compares it if there is a rank; the values of
    `gllm.cluster.join_check.OWN_FIELDS` apply on this machine."""
    node_secret_file: str | None = None
    """File of the node secret; None without encryption, on loopback only."""
    join_timeout: float = 300.0
    """Seconds for which the agent tries to become a member."""


@dataclass(frozen=True)
class AgentStatus:
    """State of an agent, for its HTTP server and logs."""

    name: str
    """Name of this machine."""
    head: str
    """HOST:PORT of the head's hub."""
    state: str
    """joining, member, spare, disconnected or ended."""
    cause: str = ""
    """Reason for which the agent is no member; that of the engine's state while it is one."""
    engine_state: str = ""
    """State of the engine as the head has reported it last; empty before it did."""
    is_healthy: bool = True
    """True unless the agent is about to end its workers, or has ended them."""
    is_ready: bool = False
    """True if the agent has a session and the head has reported that the engine is ready."""
    load: NodeLoad = field(default_factory=NodeLoad)
    num_workers: int = 0
    """Worker processes that run."""
    num_sessions: int = 0
    """Times that the agent has become a member."""
    num_stale_frames: int = 0
    """Messages of earlier generations, runs and sessions that were dropped."""
    links: Sequence[LinkState] = ()
    """Data connections of this machine."""
    clock_offset_seconds: float | None = None
    """The head's clock minus the own one."""
    round_trip_seconds: float | None = None
    """Least round trip of the last heartbeats."""


class Agent:
    """Membership of this machine in an engine, from the first attempt to join until the end."""

    def __init__(
        self,
        config: AgentConfig,
        facts: NodeFacts,
        node: Node,
        links: LinkProcess,
        find_model: FindModel,
        read_load: Callable[[], NodeLoad] = NodeLoad,
    ) -> None:
        """Create an agent that has not started.

        Args:
            config: membership.
            facts: about this machine, for the head.
            node: runs the workers; its `node_name` is the name of the machine.
            links: connects edges to other machines.
            find_model: finds the model on this machine.
            read_load: reads the load of this machine.
        """
        raise NotImplementedError

    def status(self) -> AgentStatus:
        """Return the present state."""
        raise NotImplementedError

    def leave(self, cause: str) -> None:
        """Leave the cluster: tell the head, end the workers; `run` returns 0 then."""
        raise NotImplementedError

    async def run(self) -> int:
        """Serve until the membership ends; return the exit status of the process.

        0 after `leave`, or when the head ends the engine; 1 if the engine failed, or no head was
        there for too long; 2 if the head refuses the machine or the model is not found here.
        """
        raise NotImplementedError
