"""POST /engines/{name}/role of a router, and POST /pd_role_switch of a router or an engine."""

from aiohttp import web

from gllm.engine.fleet_control import FleetControl, UnknownEngineError
from gllm.engine.interface import RoleSwitchError
from gllm.frontend.context import CONTEXT
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.fields.roles import EngineRoleFields, RoleSwitchFields, check_role
from gllm.frontend.json_encoding import json_response
from gllm.frontend.server_response_schemas import EngineRoleResponse, RoleSwitchResponse


async def set_engine_role(request: web.Request) -> web.Response:
    """Change the role of an engine; it announces the new role to all its routers.

    There is no restart and no drain: its running requests go on where they are.
    """
    fields = await read_fields(request, EngineRoleFields)
    fleet, name = request.app[CONTEXT].engine.fleet, request.match_info["name"]
    if fleet is None:
        raise ApiError(404, "This server is an engine, not a router.", code="not_a_router")
    role = check_role("role", fields.role)
    try:
        previous = fleet.roles.set_role(name, role)
    except UnknownEngineError as error:
        raise ApiError(404, str(error), param="name", code="engine_not_found") from error
    return json_response(EngineRoleResponse(name=name, role=role, previous_role=previous))


async def switch_role(request: web.Request) -> web.Response:
    """Change the role of this engine, or of one of a router's, in SGLang's form.

    A router needs `worker_url`. A switch that is refused is answered with 400.
    """
    fields = await read_fields(request, RoleSwitchFields)
    engine = request.app[CONTEXT].engine
    role = check_role("new_role", fields.new_role)
    try:
        if engine.fleet is None:
            previous = engine.set_role(role)
        else:
            name = _find_engine(engine.fleet, fields.worker_url)
            previous = engine.fleet.roles.set_role(name, role)
    except (RoleSwitchError, UnknownEngineError) as error:
        raise ApiError(400, str(error), code="role_switch_refused") from error
    message = "already in target role" if previous == role else "ok"
    return json_response(
        RoleSwitchResponse(success=True, message=message, old_role=previous, new_role=role)
    )


def _find_engine(fleet: FleetControl, worker_url: str | None) -> str:
    """Return the name of a router's engine. Raises UnknownEngineError."""
    if worker_url is None:
        raise UnknownEngineError("worker_url is required at a router: see /engines")
    address = worker_url.rpartition("//")[2].rstrip("/")
    rows = fleet.engines()
    named = [row.name for row in rows if row.name == worker_url]
    matching = named or [row.name for row in rows if row.address == address]
    if len(matching) != 1:
        raise UnknownEngineError(f"worker_url {worker_url!r} is no engine: see /engines")
    return matching[0]
