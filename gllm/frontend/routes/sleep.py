"""POST /sleep, POST /wake_up and GET /is_sleeping: pause a server without stopping it."""

from aiohttp import web

from gllm.frontend.context import CONTEXT
from gllm.frontend.endpoint import QueryParameter
from gllm.frontend.json_encoding import json_response
from gllm.frontend.server_response_schemas import SleepingResponse, StatusResponse
from gllm.options.field_types import FieldError

SLEEP_PARAMETERS = (
    QueryParameter(
        "level",
        "1 (default): empty the prefix cache too; 0: keep it; 2 of vLLM is refused, because the "
        "weights stay in memory",
        {"type": "integer", "enum": [0, 1]},
    ),
    QueryParameter(
        "mode",
        "running requests: wait (default) for their end, or abort them",
        {"type": "string", "enum": ["wait", "abort"]},
    ),
)


async def sleep(request: web.Request) -> web.Response:
    """Refuse new requests with 503 until /wake_up; return once the running ones have ended."""
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
    if engine.state != "sleeping":
        request.app[CONTEXT].check_ready()
    if mode == "abort":
        engine.abort(None)
    await engine.sleep(keeps_prefix_cache=level == "0")
    return json_response(StatusResponse(status="ok"))


async def wake_up(request: web.Request) -> web.Response:
    """Accept requests again after /sleep."""
    request.app[CONTEXT].engine.wake_up()
    return json_response(StatusResponse(status="ok"))


async def get_is_sleeping(request: web.Request) -> web.Response:
    """Return whether the server refuses requests because of /sleep."""
    is_sleeping = request.app[CONTEXT].engine.state == "sleeping"
    return json_response(SleepingResponse(is_sleeping=is_sleeping))
