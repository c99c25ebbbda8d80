"""Endpoints that control a running server: abort, prefix cache, profiles."""

from aiohttp import web

from gllm.engine.interface import ProfileError
from gllm.frontend.context import CONTEXT
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.control import AbortFields
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.json_encoding import json_response
from gllm.frontend.server_response_schemas import AbortResponse, ProfileResponse, StatusResponse


async def abort_requests(request: web.Request) -> web.Response:
    """Abort requests; they return the output so far with finish_reason `abort`."""
    fields = await read_fields(request, AbortFields)
    request_id = None if fields.abort_all else fields.request_id
    num_aborted = request.app[CONTEXT].engine.abort(request_id)
    return json_response(AbortResponse(aborted=num_aborted))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Clear the prefix cache; running requests continue."""
    await request.app[CONTEXT].engine.reset_prefix_cache()
    return json_response(StatusResponse(status="ok"))


async def start_profile(request: web.Request) -> web.Response:
    """Start a profile of all stages, written to the folder of --profile-dir."""
    return await _control_profile(request, is_start=True)


async def stop_profile(request: web.Request) -> web.Response:
    """Stop the profile and write a Chrome trace per stage."""
    return await _control_profile(request, is_start=False)


async def _control_profile(request: web.Request, is_start: bool) -> web.Response:
    """Start or stop a profile. Raises ApiError if profiles are off or the engine refuses."""
    context = request.app[CONTEXT]
    folder = context.config.profile_dir
    if folder is None:
        message = "Profiles are disabled: start the server with --profile-dir FOLDER."
        raise ApiError(501, message, code="profile_off")
    try:
        if is_start:
            await context.engine.start_profile(folder)
        else:
            await context.engine.stop_profile()
    except ProfileError as error:
        raise ApiError(409, str(error), code="profile_failed") from error
    return json_response(ProfileResponse(status="ok", folder=folder))
