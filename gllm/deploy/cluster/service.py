"""A service of a cluster and its processes, as the table of services knows them."""

from dataclasses import dataclass, field
from enum import StrEnum

from gllm.deploy.cluster.selection import NodeSelection
from gllm.deploy.cluster.service_meter import ServiceMeter
from gllm.deploy.cluster.service_request import ServiceRequest
from gllm.messages.services import ServiceReading


class ServiceState(StrEnum):
    """State of a service."""

    STARTING = "starting"
    """Its processes start, or load the model."""
    READY = "ready"
    RECOVERING = "recovering"
    """Its engine recovers, or the node of its head is lost; requests wait."""
    MOVING = "moving"
    """Its processes end, because a node leaves, and start again on other nodes."""
    STOPPING = "stopping"
    """Its processes end, because it was deleted."""
    FAILED = "failed"


RUNNING_STATES = frozenset({ServiceState.STARTING, ServiceState.READY, ServiceState.RECOVERING})
"""States in which a service has an engine."""


@dataclass(slots=True)
class ServiceProcess:
    """Process of a service on a node."""

    number: int
    service: str
    node: str
    rank: int
    is_started: bool = False
    """True once the node was sent the command."""
    is_ending: bool = False
    num_restarts: int = 0
    restart_at: float | None = None
    """Time of the restart of a process that has exited."""


@dataclass(slots=True)
class Service:
    """A service that was deployed and not deleted."""

    request: ServiceRequest
    api_key: str
    selection: NodeSelection
    state: ServiceState = ServiceState.STARTING
    cause: str = ""
    """Cause of the state; empty for none."""
    url: str = ""
    """URL of its API; empty before the head's process has started."""
    head: str = ""
    """HOST:PORT at which nodes join its engine; empty as above."""
    ready_at: float | None = None
    """Time at which its engine was ready first; None before."""
    reading: ServiceReading = field(default_factory=lambda: ServiceReading("loading"))
    meter: ServiceMeter = field(default_factory=ServiceMeter)
    left_nodes: set[str] = field(default_factory=set)
    """Nodes of the selection that have left the running engine."""

    created: int = 0
    """Time of its deployment, in seconds since 1970."""

    def uptime_seconds(self, now: float) -> float:
        """Return the time since its engine was ready first; 0 before, and after it has failed."""
        if self.ready_at is None or self.state not in RUNNING_STATES:
            return 0.0
        return now - self.ready_at

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes of its engine, the head first."""
        return tuple(name for name in self.selection.nodes if name not in self.left_nodes)
