"""GET /nodes and POST /nodes/{name}/drain of an engine."""

from aiohttp import web

from gllm.engine.interface import EngineInterface
from gllm.frontend.context import CONTEXT
from gllm.frontend.errors import ApiError
from gllm.frontend.json_encoding import json_response
from gllm.frontend.server_response_schemas import NodeDrainResponse, NodeListResponse


async def list_nodes(request: web.Request) -> web.Response:
    """Return the machines of the engine: state, load, links and the cause of the last loss.

    An engine on one machine has one. A router has none: ask its engines.
    """
    engine = _engine(request)
    status = engine.status()
    return json_response(
        NodeListResponse(
            nodes=engine.nodes(),
            pipeline_depth=status.stats.depth,
            num_node_losses=status.num_node_losses,
            refused_peers=dict(status.refused_peers),
        )
    )


async def drain_node(request: web.Request) -> web.Response:
    """Move the stages of a machine to others, then end its membership; no request fails.

    Returns at once. GET /nodes shows the machine as `draining` until it has left. Repeated requests
    return the same.
    """
    name = request.match_info["name"]
    state = _engine(request).drain_node(name)
    return json_response(NodeDrainResponse(name, "drained" if state == "drained" else "draining"))


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
