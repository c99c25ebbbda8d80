"""GET /nodes of an engine."""

from typing import Any

import msgspec
from aiohttp import web

from gllm.frontend.context import CONTEXT
from gllm.frontend.errors import ApiError
from gllm.messages.node_report import NodeReport


async def list_nodes(request: web.Request) -> web.Response:
    """Return the machines of the engine: state, load, links and the cause of the last loss.

    An engine on one machine has one. A router has none: ask its engines.
    """
    engine = request.app[CONTEXT].engine
    if engine.fleet is not None:
        raise ApiError(
            404,
            "This server is a router, which has engines instead of nodes: see /engines, and "
            "request /nodes from one of them.",
            code="not_an_engine",
        )
    status = engine.status()
    return web.json_response(
        {
            "nodes": [_to_json(report) for report in engine.nodes()],
            "num_node_losses": status.num_node_losses,
            "refused_peers": dict(status.refused_peers),
        }
    )


def _to_json(report: NodeReport) -> dict[str, Any]:
    """Return a report with names of fields, which load and links lack on the wire."""
    return {
        **msgspec.structs.asdict(report),
        "load": msgspec.structs.asdict(report.load),
        "links": [msgspec.structs.asdict(link) for link in report.links],
    }
