"""Services and nodes of a cluster; health and metrics of its master.

The calls of the MoLink platform: DeployLLMService, CheckServiceStatus, GetAPIKey, DeleteLLMService,
CheckNodeStatus, NodeExit. NodeAccess is `gllm node --join`.
"""

import time
from collections import Counter
from collections.abc import Iterable

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gllm.deploy.cluster.master import (
    ClusterNode,
    Master,
    ServiceExistsError,
    UnknownClusterNodeError,
    UnknownServiceError,
)
from gllm.deploy.cluster.selection import SelectionError
from gllm.deploy.cluster.service import RUNNING_STATES, Service
from gllm.frontend.cluster_response_schemas import (
    ClusterNodeListResponse,
    ClusterNodeResponse,
    NodeExitResponse,
    ServiceDeletionResponse,
    ServiceKeyResponse,
    ServiceListResponse,
    ServiceRequestCounts,
    ServiceResponse,
    ServiceThroughput,
    ServiceTokenCounts,
    ServiceUtilization,
)
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.fields.services import DeployServiceFields
from gllm.frontend.json_encoding import json_response
from gllm.frontend.node_metrics import gauge, machine_load
from gllm.frontend.server_response_schemas import HealthResponse

CLUSTER: web.AppKey[Master] = web.AppKey("cluster")
"""Key of the master."""


async def deploy_service(request: web.Request) -> web.Response:
    """Start a service on free nodes (DeployLLMService)."""
    fields = await read_fields(request, DeployServiceFields)
    try:
        service = request.app[CLUSTER].deploy(fields.to_request())
    except ServiceExistsError as error:
        raise ApiError(409, str(error), param="service_name", code="service_exists") from error
    except SelectionError as error:
        raise ApiError(
            409, str(error), param="resource_specification", code="insufficient_nodes"
        ) from error
    return json_response(_service(service))


async def list_services(request: web.Request) -> web.Response:
    """Return the services of the cluster."""
    services = [_service(service) for service in request.app[CLUSTER].services()]
    return json_response(ServiceListResponse(services=services))


async def get_service(request: web.Request) -> web.Response:
    """Return state, uptime, request counts, throughput and utilization (CheckServiceStatus)."""
    try:
        return json_response(_service(request.app[CLUSTER].service(_name(request))))
    except UnknownServiceError as error:
        raise _not_found(error) from error


async def get_service_key(request: web.Request) -> web.Response:
    """Return the API key of a service (GetAPIKey)."""
    name = _name(request)
    try:
        key = request.app[CLUSTER].service(name).api_key
    except UnknownServiceError as error:
        raise _not_found(error) from error
    return json_response(
        ServiceKeyResponse(service_name=name, api_key=key), headers={"Cache-Control": "no-store"}
    )


async def delete_service(request: web.Request) -> web.Response:
    """End a service; without one of that name nothing happens (DeleteLLMService)."""
    name = _name(request)
    has_service = request.app[CLUSTER].delete(name)
    return json_response(
        ServiceDeletionResponse(service_name=name, state="stopping" if has_service else "absent")
    )


def _name(request: web.Request) -> str:
    return request.match_info["name"]


def _not_found(error: UnknownServiceError | UnknownClusterNodeError) -> ApiError:
    code = "service_not_found" if isinstance(error, UnknownServiceError) else "node_not_found"
    return ApiError(404, str(error), param="name", code=code)


def _service(service: Service) -> ServiceResponse:
    reading, rates = service.reading, service.meter.rates
    is_running = service.state in RUNNING_STATES
    return ServiceResponse(
        service_name=service.request.name,
        model_name=service.request.model,
        state=service.state,
        cause=service.cause,
        url=service.url or None,
        head=service.nodes[0],
        nodes=list(service.nodes),
        created=service.created,
        uptime_seconds=round(service.uptime_seconds(time.monotonic()), 3),
        engine_state=reading.state if is_running else "ended",
        requests=ServiceRequestCounts(
            running=reading.num_running,
            waiting=reading.num_waiting,
            finished=reading.num_finished,
            failed=reading.num_failed,
        ),
        tokens=ServiceTokenCounts(
            prompt=reading.num_prompt_tokens, generated=reading.num_generated_tokens
        ),
        throughput=ServiceThroughput(
            requests_per_second=rates.requests_per_second,
            prompt_tokens_per_second=rates.prompt_tokens_per_second,
            generated_tokens_per_second=rates.generated_tokens_per_second,
        ),
        utilization=ServiceUtilization(kv_cache=reading.kv_cache_usage, stages=list(rates.stages)),
    )


async def list_cluster_nodes(request: web.Request) -> web.Response:
    """Return the nodes of the cluster (CheckNodeStatus)."""
    cluster = request.app[CLUSTER]
    nodes = [_node(node) for node in cluster.nodes()]
    return json_response(ClusterNodeListResponse(nodes=nodes, refused_peers=cluster.refused_peers))


async def get_cluster_node(request: web.Request) -> web.Response:
    """Return address, hardware, load, power and temperature of a node (CheckNodeStatus)."""
    try:
        return json_response(_node(request.app[CLUSTER].node(request.match_info["name"])))
    except UnknownClusterNodeError as error:
        raise _not_found(error) from error


async def drain_cluster_node(request: web.Request) -> web.Response:
    """Let a node leave the cluster; its service moves to other nodes (NodeExit)."""
    name = request.match_info["name"]
    try:
        node = request.app[CLUSTER].drain_node(name)
    except UnknownClusterNodeError as error:
        raise _not_found(error) from error
    return json_response(NodeExitResponse(name=name, state="draining", service=node.service))


async def get_cluster_health(request: web.Request) -> web.Response:
    """Return 200 while the master works, whatever its services do."""
    return json_response(HealthResponse(status="ok", state="ready"))


async def get_cluster_metrics(request: web.Request) -> web.Response:
    """Return services by state and the load of the nodes in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(ClusterCollector(request.app[CLUSTER]))
    text = generate_latest(registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


class ClusterCollector(Collector):
    """Collector of the metrics of a cluster."""

    def __init__(self, cluster: Master) -> None:
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        nodes, services = self._cluster.nodes(), self._cluster.services()
        for name, text, states in (
            ("cluster_services", "Services of the cluster by state", [s.state for s in services]),
            ("cluster_nodes", "Nodes of the cluster by state", [n.report.state for n in nodes]),
        ):
            counts = [((state,), count) for state, count in sorted(Counter(states).items())]
            yield gauge(name, text, {}, counts, "state")
        yield from machine_load({}, [(node.report.name, node.report.load) for node in nodes])


def _node(node: ClusterNode) -> ClusterNodeResponse:
    """Return a node as a machine of an engine, with its hardware and service."""
    return ClusterNodeResponse(
        **(msgspec.structs.asdict(node.report) | {"links": []}),
        num_cores=node.num_cores,
        memory_bytes=node.memory_bytes,
        data_port=node.data_port,
        service=node.service,
        is_draining=node.is_draining,
    )
