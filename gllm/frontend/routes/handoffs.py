"""GET /kv_handoffs/{room}: the grant of a hand-off, for the engine that decodes."""

from aiohttp import web

from gllm.frontend.errors import ApiError
from gllm.frontend.handoffs.registry import BORDER
from gllm.frontend.handoffs.room_client import PROOF_HEADER

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
