"""What steers a running server: abort, prefix cache, profiles.

Owns the endpoints. Knows nothing of how the engine does it.
"""

from aiohttp import web

from gllm.engine.interface import ProfileError
from gllm.frontend.context import CONTEXT
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.control import AbortFields
from gllm.frontend.fields.parsing import read_fields


async def abort_requests(request: web.Request) -> web.Response:
    """End requests; their answers get what there is, with finish_reason `abort`."""
    fields = await read_fields(request, AbortFields)
    ended = request.app[CONTEXT].engine.abort(None if fields.abort_all else fields.request_id)
    return web.json_response({"aborted": ended})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Empty the prefix cache; running requests go on."""
    await request.app[CONTEXT].engine.reset_prefix_cache()
    return web.json_response({"status": "ok"})


async def start_profile(request: web.Request) -> web.Response:
    """Begin to record what every stage computes; --profile-dir says where to."""
    return await _profile(request, is_start=True)


async def stop_profile(request: web.Request) -> web.Response:
    """End the profile and write a Chrome trace for every stage."""
    return await _profile(request, is_start=False)


async def _profile(request: web.Request, is_start: bool) -> web.Response:
    context = request.app[CONTEXT]
    folder = context.config.profile_dir
    if folder is None:
        why = "profiles are off: start the server with --profile-dir FOLDER"
        raise ApiError(501, why, code="profile_off")
    try:
        if is_start:
            await context.engine.start_profile(folder)
        else:
            await context.engine.stop_profile()
    except ProfileError as error:
        raise ApiError(409, str(error), code="profile_failed") from error
    return web.json_response({"status": "ok", "folder": folder})
