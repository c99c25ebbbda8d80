"""GET /openapi.json.

Owns nothing but the route. Knows nothing of how the document is made.
"""

from collections.abc import Sequence

from aiohttp import web

from gllm.frontend.describe import openapi
from gllm.frontend.endpoint import Endpoint

ALL = web.AppKey("endpoints", Sequence[Endpoint])
"""All endpoints of the application."""


async def document(request: web.Request) -> web.Response:
    """This API as an OpenAPI document."""
    return web.json_response(openapi(request.app[ALL]))
