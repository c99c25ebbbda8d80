"""Messages between the master process of `gllm cluster` and the nodes that run its services."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gllm.messages.base import ProcessMessage
from gllm.messages.nodes import (
    JoinCluster,
    LeaveCluster,
    NodeHeartbeat,
    RefuseNode,
    WelcomeNode,
)

Count = Annotated[int, Meta(ge=0)]


class PeerLink(msgspec.Struct, frozen=True, array_like=True):
    """Measured bandwidth and round trip between two nodes; None for unknown values."""

    source: str
    """Name of the node that sends."""
    target: str
    """Name of the node that receives."""
    bytes_per_second: float | None
    round_trip_seconds: float | None


class ServiceReading(msgspec.Struct, frozen=True, array_like=True):
    """State, request counts and token counts of a service, which is a model served by one engine.

    They are read by the node of the engine's head process.
    """

    state: str
    """loading, ready, sleeping, recovering, draining, stuck, dead or unreachable."""
    cause: str = ""
    """Cause of the state; empty for none."""
    num_running: Count = 0
    num_waiting: Count = 0
    num_finished: Count = 0
    """Requests that have ended well since the start of the engine."""
    num_failed: Count = 0
    """Requests that have ended with an error, or were aborted."""
    num_prompt_tokens: Count = 0
    num_generated_tokens: Count = 0
    kv_cache_usage: float = 0.0
    """Share of the KV blocks in use, 0 to 1."""
    stage_busy_seconds: list[float] = []
    """Time spent computing since the start of the engine, per stage."""
    links: list[PeerLink] = []


class StartServiceProcess(ProcessMessage, frozen=True):
    """Command to a node: start a process of a service, with model, layers and parameters."""

    process: Count
    """Number of the process, never used again within a run of the master."""
    service: str
    """Name of the service."""
    model: str
    node_rank: Count
    """Rank of the node in the engine; 0 for the head."""
    degrees: list[int]
    """Tensor-parallel ranks of each stage; there is one stage per node."""
    layers: str
    """Division of the layers: even, or auto for one by measured speeds."""
    parameters: dict[str, Any]
    """Inference parameters by name (gllm/deploy/cluster/service.py)."""
    head: str
    """HOST:PORT of the engine's head; empty for the head, which chooses a port."""
    api_key: str
    """Key of the service; empty for nodes that do not serve its API."""
    shutdown_seconds: float
    """Time for running requests to finish when the process is ended."""


class EndServiceProcess(ProcessMessage, frozen=True):
    """Command to a node: end a service's process; `ServiceProcessExited` follows."""

    process: Count


class DrainServiceNode(ProcessMessage, frozen=True):
    """Command to the head node of a service: remove another node from its running engine."""

    process: Count
    """Process of the head."""
    node: str
    """Node that leaves; its process exits once its layers have moved."""


class ServiceNodeKept(ProcessMessage, frozen=True):
    """Report that a node cannot be removed from an engine, because memory would be too small."""

    process: Count
    """Process of the head."""
    node: str
    cause: str


class ServiceProcessStarted(ProcessMessage, frozen=True):
    """Report that the head process of a service has started, with its addresses."""

    process: Count
    head: str
    """HOST:PORT at which the other nodes join the engine."""
    url: str
    """URL of the service's API."""


class ServiceProcessExited(ProcessMessage, frozen=True):
    """Report that a service's process has exited, or could not be started."""

    process: Count
    cause: str


class ServiceReport(ProcessMessage, frozen=True):
    """State and counts of a service, sent once per second by the node of its head process."""

    process: Count
    reading: ServiceReading


ToMaster = (
    JoinCluster
    | NodeHeartbeat
    | LeaveCluster
    | ServiceProcessStarted
    | ServiceProcessExited
    | ServiceReport
    | ServiceNodeKept
)
"""Messages that a node without a model may send to the master, besides Hello."""
ToServiceNode = (
    WelcomeNode
    | RefuseNode
    | NodeHeartbeat
    | LeaveCluster
    | StartServiceProcess
    | EndServiceProcess
    | DrainServiceNode
)
"""Messages that the master may send to a node."""
