"""GET /metrics."""

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from gllm.frontend.context import CONTEXT


async def get_metrics(request: web.Request) -> web.Response:
    """Return all metrics in Prometheus's text format."""
    text = request.app[CONTEXT].metrics.render()
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
