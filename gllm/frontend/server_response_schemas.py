"""Response schemas of endpoints about models, tokens, load and control of the server."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta

from gllm.engine.fleet_control import EngineRow, RouterTotals, ScaleStatus, WorkloadStatus
from gllm.engine.interface import ModelInfo
from gllm.frontend.response_schemas import ResponseSchema, Unset
from gllm.messages.node_report import NodeReport

DisaggregationMode = Literal["null", "prefill", "decode"]
"""SGLang's name of an engine's role."""


def disaggregation_mode(role: str) -> DisaggregationMode:
    """Return SGLang's name of an engine's role: `prefill`, `decode`, or `null` for both."""
    match role:
        case "prefill" | "decode":
            return role
        case _:
            return "null"


class ModelCard(ResponseSchema):
    """The served model in a response of /v1/models: name, context length and vocabulary size."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    vocab_size: int
    reasoning_controls: Annotated[
        list[str],
        Meta(
            description="variables of the chat template that control reasoning: enable_thinking, "
            "thinking, reasoning_effort; empty if a request cannot control it"
        ),
    ]


class ModelListResponse(ResponseSchema):
    """Response of /v1/models: a list with the served model."""

    object: Literal["list"]
    data: list[ModelCard]


class StatusResponse(ResponseSchema):
    """Response with a status in one word, such as `ok` or `ready`."""

    status: str


class HealthResponse(ResponseSchema):
    """Response of /health: `ok`, and the engine's state.

    The state is ready, recovering, draining or sleeping.
    """

    status: Literal["ok"]
    state: str


class ProfileResponse(ResponseSchema):
    """Response of /start_profile and /stop_profile: a status, and the folder of the traces."""

    status: str
    folder: str


class VersionResponse(ResponseSchema):
    """Response of /version: the version of gllm."""

    version: str


class TokenizeResponse(ResponseSchema):
    """Response of /tokenize: token ids and their number, and the model's context length."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | Unset = UNSET


class DetokenizeResponse(ResponseSchema):
    """Response of /detokenize: the text of the token ids."""

    prompt: str


class ServerInfoResponse(ResponseSchema):
    """Response of /server_info: configuration of the server, its engine and its model."""

    version: str
    # The next fields have SGLang's names, from which its routers read what they serve.
    model_path: str
    served_model_name: str
    tp_size: Annotated[
        int | None,
        Meta(
            description="ranks of a stage, the largest number if stages differ; null for a router, "
            "whose engines may differ"
        ),
    ]
    dp_size: int
    max_model_len: int
    max_total_num_tokens: int
    page_size: int
    disaggregation_mode: DisaggregationMode
    model: ModelInfo
    engine: dict[str, Any]
    server: dict[str, Any]


class LoadResponse(ResponseSchema):
    """Response of /load: numbers of requests, and share of KV cache blocks in use (0 to 1)."""

    server_load: int
    running: int
    waiting: int
    kv_usage: float


class EngineListResponse(ResponseSchema):
    """Response of /engines of a router: its engines, counters, scaling decision and workload."""

    engines: list[EngineRow]
    router: RouterTotals
    scaling: ScaleStatus | None
    workload: WorkloadStatus | None


class EngineRoleResponse(ResponseSchema):
    """Response of /engines/{name}/role: new and previous role of an engine."""

    name: str
    role: str
    previous_role: str


class RoleSwitchResponse(ResponseSchema):
    """Response of /pd_role_switch: success, and new and previous role of an engine."""

    success: bool
    message: str
    old_role: str
    new_role: str


class DrainResponse(ResponseSchema):
    """Response of /engines/{name}/drain: the engine's state, and its number of running requests."""

    name: str
    state: str
    num_requests: int


class NodeListResponse(ResponseSchema):
    """Response of /nodes of an engine: its machines, losses of machines, refused connections.

    `pipeline_depth` is the number of micro-batches that the scheduler keeps in flight.
    """

    nodes: list[NodeReport]
    pipeline_depth: int
    num_node_losses: int
    refused_peers: dict[str, int]


class NodeDrainResponse(ResponseSchema):
    """Response of /nodes/{name}/drain: the state of the machine."""

    name: str
    state: Literal["draining", "drained"]


class RankLoad(ResponseSchema):
    """Load of an engine in SGLang's format: requests, tokens, KV cache use and throughput.

    Throughput and cache hit rate are averages over the last ten seconds.
    """

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_waiting_uncached_tokens: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    kv_transfer_latency_ms: float
    """Mean duration of all fetches of KV blocks from other engines, in milliseconds."""
    prefill_queue_reqs: int
    """Waiting requests of an engine with the role prefill; 0 for other roles."""
    decode_queue_reqs: int
    """Requests waiting for KV blocks at an engine with the role decode; 0 for other roles."""
    disagg_mode: DisaggregationMode


class LoadsResponse(ResponseSchema):
    """Response of /v1/loads in SGLang's format: the load of the engine."""

    timestamp: str
    dp_rank_count: int
    loads: list[RankLoad]


class SleepingResponse(ResponseSchema):
    """Response of /is_sleeping: true after /sleep and before /wake_up."""

    is_sleeping: bool


class AbortResponse(ResponseSchema):
    """Response of /abort: number of aborted requests."""

    aborted: int


class TokenizerInfoResponse(ResponseSchema):
    """Response of /tokenizer_info: special tokens, chat template, context and vocabulary size."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int
    vocab_size: int
