"""GET /version.

Owns nothing. Knows nothing of the model.
"""

from aiohttp import web

from gllm import __version__


async def get_version(request: web.Request) -> web.Response:
    """Which gllm this is."""
    return web.json_response({"version": __version__})
