"""Configuration and state of an agent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gllm.messages.nodes import LinkState, NodeLoad
from gllm.runtime.worker.stage_sessions import LOST_SECONDS

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
    `gllm.recovery.join_check.OWN_FIELDS` apply on this machine."""
    node_secret_file: str | None = None
    """File of the node secret; None without encryption, on loopback only."""
    join_timeout: float = 300.0
    """Seconds for which the agent tries to become a member."""
    close_seconds: float = 10.0
    """Seconds in which a worker closes its stage before it is killed."""
    lost_seconds: float = LOST_SECONDS
    """Seconds after the end of a stage's session with the driver in which the head may close the
    stage; then the end is reported."""


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
    """Messages of earlier epochs, runs and sessions that were dropped."""
    links: Sequence[LinkState] = ()
    """Data connections of this machine."""
    clock_offset_seconds: float | None = None
    """The head's clock minus the own one."""
    round_trip_seconds: float | None = None
    """Least round trip of the last heartbeats."""
