"""HTTP server of a node without the API server: health probes and metrics."""

from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gllm.frontend.listening import listen
from gllm.frontend.node_metrics import gauge, link_metrics, node_load_metrics
from gllm.runtime.node.head_session import AgentStatus

ReadStatus = Callable[[], AgentStatus]


class AgentCollector(Collector):
    """Prometheus collector of a node without API server, read at each scrape."""

    def __init__(self, read_status: ReadStatus) -> None:
        self._read_status = read_status

    def collect(self) -> Iterator[Metric]:
        """Yield the state, the data connections and the load of the node."""
        status = self._read_status()
        for name, text, value in (
            ("node_ready", "1 if the machine has a session with the head of a ready engine",
             float(status.is_ready)),
            ("node_workers", "Living worker processes of a machine", status.num_workers),
            # As on the head: the clock of the machine minus that of the head.
            ("node_clock_offset_seconds", "Clock of a machine minus that of the head",
             None if status.clock_offset_seconds is None else -status.clock_offset_seconds),
            ("node_round_trip_seconds", "Round trip between the head and a machine",
             status.round_trip_seconds),
        ):  # fmt: skip
            yield gauge(name, text, {}, [((status.name,), value)], "node")
        yield from link_metrics({}, [(status.name, status.links)])
        yield from node_load_metrics({}, [(status.name, status.load)])


def make_node_app(read_status: ReadStatus) -> web.Application:
    """Return the aiohttp application with health probes and metrics of a node without API server.

    Args:
        read_status: Returns the current state of the node's process.
    """
    registry = CollectorRegistry()
    registry.register(AgentCollector(read_status))

    async def get_health(request: web.Request) -> web.Response:
        status = read_status()
        return _probe(status, status.is_healthy)

    async def get_readiness(request: web.Request) -> web.Response:
        status = read_status()
        return _probe(status, status.is_ready)

    async def get_metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    async def refuse(request: web.Request) -> web.Response:
        status = read_status()
        message = (
            f"This is node {status.name!r} of an engine on several machines: it has /health, "
            f"/ready and /metrics. The API is served by the head, the machine at {status.head}."
        )
        error = {"message": message, "type": "not_found_error", "param": None, "code": "not_found"}
        return web.json_response({"error": error}, status=404)

    app = web.Application()
    app.router.add_get("/health", get_health)
    app.router.add_get("/ready", get_readiness)
    app.router.add_get("/metrics", get_metrics)
    app.router.add_route("*", "/{path:.*}", refuse)
    return app


async def start_node_server(read_status: ReadStatus, host: str, port: int) -> web.AppRunner:
    """Start the HTTP server with health probes and metrics of a node without API server.

    Args:
        read_status: Returns the current state of the node's process.
        host: Address to bind.
        port: TCP port to bind.

    Returns:
        The runner; its `cleanup` stops the server.

    Raises:
        ValueError: The address cannot be used; the message names the flags.
    """
    runner = web.AppRunner(make_node_app(read_status), access_log=None)
    await runner.setup()
    await listen(runner, host, port)
    return runner


def _probe(status: AgentStatus, is_good: bool) -> web.Response:
    body = {
        "status": "ok" if is_good else "unavailable",
        "state": status.state,
        "cause": status.cause,
        "node": status.name,
        "head": status.head,
    }
    return web.json_response(body, status=200 if is_good else 503)
