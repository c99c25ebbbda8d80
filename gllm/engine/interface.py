"""Interface between an engine and its users: the protocols and the shared types.

`gllm.engine.engine.Engine` implements the protocols with worker processes; tests implement them
with a scripted engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from gllm.config.sampling import SamplingParams
from gllm.engine.fleet_control import FleetControl
from gllm.messages.handoff import KvHandoff
from gllm.messages.kv_disk import KvDiskTotals
from gllm.messages.kv_transfer import KvTransferTotals
from gllm.messages.node_report import NodeDrainError as NodeDrainError
from gllm.messages.node_report import NodeReport
from gllm.messages.node_report import UnknownNodeError as UnknownNodeError
from gllm.messages.reports import BubbleReport, StageUtilization
from gllm.messages.requests import ErrorKind
from gllm.messages.requests import PoisonRequestError as PoisonRequestError
from gllm.messages.sampling import TokenLogprobs
from gllm.options.slo import Slo
from gllm.routing.lengths.accuracy import BucketAccuracy
from gllm.scheduler.plan import SchedulerStats
from gllm.text.tokenizer import Tokenizer


class OutputDelta(msgspec.Struct, frozen=True):
    """New text and tokens of one choice, since the caller last read the request's output."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """stop, length, abort or error; set on a choice's last delta."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the choice, if one did."""
    error: str = ""
    """Error message; set if `finish_reason` is `error`."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; set on a choice's first delta."""
    queue_seconds: float = 0.0
    """Time from arrival to the first micro-batch; set on a choice's first delta."""
    logprobs: list[TokenLogprobs] = []
    """Log-probabilities of each of `token_ids`, if requested."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Log-probabilities of the prompt's tokens from the second on, if requested; set on a choice's
    first delta."""
    error_kind: ErrorKind = ""
    """Kind of the error, which decides whether a client should send the request again."""
    num_held_tokens: int = 0
    """Leading tokens whose KV blocks the engine reserves for another engine, under the request's
    ticket; set on the last delta."""
    num_accepted_guesses: int = 0
    """With speculation: draft tokens that were right; set on the last delta, unless a stop string
    ends the output."""
    num_rejected_guesses: int = 0
    """Draft tokens that were computed and not used; set like those that were right."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Name, context length, vocabulary size and sampling defaults of the served model."""

    name: str
    """Name that clients use in requests."""
    max_model_len: int
    """Maximum number of tokens of prompt and output together."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    defaults: Mapping[str, Any]
    """Sampling defaults of the model's generation_config, by field name."""
    created: int
    """Unix time of the start, in seconds."""
    root: str = ""
    """Folder or hub name from which the model was loaded; empty if unknown."""
    architecture: str = ""
    """Class of the model in config.json; empty if unknown."""
    has_alias: bool = False
    """True if requests may also name the model by `root`."""
    is_embedding_only: bool = False
    """True if the model embeds texts and writes none."""

    def is_named(self, name: str) -> bool:
        """Return True if a name in a request is that of this model."""
        is_root = self.has_alias and name.rstrip("/") == self.root.rstrip("/")
        return name == self.name or is_root


@dataclass(frozen=True, slots=True)
class KvParticipant:
    """Name, role and KV transfer endpoint of an engine, for disaggregated prefill and decode."""

    engine: str
    """Name of the engine, unique in its fleet."""
    run: int
    """Random number of the start of the engine's head process."""
    role: str
    """mixed, prefill or decode."""
    digest: str
    """Digest of all that the KV cache of a prompt depends on, besides its tokens."""
    endpoint: bytes
    """Address of the KV cache for other engines; empty while it has none, as during a recovery."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State, load and counters of an engine at one moment, for metrics and health checks."""

    state: str
    """loading, ready, recovering, sleeping, draining or dead."""
    is_sleeping: bool = False
    """True after /sleep and before /wake_up, also while the engine recovers or drains."""
    cause_of_death: str = ""
    """Reason of the death, if the engine is dead; otherwise empty."""
    is_healthy: bool = False
    """True if the engine is ready or draining and its pending work makes progress."""
    num_requests: int = 0
    """Requests that have not been closed."""
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    """The scheduler's counters after the last step."""
    step_sizes: Mapping[int, int] = field(default_factory=dict)
    """Number of micro-batches by their tokens, rounded up to a power of two."""
    stage_loads: Mapping[int, StageUtilization] = field(default_factory=dict)
    """Work done by rank 0 of each stage, by stage index."""
    rank_loads: Mapping[tuple[int, int], StageUtilization] = field(default_factory=dict)
    """Work done by each rank of each stage, by stage index and rank."""
    bubbles: BubbleReport = field(default_factory=BubbleReport)
    """Idle time of the pipeline's stages while work was available."""
    num_kv_blocks: int = 0
    """KV blocks per stage, the same on every stage; 0 until the weights are loaded."""
    kv_cache_bytes: int = 0
    """Bytes of the KV cache over all stages; 0 until the weights are loaded."""
    block_size: int = 0
    """Tokens per KV block."""
    epoch: int = 0
    """Number of the present epoch: the first one is 1, and each recovery of the pipeline starts the
    next."""
    recovering_since: float | None = None
    """Time of the monotonic clock at which the running recovery began; None if none runs."""
    recovery_cause: str = ""
    """Cause of the running recovery; empty if none runs."""
    is_recovery_overdue: bool = False
    """True once the running recovery has taken longer than `recovery_timeout`: requests are refused
    until the engine is ready."""
    recoveries: Mapping[str, int] = field(default_factory=dict)
    """Number of recoveries that have begun, by cause: killed, failed, frozen or lost."""
    recovery_seconds: Sequence[float] = ()
    """Durations of all recoveries that have ended."""
    recovery_phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Sums of the durations of their phases, by phase."""
    num_resumed_requests: int = 0
    """Requests that were submitted again after a recovery, each time counted."""
    num_stale_frames: int = 0
    """Messages of earlier epochs that arrived late and were dropped."""
    num_node_losses: int = 0
    """Losses of machines of the engine, each time counted."""
    num_malformed_frames: int = 0
    """Frames of other machines that could not be read or that their sender may not send."""
    refused_peers: Mapping[str, int] = field(default_factory=dict)
    """Connections of other machines that the head refused, by IP address."""
    tensor_parallel_size: int | None = None
    """Ranks of a stage; the largest number if stages differ, None for a router."""
    num_routers: int | None = None
    """Routers that have attached the engine; None without `--router`."""
    unattached_cause: str = ""
    """Reason for which the engine is not ready although it works: no router has attached it."""
    kv_transfers: KvTransferTotals | None = None
    """Transfers of KV blocks; None for an engine that neither gives nor fetches any."""
    kv_disk: KvDiskTotals | None = None
    """Counters of the disk tier of the prefix cache; None without one."""
    length_predictor: str = ""
    """Name or file of the predictor of output lengths; empty if the scheduler predicts them."""
    output_lengths: Sequence[BucketAccuracy] = ()
    """Outputs that have ended by bucket of their length, and how many were predicted right; empty
    if the scheduler predicts them."""


class EngineUnavailableError(Exception):
    """The engine cannot take requests now, as while it loads, drains, sleeps or is full.

    `reason` is loading, recovering, draining, sleeping, dead, full, no_engines or no_router; of a
    sleep that was interrupted also awake. `dropped_reason` is llm-d's name of the cause, if it
    differs from the usual one of the reason.
    """

    def __init__(
        self, reason: str, message: str, retry_after: int = 1, dropped_reason: str = ""
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        self.dropped_reason = dropped_reason


class OverloadedError(Exception):
    """The request is refused because its latency objective (SLO) cannot be met at the current load.

    `reason` is llm-d's name of the cause, such as rejected-saturated.
    """

    def __init__(self, message: str, reason: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.retry_after = retry_after


class EmbeddingError(Exception):
    """An embedding could not be computed; the message has the cause."""


def embedding_error(message: str, kind: ErrorKind) -> Exception:
    """Return the exception to raise for an embedding request that ended with an error.

    Args:
        message: error of the request.
        kind: category of the error, which decides between a client's and a server's error.
    """
    match kind:
        case "unavailable":
            return EngineUnavailableError("recovering", message)
        case "poison":
            return PoisonRequestError(message)
        case _:
            return EmbeddingError(message)


class RoleSwitchError(Exception):
    """The engine's role cannot be changed, because the engine is not connected to routers."""


class ProfileError(Exception):
    """A torch profile could not be started or stopped; the message has the cause."""


class RequestHandle(Protocol):
    """Interface to read the output of one running request, and to abort it.

    Deltas that the caller has not read yet are merged into one delta per choice.
    """

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Set a function to call when output arrives and none was pending.

        It is called at once if output is pending, and must not raise. All output of a step is
        available when it is called, so reading it right away is cheapest: waking a task per token
        costs more than the token.
        """

    @property
    def num_resumptions(self) -> int:
        """Number of recoveries after which the request was submitted again."""

    def pop_deltas(self) -> list[OutputDelta]:
        """Return the deltas since the last call."""

    def close(self) -> None:
        """Release the request; unfinished choices are aborted."""


class EngineInterface(Protocol):
    """Interface through which the HTTP frontend uses an engine or a router."""

    @property
    def fleet(self) -> FleetControl | None:
        """Control of the engines of a router; None for an engine."""

    @property
    def model(self) -> ModelInfo:
        """The served model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def role(self) -> str:
        """Current role: mixed, prefill or decode; mixed for a router."""

    @property
    def state(self) -> str:
        """Current state: loading, ready, recovering, sleeping, draining or dead."""

    @property
    def accepts_requests(self) -> bool:
        """True if new requests are accepted; during a recovery they wait for its end."""

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""

    def status(self) -> EngineStatus:
        """Return a snapshot of the engine's state and counters, for metrics and probes."""

    async def start(self) -> None:
        """Load the model and wait until the engine is ready. Raises EngineError."""

    async def wait_until_dead(self) -> None:
        """Wait until the engine is dead, after a failure or `stop`."""

    async def drain(self, seconds: float) -> None:
        """Reject new requests and wait at most `seconds` for the running ones."""

    async def stop(self) -> None:
        """Stop the engine; running requests end with an error."""

    async def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str = "",
        slo: Slo | None = None,
        session: str = "",
        client: str = "",
        handoffs: Sequence[KvHandoff] = (),
    ) -> Sequence[RequestHandle]:
        """Start one request per prompt, all or none; each handle must be closed.

        `request_id` is the id by which `abort` finds the requests. `slo` and `session` are hints
        for routers: latencies that the client asks for, and a name whose requests go to one engine.
        Engines learn by `session` and `client` when a conversation returns.
        `handoffs` says for each prompt which KV blocks are fetched from or reserved for another
        engine; it is empty without disaggregated prefill.

        Raises:
            FieldError: The engine cannot run such a request.
            EngineUnavailableError: The engine accepts no requests at present.
            PoisonRequestError: Workers died while they computed the same request before.
        """

    async def embed(
        self,
        prompt: str | list[int],
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str = "",
    ) -> list[float]:
        """Return the embedding of a prompt.

        The embedding is the hidden state of the prompt's last token after the final norm,
        `hidden_size` numbers; of a model with bidirectional attention the mean over the prompt's
        tokens, after the dense layers of its folder.

        Raises:
            FieldError: The engine cannot run such a request.
            EngineUnavailableError: The engine accepts no requests at present.
            EmbeddingError: The embedding could not be computed.
        """

    def abort(self, request_id: str | None) -> int:
        """Abort the requests with this id, or all if it is None; return their number."""

    async def sleep(self, keeps_prefix_cache: bool = False) -> None:
        """Refuse new requests until `wake_up`, finish the running ones, reset the prefix cache.

        Weights and KV cache stay in memory. If a worker dies meanwhile, the requests are resumed
        and finished before this returns.

        Raises:
            EngineUnavailableError: The engine is not ready, or it was woken, drained or stopped
                meanwhile, or it does not recover in time.
        """

    def wake_up(self) -> None:
        """Accept requests again after `sleep`; no effect if the engine is awake."""

    async def reset_prefix_cache(self) -> None:
        """Reset the prefix cache. Raises EngineUnavailableError."""

    async def start_profile(self, folder: str) -> None:
        """Start recording the operations of every stage; `stop_profile` writes them to `folder`.

        Raises EngineUnavailableError, and ProfileError if a stage cannot record.
        """

    async def stop_profile(self) -> None:
        """Stop recording and write the profile, one file per stage.

        Raises EngineUnavailableError, and ProfileError if a stage cannot write its file.
        """

    def nodes(self) -> list[NodeReport]:
        """Return the state of each machine of the engine, the head first; none for a router."""

    def drain_node(self, name: str) -> str:
        """Move the stages of a machine to other machines and remove it; requests continue.

        Returns:
            draining, or drained if it is no member any more.

        Raises:
            UnknownNodeError: there is no such machine.
            NodeDrainError: it cannot be drained.
            EngineUnavailableError: the engine is not ready.
        """

    def set_role(self, role: str) -> str:
        """Announce another role to all routers and return the previous role; requests continue.

        Raises:
            RoleSwitchError: the engine has no routers.
        """

    def kv_participant(self) -> KvParticipant | None:
        """Return the engine's name, role and KV transfer endpoint; None without KV transfers."""

    def release_kv(self, tickets: list[int]) -> None:
        """Free the KV blocks that are reserved for other engines under these tickets.

        Args:
            tickets: numbers of finished prefills; unknown ones are ignored.
        """

    def describe(self) -> dict[str, Any]:
        """Return the engine's configuration and state as JSON values."""
