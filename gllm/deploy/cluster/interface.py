"""Interface of a cluster's master to its HTTP server: services, nodes, and errors."""

from dataclasses import dataclass, field
from typing import Protocol

from gllm.deploy.cluster.selection import SelectionError as SelectionError
from gllm.deploy.cluster.service import ServiceState
from gllm.deploy.cluster.service_meter import ServiceRates
from gllm.deploy.cluster.service_request import ServiceRequest
from gllm.messages.node_report import NodeReport


class UnknownServiceError(Exception):
    """There is no service of that name; the message names it."""


class UnknownClusterNodeError(Exception):
    """There is no node of that name; the message names it."""


class ServiceExistsError(Exception):
    """There is a service of that name already."""


@dataclass(frozen=True)
class ServiceStatus:
    """State of a service."""

    name: str
    model: str
    state: ServiceState
    cause: str
    """Cause of the state; empty for none."""
    url: str
    """URL of its API; empty before its head has started."""
    nodes: tuple[str, ...]
    """In the order of the pipeline stages; the first one runs the head."""
    created: int
    """Time of its deployment, in seconds since 1970."""
    uptime_seconds: float
    """Time since its engine was ready first; 0 before, and after it has failed."""
    engine_state: str
    """State of its engine, as its head reports it."""
    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    kv_cache_usage: float = 0.0
    rates: ServiceRates = field(default_factory=ServiceRates)


@dataclass(frozen=True)
class ClusterNode:
    """Node of a cluster."""

    report: NodeReport
    num_cores: int
    memory_bytes: int
    """Memory of the host that was available when the node joined."""
    data_port: int
    """Port at which it accepts activations; 0 if it only dials."""
    service: str | None
    """Service of which it runs a process; None for none."""
    is_draining: bool
    """True if it leaves the cluster once its processes have ended."""


class ClusterControl(Protocol):
    """Master of a cluster."""

    @property
    def address(self) -> str:
        """Address at which nodes join."""

    @property
    def refused_peers(self) -> dict[str, int]:
        """Refused connections of nodes by IP address."""

    def deploy(self, request: ServiceRequest) -> ServiceStatus:
        """Start a service on free nodes.

        Raises:
            ServiceExistsError: the name is taken.
            SelectionError: too few nodes fit.
        """

    def services(self) -> list[ServiceStatus]:
        """Return all services, in the order of their deployment."""

    def service(self, name: str) -> ServiceStatus:
        """Return a service. Raises UnknownServiceError."""

    def api_key(self, name: str) -> str:
        """Return the key of a service's API. Raises UnknownServiceError."""

    def delete(self, name: str) -> bool:
        """Begin to end a service; return False if there is none of that name."""

    def nodes(self) -> list[ClusterNode]:
        """Return all nodes, also those that are lost."""

    def node(self, name: str) -> ClusterNode:
        """Return a node. Raises UnknownClusterNodeError."""

    def drain_node(self, name: str) -> ClusterNode:
        """Begin to take a node out of the cluster: its service moves, then it leaves.

        A node that is lost is forgotten at once.

        Raises:
            UnknownClusterNodeError: there is no such node.
        """
