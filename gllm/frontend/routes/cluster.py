"""Services and nodes of a cluster; health and metrics of its master.

The calls of the MoLink platform: DeployLLMService, CheckServiceStatus, GetAPIKey, DeleteLLMService,
CheckNodeStatus, NodeExit. NodeAccess is `gllm node --join`.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

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
from gllm.frontend import cluster_response_schemas as schemas
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.fields.services import DeployServiceFields
from gllm.frontend.json_encoding import json_response
from gllm.frontend.node_metrics import gauge, node_load_metrics
from gllm.frontend.server_response_schemas import HealthResponse

CLUSTER: web.AppKey[Master] = web.AppKey("cluster")
"""Key of the master."""


CLUSTER_ERRORS: Mapping[type[Exception], tuple[int, str, str]] = {
    SelectionError: (409, "insufficient_nodes", "resource_specification"),
    ServiceExistsError: (409, "service_exists", "service_name"),
    UnknownClusterNodeError: (404, "node_not_found", "name"),
    UnknownServiceError: (404, "service_not_found", "name"),
}
"""Status, code and `param` of the master's errors, as in `errors.ENGINE_ERRORS`."""


@contextmanager
def open_cluster(request: web.Request) -> Iterator[Master]:
    """Yield the master of the cluster; convert errors raised in the block to ApiError.

    The master is the process that starts and stops model services on nodes.
    """
    try:
        yield request.app[CLUSTER]
    except tuple(CLUSTER_ERRORS) as error:
        status, code, param = CLUSTER_ERRORS[type(error)]
        raise ApiError(status, str(error), param=param, code=code) from error


async def deploy_service(request: web.Request) -> web.Response:
    """Start a model service on free nodes of the cluster (DeployLLMService)."""
    fields = await read_fields(request, DeployServiceFields)
    with open_cluster(request) as cluster:
        return json_response(_service(cluster.deploy(fields.to_request())))


async def list_services(request: web.Request) -> web.Response:
    """Return all model services of the cluster with their state and load."""
    services = [_service(service) for service in request.app[CLUSTER].services()]
    return json_response(schemas.ServiceListResponse(services=services))


async def get_service(request: web.Request) -> web.Response:
    """Return a service's state, uptime, request counts and throughput (CheckServiceStatus)."""
    with open_cluster(request) as cluster:
        return json_response(_service(cluster.service(request.match_info["name"])))


async def get_service_key(request: web.Request) -> web.Response:
    """Return the API key of a model service (GetAPIKey)."""
    name = request.match_info["name"]
    with open_cluster(request) as cluster:
        answer = schemas.ServiceKeyResponse(
            service_name=name, api_key=cluster.service(name).api_key
        )
    return json_response(answer, headers={"Cache-Control": "no-store"})


async def delete_service(request: web.Request) -> web.Response:
    """Stop a model service; do nothing if there is none of that name (DeleteLLMService)."""
    name = request.match_info["name"]
    state: Literal["stopping", "absent"] = (
        "stopping" if request.app[CLUSTER].delete(name) else "absent"
    )
    return json_response(schemas.ServiceDeletionResponse(service_name=name, state=state))


def _service(service: Service) -> schemas.ServiceResponse:
    reading, rates = service.reading, service.meter.rates
    is_running = service.state in RUNNING_STATES
    return schemas.ServiceResponse(
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
        requests=schemas.ServiceRequestCounts(
            reading.num_running, reading.num_waiting, reading.num_finished, reading.num_failed
        ),
        tokens=schemas.ServiceTokenCounts(reading.num_prompt_tokens, reading.num_generated_tokens),
        throughput=schemas.ServiceThroughput(
            requests_per_second=rates.requests_per_second,
            prompt_tokens_per_second=rates.prompt_tokens_per_second,
            generated_tokens_per_second=rates.generated_tokens_per_second,
        ),
        utilization=schemas.ServiceUtilization(
            kv_cache=reading.kv_cache_usage, stages=list(rates.stages)
        ),
    )


async def list_cluster_nodes(request: web.Request) -> web.Response:
    """Return all nodes of the cluster with their state, hardware and load (CheckNodeStatus)."""
    cluster = request.app[CLUSTER]
    nodes = [_node(node) for node in cluster.nodes()]
    return json_response(
        schemas.ClusterNodeListResponse(nodes=nodes, refused_peers=cluster.refused_peers)
    )


async def get_cluster_node(request: web.Request) -> web.Response:
    """Return address, hardware, load, power and temperature of a node (CheckNodeStatus)."""
    with open_cluster(request) as cluster:
        return json_response(_node(cluster.node(request.match_info["name"])))


async def drain_cluster_node(request: web.Request) -> web.Response:
    """Remove a node from the cluster; its model service moves to other nodes (NodeExit)."""
    name = request.match_info["name"]
    with open_cluster(request) as cluster:
        service = cluster.drain_node(name).service
    return json_response(schemas.NodeExitResponse(name=name, state="draining", service=service))


async def get_cluster_health(request: web.Request) -> web.Response:
    """Return 200 while the cluster's master process runs, regardless of its model services."""
    return json_response(HealthResponse(status="ok", state="ready"))


async def get_cluster_metrics(request: web.Request) -> web.Response:
    """Return numbers of services and nodes by state, and the nodes' load, as Prometheus metrics."""
    registry = CollectorRegistry()
    registry.register(ClusterCollector(request.app[CLUSTER]))
    text = generate_latest(registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


class ClusterCollector(Collector):
    """Prometheus collector of a cluster: services and nodes by state, load of the nodes."""

    def __init__(self, cluster: Master) -> None:
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        """Yield services and nodes by state, and the load of the nodes."""
        nodes, services = self._cluster.nodes(), self._cluster.services()
        for name, text, states in (
            ("cluster_services", "Services of the cluster by state", [s.state for s in services]),
            ("cluster_nodes", "Nodes of the cluster by state", [n.report.state for n in nodes]),
        ):
            counts = [((state,), count) for state, count in sorted(Counter(states).items())]
            yield gauge(name, text, {}, counts, "state")
        yield from node_load_metrics({}, [(node.report.name, node.report.load) for node in nodes])


def _node(node: ClusterNode) -> schemas.ClusterNodeResponse:
    """Return a node as a machine of an engine, with its hardware and service."""
    return schemas.ClusterNodeResponse(
        **(msgspec.structs.asdict(node.report) | {"links": []}),
        num_cores=node.num_cores,
        memory_bytes=node.memory_bytes,
        data_port=node.data_port,
        service=node.service,
        is_draining=node.is_draining,
    )
