"""Messages between the head process of an engine and the processes (agents) of its other nodes."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gllm.messages.base import ProcessMessage
from gllm.messages.kv_layout import KvLayout

PROTOCOL = 3
"""Version of these messages; the head and all agents have to speak the same one."""

Count = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, lt=2**16)]


class NodeFacts(msgspec.Struct, frozen=True, array_like=True):
    """Hardware, addresses and versions of a machine, which do not change while its agent runs."""

    host_name: str
    system: str
    """Name and version of the operating system."""
    version: str
    """Version of gllm."""
    address: str
    """IP address of the node's interface towards the head."""
    data_port: Port
    """Port at which the node accepts activations; 0 if it accepts none."""
    advertised: str
    """HOST:PORT at which other nodes reach the data port; empty for `address` and `data_port`."""
    certificate: bytes
    """Certificate of the node's data connections, in DER; empty without encryption."""
    devices: list[str]
    """Names of the GPUs; empty if the workers compute on the CPU."""
    num_cores: Count
    memory_bytes: Count
    """Memory of the host that was available before the workers started."""


class NodeLoad(msgspec.Struct, frozen=True):
    """CPU, GPU and memory load, power and temperature of a machine; None for unknown values."""

    cpu_utilization: float | None = None
    """Share of all cores that is in use, 0 to 1."""
    memory_available_bytes: int | None = None
    gpu_utilization: list[float | None] = []
    """Per GPU, 0 to 1."""
    power_watts: float | None = None
    temperature_celsius: float | None = None


class WorkerSample(msgspec.Struct, frozen=True, array_like=True):
    """CPU time of a worker process, and whether it is stopped, as read by its machine."""

    sender: int
    is_stopped: bool
    cpu_seconds: float
    """CPU time of all its threads since its start."""


class LinkState(msgspec.Struct, frozen=True):
    """State and measured speed of one end of a connection between stages on two nodes."""

    edge: Count
    peer: str
    """Name of the node at the other end."""
    transport: str
    """tcp, tcp+tls or nccl."""
    is_open: bool
    num_bytes: Count
    """Bytes sent or received since the connection opened."""
    cause: str = ""
    """The connection is not open, or does not use NCCL, for this reason; empty for none."""
    num_failures: Count = 0
    """Connections of this edge that have broken."""
    is_sender: bool = False
    """True if this end sends activations; the fields below are measured at this end only."""
    policy: str = ""
    """Link policy that orders the steps; empty at a receiving end."""
    bytes_per_second: float | None = None
    """Payload that the link carries; None as long as nothing has filled it."""
    round_trip_seconds: float | None = None
    """Least round trip of the last seconds, without queues; None if unknown."""
    loss_rate: float = 0.0
    """Share of bytes that TCP sends again, 0 to 1."""
    num_queued_bytes: Count = 0
    """Bytes of steps that wait for the connection."""
    last_chunk_bytes: Count = 0
    """Size of the chunk that was sent last; 0 before the first one."""
    encoding: str = ""
    """Encoding of activations (`--link-encoding`), the same at both ends."""
    min_bytes_per_second: float | None = None
    """Payload that the link carries at least, by what it has carried; None if unknown."""


class JoinCluster(ProcessMessage, frozen=True):
    """Request of a node to join an engine: versions, model, configuration, surviving workers."""

    protocol: int
    name: str
    """Unique among the nodes of the cluster."""
    agent: int
    """Random number of this start of the agent."""
    rank: int | None
    """Node rank; None for a node that joins without one."""
    is_spare: bool
    """True if the node receives stages only after another node is lost."""
    model_hash: str
    """Digest of the model (gllm/models/identity.py); empty if the node asks for the model."""
    config: bytes
    """Engine configuration as JSON, to be compared field by field; empty without a rank."""
    facts: NodeFacts
    workers: list[int] = []
    """Senders of living workers without a stage, from an earlier session of the same run."""
    run: int = 0
    """Run of the head in the earlier session; 0 without one."""
    runs_services: bool = False
    """True if the node joins the master of a cluster, which lets it run processes of services;
    `workers` are such processes then."""


class WelcomeNode(ProcessMessage, frozen=True):
    """Answer to `JoinCluster`: the node has joined, with the head's model and configuration."""

    run: int
    """Number of this start of the head."""
    model: str
    """Name of the model as in the head's command line."""
    model_hash: str
    config: bytes
    """The head's engine configuration as JSON."""
    node_timeout: float
    """Seconds without a message after which either end considers the other one lost."""
    recovery_timeout: float
    """Time in seconds after which an agent that has lost its head ends."""
    workers: list[int] = []
    """Workers of the earlier session that the head keeps; the agent kills the others."""


class RefuseNode(ProcessMessage, frozen=True):
    """Answer to `JoinCluster`: the node cannot join, with the reasons and how to fix them."""

    cause: str
    """Differences, field by field, and the fix."""
    is_final: bool = True
    """False if the agent may try again later, for example while the head still loses it."""
    is_master: bool = False
    """True if the sender is the master of a cluster (`gllm cluster`), which a node without a rank
    joins with `runs_services`."""


class NodeHeartbeat(ProcessMessage, frozen=True):
    """Heartbeat of a node, each second, and the head's answer, with timestamps and load.

    The timestamps give the clock offset and the round trip. Those of nodes have the load of the
    machine and the state of its workers.
    """

    sent: float
    """Time of sending by the sender's clock, time.monotonic()."""
    echo: float
    """`sent` of the last heartbeat that arrived; 0 for none."""
    heard: float
    """Time at which it arrived by the sender's clock."""
    samples: list[WorkerSample] = []
    """State of the agent's workers; empty from the head."""
    load: NodeLoad = NodeLoad()
    """Load of the agent's machine; unknown from the head."""
    links: list[LinkState] = []
    """Data connections of the agent's machine."""


class EngineState(ProcessMessage, frozen=True):
    """State of the engine, sent to nodes on changes, for their /health, /ready and logs."""

    state: str
    cause: str
    epoch: int


class StartWorker(ProcessMessage, frozen=True):
    """Command to a node: start a worker process; `WorkerExited` follows if that fails."""

    sender: int
    log_level: str
    log_format: str


class EndWorker(ProcessMessage, frozen=True):
    """Command to a node: kill a worker process."""

    sender: int


class DumpStacks(ProcessMessage, frozen=True):
    """Command to a node: get the Python stacks of a worker's threads; `WorkerStacks` follows."""

    sender: int


class AssignStages(ProcessMessage, frozen=True):
    """Command to a node: give its workers their stages for a pipeline start, or measure them."""

    epoch: int
    """Number of the pipeline's start."""
    assignment: bytes
    """A NodeAssignment (gllm/runtime/head/node.py) as JSON."""


class EpochReady(ProcessMessage, frozen=True):
    """Command to a node: all workers have connected to the scheduler; refuse other connections."""

    epoch: int


class WorkerFrame(ProcessMessage, frozen=True):
    """Encoded message between the head and a worker on another node, passed on by its agent."""

    sender: int
    """The worker."""
    epoch: int
    """Epoch of the message; -1 if it is about the process."""
    payload: bytes
    """The encoded message."""


class StageFrame(ProcessMessage, frozen=True):
    """Encoded message between the scheduler and a worker on another node, via its agent."""

    sender: int
    """The worker."""
    epoch: int
    payload: bytes
    """The encoded message; empty when the worker connects to the driver."""


class WorkerExited(ProcessMessage, frozen=True):
    """Report of a node that one of its worker processes has exited, with its last stacks."""

    sender: int
    description: str
    stacks: str


class WorkerStacks(ProcessMessage, frozen=True):
    """Report of a node with the stacks of a worker's threads."""

    sender: int
    stacks: str


class WorkerSessionLost(ProcessMessage, frozen=True):
    """Report of a node that a worker's connection to it or to the scheduler has ended."""

    sender: int
    cause: str


class AssignmentFailed(ProcessMessage, frozen=True):
    """Report of a node that its workers could not be given their stages."""

    epoch: int
    cause: str


class EdgeOpened(ProcessMessage, frozen=True):
    """Report of a node that a connection for activations from another node is open."""

    epoch: int
    edge: int
    """Index of the connection."""


class EdgeLost(ProcessMessage, frozen=True):
    """Report of a node that a connection for activations cannot be opened, or stays broken."""

    epoch: int
    edge: int
    """Index of the connection."""
    cause: str


class OpenKvMachine(ProcessMessage, frozen=True):
    """Command to a node: serve the KV caches of its workers, and fetch KV blocks into them.

    KvMachineOpened answers.
    """

    epoch: int
    engine: list[list[KvLayout]]
    """Layouts of the KV caches of all nodes, by node and worker."""
    machine: Count
    """Index of the node among them."""
    scale: float = 1.0
    """Bytes of an entry in the device's memory, divided by its bytes in the cache."""


class RestartKvMover(ProcessMessage, frozen=True):
    """Command to a node: replace its KV transfer process, which does not answer the driver."""

    epoch: int


class KvMachineOpened(ProcessMessage, frozen=True):
    """Report of a node that its KV blocks are served or, without `machine`, not any more."""

    epoch: int
    machine: bytes
    """KvMachine (gllm.transport.kv.endpoint) in msgpack; empty while nothing is served."""


class LeaveCluster(ProcessMessage, frozen=True):
    """Message that a node leaves the engine by itself, or that the head ends all nodes."""

    cause: str
    is_failure: bool = False
    """True if the receiver exits with status 1."""


ToNodeHub = (
    WorkerExited
    | WorkerStacks
    | WorkerSessionLost
    | JoinCluster
    | NodeHeartbeat
    | WorkerFrame
    | StageFrame
    | AssignmentFailed
    | EdgeOpened
    | EdgeLost
    | KvMachineOpened
    | LeaveCluster
)
"""Messages that an agent may send to the head, besides Hello."""
ToAgent = (
    WelcomeNode
    | RefuseNode
    | NodeHeartbeat
    | EngineState
    | StartWorker
    | EndWorker
    | DumpStacks
    | AssignStages
    | EpochReady
    | WorkerFrame
    | StageFrame
    | EdgeOpened
    | OpenKvMachine
    | RestartKvMover
    | LeaveCluster
)
"""Messages that the head may send to an agent."""
