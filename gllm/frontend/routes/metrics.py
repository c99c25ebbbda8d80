"""GET /metrics.

Owns nothing but the content type. Knows nothing of what is measured.
"""

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from gllm.frontend.context import CONTEXT


async def get_metrics(request: web.Request) -> web.Response:
    """All metrics in Prometheus's text format."""
    text = request.app[CONTEXT].metrics.text()
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
