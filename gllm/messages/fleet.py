"""Messages between a router and an engine's head process.

A session begins with `GreetEngine` and `AnnounceEngine`, whoever dialled. The engine reports once
it has accepted the router, and the router sends requests once the engine has reported. The wire ids
in requests and outputs are the router's. Fields are only ever appended, so that routers and engines
of neighbouring versions understand each other.
"""

from typing import Annotated

from msgspec import Meta

from gllm.messages.base import ProcessMessage
from gllm.scheduler.plan import SchedulerStats
from gllm.scheduler.step_cost import StepCostCoefficients

PositiveInt = Annotated[int, Meta(ge=1)]

PROTOCOL = 1
"""Version of the messages between routers and engines that this version speaks."""
OLDEST_PROTOCOL = 1
"""The oldest version that it understands: the one before."""


def is_compatible(protocol: int, oldest_protocol: int) -> bool:
    """Return True if a peer's range of protocol versions overlaps with that of this process.

    Args:
        protocol: newest version that the peer supports.
        oldest_protocol: oldest version that it supports.
    """
    return max(oldest_protocol, OLDEST_PROTOCOL) <= min(protocol, PROTOCOL)


class GreetEngine(ProcessMessage, frozen=True):
    """First message of a router to an engine: its name, protocol versions and abilities."""

    protocol: int
    """Newest protocol version of the router."""
    oldest_protocol: int
    """Oldest protocol version that it supports."""
    router: str
    """Name of the router, for logs."""
    run: int
    """Random number of this start of the router."""
    accepts_pushes: bool = False
    """True if the router understands KvPushStarted."""
    needs_first_chunks: bool = False
    """True if the router has to receive FirstChunkComputed."""
    confirms_attachment: bool = False
    """True if heartbeats of the router tell if it has attached the engine."""


class AnnounceEngine(ProcessMessage, frozen=True):
    """First message of an engine to a router: its name, model, limits and abilities.

    It is sent again when one of them changes. Name and run do not change within a connection.
    """

    protocol: int
    """Newest protocol version of the engine."""
    oldest_protocol: int
    """Oldest protocol version that it supports."""
    name: str
    """Unique among the engines of a router."""
    run: int
    """Random number of this start of the engine's head process."""
    role: str
    """mixed, prefill or decode."""
    model: str
    """Public name of the model."""
    model_hash: str
    """Digest of the model's configuration and weight files (gllm/models/identity.py)."""
    numerics: str
    """Digest of all that decides which tokens follow a prompt. A request with tokens continues only
    on engines of equal numerics."""
    version: str
    """Version of gllm."""
    max_model_len: PositiveInt
    """Maximum number of tokens of prompt and output together."""
    vocab_size: PositiveInt
    block_size: PositiveInt
    """Tokens per KV block."""
    num_blocks: Annotated[int, Meta(ge=0)]
    """KV blocks of each stage."""
    num_stages: PositiveInt
    max_num_seqs: PositiveInt = 256
    """Most sequences of a step."""
    max_num_batched_tokens: Annotated[int, Meta(ge=0)] = 2048
    """Most tokens of a step."""
    kv_endpoint: bytes = b""
    """Address and layout of the KV cache for other engines (gllm/transport/kv); empty if the
    engine neither gives nor fetches KV blocks. Routers pass it on unread."""
    kv_bytes_per_token: Annotated[int, Meta(ge=0)] = 0
    """Bytes of a token's KV over all layers; 0 if unknown."""
    policy: str = ""
    """Scheduling policy; empty if unknown."""
    kv_digest: str = ""
    """Digest of all that decides the numbers in the KV cache, on any number of ranks. Engines of
    equal ones exchange blocks; empty if unknown, then those of equal numerics do."""
    accepts_prefetches: bool = False
    """True if the engine understands PrefetchKv."""
    accepts_moves: bool = False
    """True if the engine understands HandOffSequence."""
    accepts_checkpoints: bool = False
    """True if the engine understands KeepComputedKv and PrefetchKv of a checkpoint."""


class EngineReport(ProcessMessage, frozen=True):
    """State and statistics of an engine for routers, sent each second and on changes.

    It is also the engine's heartbeat.
    """

    state: str
    """ready, recovering, sleeping, draining or dead."""
    cause: str
    """Reason of a recovery or of the death; otherwise empty."""
    stats: SchedulerStats
    coefficients: StepCostCoefficients | None = None
    """Fitted cost of a step; None before enough steps ran."""
    num_requests: int = 0
    """Running requests of all routers and of the engine's own frontend."""
    leader: int = 0
    """Random number (run) of the router that may change the engine's role by itself: the lowest of
    those attached. 0: none."""
    is_held: bool = False
    """True if it drains by an operator's command, until one ends that: autoscaling leaves it."""


class RouterHeartbeat(ProcessMessage, frozen=True):
    """Heartbeat of a router: sent each second while its event loop runs, and once it attaches."""

    is_attached: bool = False
    """True if the router sends the engine requests. Read only if GreetEngine announced it."""


class DrainEngine(ProcessMessage, frozen=True):
    """Command to an engine: refuse new requests from routers, or accept them again."""

    is_on: bool
    """True to refuse requests."""
    is_held: bool = False
    """True for an operator's command, which autoscaling does not revert."""


class SetEngineRole(ProcessMessage, frozen=True):
    """Command to an engine: announce another role to all routers; running requests go on."""

    role: str
    """mixed, prefill or decode."""


class NoticeToEngine(ProcessMessage, frozen=True):
    """Warning that a router asks an engine to log, such as that another engine has its name."""

    text: str


class RefuseEngine(ProcessMessage, frozen=True):
    """Message of a router that ends its connection to an engine, with the reason for logs."""

    cause: str


class RefuseRouter(ProcessMessage, frozen=True):
    """Message of an engine that ends its connection to a router, with the reason for logs."""

    cause: str
