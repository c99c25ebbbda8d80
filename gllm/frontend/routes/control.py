"""Endpoints that control a running server: abort, prefix cache, profiles, sleep."""

from aiohttp import web

from gllm.frontend import server_response_schemas as schemas
from gllm.frontend.context import CONTEXT
from gllm.frontend.endpoint import EndpointParameter
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.control import AbortFields
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.json_encoding import json_response
from gllm.options.field_types import FieldError


async def abort_requests(request: web.Request) -> web.Response:
    """Abort one or all requests; they return the output so far with finish_reason `abort`."""
    fields = await read_fields(request, AbortFields)
    request_id = None if fields.abort_all else fields.request_id
    num_aborted = request.app[CONTEXT].engine.abort(request_id)
    return json_response(schemas.AbortResponse(aborted=num_aborted))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Remove all entries of the prefix cache; running requests continue."""
    await request.app[CONTEXT].engine.reset_prefix_cache()
    return json_response(schemas.StatusResponse(status="ok"))


async def start_profile(request: web.Request) -> web.Response:
    """Start a torch profile of all workers, written to the folder of --profile-dir."""
    return await _control_profile(request, is_start=True)


async def stop_profile(request: web.Request) -> web.Response:
    """Stop the profile and write a Chrome trace per pipeline stage."""
    return await _control_profile(request, is_start=False)


async def _control_profile(request: web.Request, is_start: bool) -> web.Response:
    """Start or stop a profile. Raises ApiError if profiles are off, and the engine's errors."""
    context = request.app[CONTEXT]
    folder = context.config.profile_dir
    if folder is None:
        message = "Profiles are disabled: start the server with --profile-dir FOLDER."
        raise ApiError(501, message, code="profile_off")
    if is_start:
        await context.engine.start_profile(folder)
    else:
        await context.engine.stop_profile()
    return json_response(schemas.ProfileResponse(status="ok", folder=folder))


SLEEP_PARAMETERS = (
    EndpointParameter(
        "level",
        "1 (default): empty the prefix cache too; 0: keep it; 2 of vLLM is refused, because the "
        "weights stay in memory",
        {"type": "integer", "enum": [0, 1]},
    ),
    EndpointParameter(
        "mode",
        "running requests: wait (default) for their end, or abort them",
        {"type": "string", "enum": ["wait", "abort"]},
    ),
)


async def sleep(request: web.Request) -> web.Response:
    """Reject new requests with 503 until /wake_up; return once the running ones have ended."""
    engine = request.app[CONTEXT].engine
    level, mode = request.query.get("level", "1"), request.query.get("mode", "wait")
    if level not in ("0", "1"):
        raise FieldError(
            "level",
            f"level is {level[:100]!r}, but has to be 0 or 1: the weights stay in memory, stop the "
            "server to free it",
        )
    if mode not in ("wait", "abort"):
        raise FieldError("mode", f"mode is {mode[:100]!r}, but has to be wait or abort")
    if not engine.status().is_sleeping:
        request.app[CONTEXT].check_ready()
    if mode == "abort":
        engine.abort(None)
    await engine.sleep(keeps_prefix_cache=level == "0")
    return json_response(schemas.StatusResponse(status="ok"))


async def wake_up(request: web.Request) -> web.Response:
    """Accept new requests again after /sleep."""
    request.app[CONTEXT].engine.wake_up()
    return json_response(schemas.StatusResponse(status="ok"))


async def get_is_sleeping(request: web.Request) -> web.Response:
    """Return true if the server rejects requests because of /sleep."""
    status = request.app[CONTEXT].engine.status()
    return json_response(schemas.SleepingResponse(is_sleeping=status.is_sleeping))
