"""GET /version."""

from aiohttp import web

from gllm.frontend.json_encoding import json_response
from gllm.frontend.server_response_schemas import VersionResponse
from gllm.options.version import __version__


async def get_version(request: web.Request) -> web.Response:
    """Return the version of gllm."""
    return json_response(VersionResponse(version=__version__))
