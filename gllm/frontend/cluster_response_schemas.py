"""Answers of a cluster's master, as in `response_schemas`."""

from typing import Literal

from gllm.deploy.cluster.service import ServiceState
from gllm.frontend.response_schemas import ResponseSchema
from gllm.messages.node_report import NodeReport


class ServiceRequestCounts(ResponseSchema):
    """Requests of a service: now, and since the start of its engine."""

    running: int
    waiting: int
    finished: int
    failed: int


class ServiceTokenCounts(ResponseSchema):
    """Tokens of a service since the start of its engine."""

    prompt: int
    generated: int


class ServiceThroughput(ResponseSchema):
    """Throughput of a service over the last ten seconds."""

    requests_per_second: float
    prompt_tokens_per_second: float
    generated_tokens_per_second: float


class ServiceUtilization(ResponseSchema):
    """Share of the KV cache in use, and share of time in which each stage computed."""

    kv_cache: float
    stages: list[float]


class ServiceResponse(ResponseSchema):
    """A service of a cluster."""

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
    """Answer of GET /services."""

    services: list[ServiceResponse]


class ServiceKeyResponse(ResponseSchema):
    """Answer of GET /services/{name}/key."""

    service_name: str
    api_key: str


class ServiceDeletionResponse(ResponseSchema):
    """Answer of DELETE /services/{name}: absent if there is no service of that name."""

    service_name: str
    state: Literal["stopping", "absent"]


class ClusterNodeResponse(NodeReport, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node of a cluster: as a machine of an engine, and its hardware and service."""

    num_cores: int
    memory_bytes: int
    data_port: int
    service: str | None
    is_draining: bool


class ClusterNodeListResponse(ResponseSchema):
    """Answer of GET /nodes of a cluster: its nodes, and refused connections by address."""

    nodes: list[ClusterNodeResponse]
    refused_peers: dict[str, int]


class NodeExitResponse(ResponseSchema):
    """Answer of POST /nodes/{name}/drain of a cluster, with the service that moves."""

    name: str
    state: Literal["draining"]
    service: str | None
