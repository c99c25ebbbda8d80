"""Nodes of a cluster: list, status, exit; health and metrics of its master.

The calls of the MoLink platform: CheckNodeStatus, NodeExit. NodeAccess is `gllm node --join`.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gllm.deploy.cluster.master import ClusterNode, Master, UnknownClusterNodeError
from gllm.frontend.cluster_context import CLUSTER
from gllm.frontend.cluster_response_schemas import (
    ClusterNodeListResponse,
    ClusterNodeResponse,
    NodeExitResponse,
)
from gllm.frontend.errors import ApiError
from gllm.frontend.json_encoding import json_response
from gllm.frontend.metrics import PREFIX
from gllm.frontend.node_metrics import machine_load
from gllm.frontend.server_response_schemas import HealthResponse, node_row


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
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=("state",))
            for state, count in sorted(Counter(states).items()):
                gauge.add_metric([state], count)
            yield gauge
        yield from machine_load({}, [(each.report.name, each.report.load) for each in nodes])


def _not_found(error: UnknownClusterNodeError) -> ApiError:
    return ApiError(404, str(error), param="name", code="node_not_found")


def _node(node: ClusterNode) -> ClusterNodeResponse:
    """Return a node as a machine of an engine, with its hardware and service."""
    return ClusterNodeResponse(
        **msgspec.structs.asdict(node_row(msgspec.structs.replace(node.report, links=[]))),
        num_cores=node.num_cores,
        memory_bytes=node.memory_bytes,
        data_port=node.data_port,
        service=node.service,
        is_draining=node.is_draining,
    )
