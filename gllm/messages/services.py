"""Messages between the master of a cluster (`gllm cluster`) and its nodes.

A session begins as that of an engine's agent (`gllm.messages.nodes`): `JoinCluster`, `WelcomeNode`,
heartbeats. The master then lets nodes run the processes of services: each service is one engine,
with a process of `gllm serve` per node.
"""

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
    """Measured connection between two nodes; unknown values are None."""

    source: str
    target: str
    bytes_per_second: float | None
    round_trip_seconds: float | None


class ServiceReading(msgspec.Struct, frozen=True, array_like=True):
    """State and counters of a service's engine, read by the node of its head."""

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
    """Command to a node: run a process of a service."""

    process: Count
    """Number of the process, never used again within a run of the master."""
    service: str
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
    """Command to a node: end a process; `ServiceProcessExited` follows."""

    process: Count


class DrainServiceNode(ProcessMessage, frozen=True):
    """Command to the node of a head: remove another node from the running engine."""

    process: Count
    """Process of the head."""
    node: str
    """Node that leaves; its process exits once its layers have moved."""


class ServiceNodeKept(ProcessMessage, frozen=True):
    """Report that an engine does not release a node, because memory is short without it."""

    process: Count
    """Process of the head."""
    node: str
    cause: str


class ServiceProcessStarted(ProcessMessage, frozen=True):
    """Report that the process of an engine's head has started."""

    process: Count
    head: str
    """HOST:PORT at which the other nodes join the engine."""
    url: str
    """URL of the service's API."""


class ServiceProcessExited(ProcessMessage, frozen=True):
    """Report that a process has exited, or could not be started."""

    process: Count
    cause: str


class ServiceReport(ProcessMessage, frozen=True):
    """Report on a service, from the node of its head, once per second."""

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
