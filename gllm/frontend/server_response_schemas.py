"""Answers about models, tokens and the server, as in `response_schemas`."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta

from gllm.engine.fleet_control import EngineRow, RouterTotals, ScaleStatus, WorkloadStatus
from gllm.engine.interface import ModelInfo
from gllm.frontend.response_schemas import ResponseSchema, Unset
from gllm.messages.node_report import NodeReport

DisaggregationMode = Literal["null", "prefill", "decode"]
"""SGLang's name of an engine's role."""


def disaggregation_mode(role: str) -> DisaggregationMode:
    """Return SGLang's name of a role: `null` for an engine that prefills and decodes."""
    match role:
        case "prefill" | "decode":
            return role
        case _:
            return "null"


class ModelCard(ResponseSchema):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    vocab_size: int


class ModelListResponse(ResponseSchema):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class StatusResponse(ResponseSchema):
    """A status in one word."""

    status: str


class HealthResponse(ResponseSchema):
    """Answer of /health: `ok`, and the engine's state: ready, recovering or draining."""

    status: Literal["ok"]
    state: str


class ProfileResponse(ResponseSchema):
    """Answer of /start_profile and /stop_profile: a status and the folder of profiles."""

    status: str
    folder: str


class VersionResponse(ResponseSchema):
    """Answer of /version."""

    version: str


class TokenizeResponse(ResponseSchema):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | Unset = UNSET


class DetokenizeResponse(ResponseSchema):
    """Answer of /detokenize."""

    prompt: str


class ServerInfoResponse(ResponseSchema):
    """Answer of /server_info."""

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
    """Answer of /load: numbers of requests, and share of KV cache blocks in use."""

    server_load: int
    running: int
    waiting: int
    kv_usage: float


class EngineListResponse(ResponseSchema):
    """Answer of /engines: engines, counters, scaling decision and workload."""

    engines: list[EngineRow]
    router: RouterTotals
    scaling: ScaleStatus | None
    workload: WorkloadStatus | None


class EngineRoleResponse(ResponseSchema):
    """Answer of /engines/{name}/role: the new role of the engine, and the one that it had."""

    name: str
    role: str
    previous_role: str


class RoleSwitchResponse(ResponseSchema):
    """Answer of /pd_role_switch."""

    success: bool
    message: str
    old_role: str
    new_role: str


class DrainResponse(ResponseSchema):
    """Answer of /engines/{name}/drain: the number of requests that the engine still runs."""

    name: str
    state: str
    num_requests: int


class NodeListResponse(ResponseSchema):
    """Answer of /nodes: machines, micro-batches to be in flight, refused connections."""

    nodes: list[NodeReport]
    pipeline_depth: int
    num_node_losses: int
    refused_peers: dict[str, int]


class NodeDrainResponse(ResponseSchema):
    """Answer of /nodes/{name}/drain."""

    name: str
    state: Literal["draining", "drained"]


class RankLoad(ResponseSchema):
    """Load of the engine: requests, tokens, KV cache and rates of the last ten seconds."""

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
    """Mean duration of the fetches of KV blocks so far."""
    prefill_queue_reqs: int
    """Sequences that wait for the prefill, of an engine with the role prefill."""
    decode_queue_reqs: int
    """Sequences that wait for their KV blocks, of an engine with the role decode."""
    disagg_mode: DisaggregationMode


class LoadsResponse(ResponseSchema):
    """Answer of /v1/loads."""

    timestamp: str
    dp_rank_count: int
    loads: list[RankLoad]


class SleepingResponse(ResponseSchema):
    """Answer of /is_sleeping."""

    is_sleeping: bool


class AbortResponse(ResponseSchema):
    """Answer of /abort: number of aborted requests."""

    aborted: int


class TokenizerInfoResponse(ResponseSchema):
    """Answer of /tokenizer_info."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int
    vocab_size: int
