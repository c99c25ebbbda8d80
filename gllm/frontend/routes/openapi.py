"""GET /openapi.json."""

from aiohttp import web

from gllm.frontend.endpoint import ENDPOINTS_BY_ROUTE
from gllm.frontend.openapi import build_openapi_document


async def get_openapi_document(request: web.Request) -> web.Response:
    """Return this API as an OpenAPI document."""
    # A GET endpoint has two routes.
    endpoints = list(dict.fromkeys(request.app[ENDPOINTS_BY_ROUTE].values()))
    return web.json_response(build_openapi_document(endpoints))
