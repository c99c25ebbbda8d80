"""The dialects of hand-offs over HTTP, the check who may use them, and GET /kv_handoffs/{room}."""

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from gllm.frontend.answer_writer import WholeAnswerWriter
from gllm.frontend.context import CONTEXT, ServerContext
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.generation import HandoffFields
from gllm.frontend.handoffs.access import CONTROL_KEY_HEADER, ControlAccess
from gllm.frontend.handoffs.dialect import HandoffBorder, HandoffDialect, HandoffTotals
from gllm.frontend.handoffs.grant import GrantSealer
from gllm.frontend.handoffs.legs import HandoffLeg
from gllm.frontend.handoffs.nixl import NixlDialect
from gllm.frontend.handoffs.rooms import PROOF_HEADER, RoomClient
from gllm.frontend.handoffs.sglang import SglangDialect
from gllm.frontend.request_run import PreparedRequest, Submitter

DIALECTS: tuple[HandoffDialect, ...] = (NixlDialect(), SglangDialect())
"""A new dialect is a line here, and its fields in HandoffFields."""

BORDER = web.AppKey("handoff_border", HandoffBorder)
"""Key of the state of an application; absent if no control key is configured."""


def install(app: web.Application, context: ServerContext) -> None:
    """Add the state of hand-offs to an application if a control key is configured.

    Raises:
        ValueError: the key file cannot be used; the message names the flag.
    """
    access = ControlAccess(context.config)
    if access.is_enabled:
        sealer = GrantSealer(access.keys)
        client = RoomClient(context.config, access, sealer)
        client.install(app)
        totals = HandoffTotals(context.engine.model.name, context.metrics.registry)
        app[BORDER] = HandoffBorder(context.engine, access, sealer, client, totals)


@contextmanager
def open_handoff(
    http_request: web.Request, request: PreparedRequest, writer: WholeAnswerWriter
) -> Iterator[Submitter]:
    """Yield what submits a request with fields of a hand-off: this engine's half, or the engine.

    Limits the request's parameters to those of the half, which ends with the block.

    Raises:
        ApiError: the client may not direct hand-offs, or this server takes part in none.
        FieldError: a field is invalid.
    """
    leg = _read_leg(http_request, request.fields, writer)
    if leg is None:
        yield http_request.app[CONTEXT].engine
        return
    request.params = leg.limit(request.params)
    try:
        yield leg
    finally:
        leg.close()


def _read_leg(
    http_request: web.Request, fields: HandoffFields, writer: WholeAnswerWriter
) -> HandoffLeg | None:
    """Return the half of a request. Raises the errors of `open_handoff`."""
    for dialect in DIALECTS:
        used = [name for name in dialect.field_names if getattr(fields, name) not in (None, {})]
        if used:
            return dialect.parse(fields, _check_access(http_request, used[0]), writer)
    return None


def _check_access(request: web.Request, name: str) -> HandoffBorder:
    """Return the state of hand-offs. Raises ApiError that names a field and the fix."""
    border, engine = request.app.get(BORDER), request.app[CONTEXT].engine
    if engine.fleet is not None:
        cause = "this server is a router, which hands requests off by itself: remove the field"
    elif border is None:
        cause = "hand-offs need an engine that is started with --kv-transfer and --control-key-file"
    elif engine.kv_participant() is None:
        cause = "this engine gives and fetches no KV blocks: start it with --kv-transfer"
    elif not border.access.permits(request):
        cause = (
            f"only routers may send it: show a key of --control-key-file as `{CONTROL_KEY_HEADER}: "
            "KEY` or `Authorization: Bearer KEY`, or send from a network of --control-network"
        )
    else:
        return border
    raise ApiError(400, f"{name} is refused: {cause}", param=name, code="handoff_refused")


MAX_ROOM_DIGITS = 20


async def get_grant(request: web.Request) -> web.Response:
    """Wait for the prefill of a room, and return what another engine needs to fetch its KV blocks.

    Engines ask each other; the question has to prove that they have the same control key.
    """
    border, text = request.app.get(BORDER), request.match_info["room"]
    is_number = text.isascii() and text.isdigit() and len(text) <= MAX_ROOM_DIGITS
    proof = request.headers.get(PROOF_HEADER, "")
    if border is None or not is_number or not border.sealer.check_proof(int(text), proof):
        # No more is revealed without the key.
        raise ApiError(404, "There is no such hand-off.", param="room", code="no_handoff")
    grant = await border.rooms.wait(int(text))
    if not grant:
        message = f"The KV blocks of room {int(text)} are not held."
        raise ApiError(404, message, param="room", code="no_handoff")
    return web.Response(text=grant)
