"""GET /nodes and POST /nodes/{name}/drain of an engine."""

from typing import Any

import msgspec
from aiohttp import web

from gllm.engine.interface import EngineInterface, NodeDrainError, UnknownNodeError
from gllm.frontend.context import CONTEXT
from gllm.frontend.errors import ApiError
from gllm.messages.node_report import NodeReport


async def list_nodes(request: web.Request) -> web.Response:
    """Return the machines of the engine: state, load, links and the cause of the last loss.

    An engine on one machine has one. A router has none: ask its engines.
    """
    engine = _engine(request)
    status = engine.status()
    return web.json_response(
        {
            "nodes": [_to_json(report) for report in engine.nodes()],
            "pipeline_depth": status.stats.depth,
            "num_node_losses": status.num_node_losses,
            "refused_peers": dict(status.refused_peers),
        }
    )


async def drain_node(request: web.Request) -> web.Response:
    """Move the stages of a machine to others, then end its membership; no request fails.

    Returns at once. GET /nodes shows the machine as `draining` until it has left. Repeated requests
    return the same.
    """
    engine, name = _engine(request), request.match_info["name"]
    try:
        state = engine.drain_node(name)
    except UnknownNodeError as error:
        raise ApiError(404, str(error), param="name", code="node_not_found") from error
    except NodeDrainError as error:
        raise ApiError(409, str(error), param="name", code="node_not_drainable") from error
    return web.json_response({"name": name, "state": state})


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


def _to_json(report: NodeReport) -> dict[str, Any]:
    """Return a report with names of fields, which load and links lack on the wire."""
    return {
        **msgspec.structs.asdict(report),
        "load": msgspec.structs.asdict(report.load),
        "links": [msgspec.structs.asdict(link) for link in report.links],
    }
