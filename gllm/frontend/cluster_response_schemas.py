"""Response schemas of the HTTP API of a cluster's master: model services and nodes."""

from typing import Literal

from gllm.deploy.cluster.service import ServiceState
from gllm.frontend.response_schemas import ResponseSchema
from gllm.messages.node_report import NodeReport


class ServiceRequestCounts(ResponseSchema):
    """Numbers of a service's requests: running and waiting now, finished and failed so far.

    Finished and failed requests count from the start of the service's engine.
    """

    running: int
    waiting: int
    finished: int
    failed: int


class ServiceTokenCounts(ResponseSchema):
    """Prompt tokens and generated tokens of a service since its engine started."""

    prompt: int
    generated: int


class ServiceThroughput(ResponseSchema):
    """Requests and tokens per second of a service, averaged over the last ten seconds."""

    requests_per_second: float
    prompt_tokens_per_second: float
    generated_tokens_per_second: float


class ServiceUtilization(ResponseSchema):
    """Utilization of a service: share of its KV cache in use, and busy share of each stage.

    Values are from 0 to 1. A stage is the part of the model's layers that one pipeline rank
    computes.
    """

    kv_cache: float
    stages: list[float]


class ServiceResponse(ResponseSchema):
    """A model service of a cluster: its model, state, address, nodes, load and throughput."""

    service_name: str
    model_name: str
    state: ServiceState
    cause: str
    url: str | None
    head: str
    nodes: list[str]
    created: int
    uptime_seconds: float
    engine_state: str
    requests: ServiceRequestCounts
    tokens: ServiceTokenCounts
    throughput: ServiceThroughput
    utilization: ServiceUtilization


class ServiceListResponse(ResponseSchema):
    """Response of GET /services: all model services of the cluster."""

    services: list[ServiceResponse]


class ServiceKeyResponse(ResponseSchema):
    """Response of GET /services/{name}/key: the API key that the service's clients have to send."""

    service_name: str
    api_key: str


class ServiceDeletionResponse(ResponseSchema):
    """Response of DELETE /services/{name}: `stopping`, or `absent` if no service has this name."""

    service_name: str
    state: Literal["stopping", "absent"]


class ClusterNodeResponse(NodeReport, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node of a cluster: its hardware and load, and the model service that it runs, if any."""

    num_cores: int
    memory_bytes: int
    data_port: int
    service: str | None
    is_draining: bool


class ClusterNodeListResponse(ResponseSchema):
    """Response of GET /nodes of a cluster: its nodes, and refused connections per IP address."""

    nodes: list[ClusterNodeResponse]
    refused_peers: dict[str, int]


class NodeExitResponse(ResponseSchema):
    """Response of POST /nodes/{name}/drain of a cluster: the node, and the service moved off it."""

    name: str
    state: Literal["draining"]
    service: str | None
