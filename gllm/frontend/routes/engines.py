"""Engines and workload of a router, nodes of an engine, and the roles of engines."""

from aiohttp import web

from gllm.engine.fleet_control import FleetControl, UnknownEngineError
from gllm.engine.interface import EngineInterface, RoleSwitchError
from gllm.frontend import server_response_schemas as schemas
from gllm.frontend.context import CONTEXT
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.control import EngineRoleFields, RoleSwitchFields, check_role
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.json_encoding import json_response

TRUE_VALUES = ("1", "true", "yes")
FALSE_VALUES = ("", "0", "false", "no")


async def list_engines(request: web.Request) -> web.Response:
    """Return a router's engines with their load, the router's counters and its scaling decision."""
    fleet = _fleet(request)
    return json_response(
        schemas.EngineListResponse(
            engines=fleet.engines(),
            router=fleet.totals(),
            scaling=fleet.scaling.status(),
            workload=fleet.workload.status(),
        )
    )


async def list_request_lengths(request: web.Request) -> web.Response:
    """Return prompt and output lengths of a router's latest requests, in tokens, as CSV.

    `gllm plan` accepts the file as workload `file:PATH`. The router needs --detect-shifts.
    """
    lengths = _fleet(request).workload.lengths()
    if lengths is None:
        raise _no_workload()
    lines = ["prompt_tokens,output_tokens", *(f"{prompt},{output}" for prompt, output in lengths)]
    return web.Response(text="\n".join(lines) + "\n", content_type="text/csv")


async def reset_workload_profile(request: web.Request) -> web.Response:
    """Make the next requests the reference workload of a router's workload shift detection.

    Used after a new plan: clients that wait for responses send more requests to faster engines, and
    this is not a shift.
    """
    if not _fleet(request).workload.reset_profile():
        raise _no_workload()
    return json_response(schemas.StatusResponse(status="ok"))


async def drain_engine(request: web.Request) -> web.Response:
    """Stop sending new requests to an engine of a router, so that the engine can be stopped.

    With `migrate=true` its running requests move to other engines at once. Autoscaling leaves the
    engine drained until `undrain`, unless `scaling=true` says that the drain is its own.
    """
    fleet, name = _fleet(request), request.match_info["name"]
    migrates, is_scaling = (_read_switch(request, key) for key in ("migrate", "scaling"))
    num_running = fleet.drain_engine(name, migrates, is_scaling)
    return json_response(
        schemas.DrainResponse(name=name, state="draining", num_requests=num_running)
    )


def _read_switch(request: web.Request, key: str) -> bool:
    """Return a query parameter that is true or false; raises ApiError for another value."""
    text = request.query.get(key, "").lower()
    if text not in (*TRUE_VALUES, *FALSE_VALUES):
        raise ApiError(
            400, f"{key} is {text!r}, but has to be true or false", param=key, code="invalid_value"
        )
    return text in TRUE_VALUES


async def undrain_engine(request: web.Request) -> web.Response:
    """Send requests to a drained engine of a router again."""
    _fleet(request).undrain_engine(request.match_info["name"])
    return json_response(schemas.StatusResponse(status="ok"))


def _fleet(request: web.Request) -> FleetControl:
    """Return the router's control of its engines. Raises ApiError on an engine."""
    fleet = request.app[CONTEXT].engine.fleet
    if fleet is None:
        raise ApiError(404, "This server is an engine, not a router.", code="not_a_router")
    return fleet


def _no_workload() -> ApiError:
    text = "This router does not watch its workload: start it with --detect-shifts."
    return ApiError(404, text, code="no_workload")


async def set_engine_role(request: web.Request) -> web.Response:
    """Change the role of an engine (prefill, decode or mixed); it notifies all its routers.

    The engine does not restart or drain: its running requests continue.
    """
    fields = await read_fields(request, EngineRoleFields)
    fleet, name = _fleet(request), request.match_info["name"]
    role = check_role("role", fields.role)
    previous = fleet.roles.set_role(name, role)
    return json_response(schemas.EngineRoleResponse(name=name, role=role, previous_role=previous))


async def switch_role(request: web.Request) -> web.Response:
    """Change the role of this engine, or of an engine of this router, in SGLang's format.

    A router requires `worker_url`. If the engine refuses the role, the status is 400.
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
        schemas.RoleSwitchResponse(success=True, message=message, old_role=previous, new_role=role)
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


async def list_nodes(request: web.Request) -> web.Response:
    """Return the machines of an engine: state, load, data connections and cause of the last loss.

    An engine on one machine has one node. A router has none: request /nodes from its engines.
    """
    engine = _engine(request)
    status = engine.status()
    return json_response(
        schemas.NodeListResponse(
            nodes=engine.nodes(),
            pipeline_depth=status.stats.depth,
            num_node_losses=status.num_node_losses,
            refused_peers=dict(status.refused_peers),
        )
    )


async def drain_node(request: web.Request) -> web.Response:
    """Move a machine's pipeline stages to other machines, then remove it; no request fails.

    Returns at once. GET /nodes shows the machine as `draining` until it has left. Repeated requests
    return the same.
    """
    name = request.match_info["name"]
    state = _engine(request).drain_node(name)
    return json_response(
        schemas.NodeDrainResponse(name, "drained" if state == "drained" else "draining")
    )


def _engine(request: web.Request) -> EngineInterface:
    """Return the engine. Raises ApiError on a router."""
    engine = request.app[CONTEXT].engine
    if engine.fleet is not None:
        raise ApiError(
            404,
            "This server is a router, which has engines instead of nodes: see /engines, and "
            "request /nodes from one of them.",
            code="not_an_engine",
        )
    return engine
