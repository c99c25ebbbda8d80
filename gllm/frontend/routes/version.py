"""GET /version."""

from aiohttp import web

from gllm.options.version import __version__


async def get_version(request: web.Request) -> web.Response:
    """Return the version of gllm."""
    return web.json_response({"version": __version__})
