"""Parse and authorize the KV-transfer fields of a request; serve GET /kv_handoffs/{room}."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

from aiohttp import web

from gllm.frontend.answer_writer import WholeAnswerWriter
from gllm.frontend.context import CONTEXT, ServerContext
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.generation import HandoffFields
from gllm.frontend.handoffs.access import CONTROL_KEY_HEADER, ControlAccess
from gllm.frontend.handoffs.grant import GrantSealer
from gllm.frontend.handoffs.nixl import parse_kv_transfer_params
from gllm.frontend.handoffs.rooms import PROOF_HEADER, RoomClient
from gllm.frontend.handoffs.sglang import parse_bootstrap
from gllm.frontend.handoffs.sides import OUTCOMES, HandoffContext, HandoffSubmitter
from gllm.frontend.metrics import LabeledCounter
from gllm.frontend.request_run import PreparedRequest, Submitter

ParseHandoff = Callable[[HandoffFields, HandoffContext, WholeAnswerWriter], HandoffSubmitter | None]
DIALECTS: Mapping[tuple[str, ...], ParseHandoff] = {
    ("kv_transfer_params",): parse_kv_transfer_params,
    ("bootstrap_room", "bootstrap_host", "bootstrap_port"): parse_bootstrap,
}
"""Parsers by the fields of HandoffFields that they read."""

HANDOFF_CONTEXT = web.AppKey("handoff_context", HandoffContext)
"""Key of the state of an application; absent if no control key is configured."""


def install(app: web.Application, context: ServerContext) -> None:
    """Enable disaggregated prefill under vLLM's and SGLang's routers, if there is a control key.

    Stores the state of the KV transfers in the application.

    Raises:
        ValueError: the key file cannot be used; the message names the flag.
    """
    access = ControlAccess(context.config)
    if access.is_enabled:
        sealer = GrantSealer(access.keys)
        client = RoomClient(context.config, access, sealer)
        app.on_cleanup.append(client.close)
        outcomes = LabeledCounter(
            context.metrics.registry, context.engine.model.name, "http_handoffs",
            "Halves of hand-offs that routers of other projects direct, by outcome",
            "half outcome", OUTCOMES,
        )  # fmt: skip
        app[HANDOFF_CONTEXT] = HandoffContext(context.engine, access, sealer, client, outcomes)


@contextmanager
def open_handoff(
    http_request: web.Request, request: PreparedRequest, writer: WholeAnswerWriter
) -> Iterator[Submitter]:
    """Yield the object to submit a request to: the engine, or its prefill or decode side.

    The fields of vLLM's or SGLang's router select a side. The prefill side limits the request to
    one output token. The side is closed at the end of the block.

    Args:
        http_request: The HTTP request.
        request: The prepared request; its sampling parameters may be replaced.
        writer: Formats the response.

    Raises:
        ApiError: The client is not a trusted router, or this server transfers no KV blocks.
        FieldError: A field is invalid.
    """
    handoff = _parse_handoff(http_request, request.fields, writer)
    if handoff is None:
        yield http_request.app[CONTEXT].engine
        return
    request.params = handoff.limit(request.params)
    with closing(handoff):
        yield handoff


def _parse_handoff(
    http_request: web.Request, fields: HandoffFields, writer: WholeAnswerWriter
) -> HandoffSubmitter | None:
    """Return this engine's side of a request. Raises the errors of `open_handoff`."""
    for names, parse in DIALECTS.items():
        used = [name for name in names if getattr(fields, name) not in (None, {})]
        if used:
            return parse(fields, _check_access(http_request, used[0]), writer)
    return None


def _check_access(request: web.Request, name: str) -> HandoffContext:
    """Return the state of hand-offs. Raises ApiError that names a field and the fix."""
    handoffs, engine = request.app.get(HANDOFF_CONTEXT), request.app[CONTEXT].engine
    if engine.fleet is not None:
        cause = "this server is a router, which hands requests off by itself: remove the field"
    elif handoffs is None:
        cause = "hand-offs need an engine that is started with --kv-transfer and --control-key-file"
    elif engine.kv_participant() is None:
        cause = "this engine gives and fetches no KV blocks: start it with --kv-transfer"
    elif not handoffs.access.permits(request):
        cause = (
            f"only routers may send it: show a key of --control-key-file as `{CONTROL_KEY_HEADER}: "
            "KEY` or `Authorization: Bearer KEY`, or send from a network of --control-network"
        )
    else:
        return handoffs
    raise ApiError(400, f"{name} is refused: {cause}", param=name, code="handoff_refused")


MAX_ROOM_DIGITS = 20


async def get_grant(request: web.Request) -> web.Response:
    """Wait for the prefill of a `bootstrap_room`; return the signed text to fetch its KV blocks.

    Decode engines send this request to prefill engines, signed with the control key of both.
    """
    handoffs, text = request.app.get(HANDOFF_CONTEXT), request.match_info["room"]
    is_number = text.isascii() and text.isdigit() and len(text) <= MAX_ROOM_DIGITS
    proof = request.headers.get(PROOF_HEADER, "")
    if handoffs is None or not is_number or not handoffs.sealer.check_proof(int(text), proof):
        # No more is revealed without the key.
        raise ApiError(404, "There is no such hand-off.", param="room", code="no_handoff")
    grant = await handoffs.rooms.wait(int(text))
    if not grant:
        message = f"The KV blocks of room {int(text)} are not held."
        raise ApiError(404, message, param="room", code="no_handoff")
    return web.Response(text=grant)
