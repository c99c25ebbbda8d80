"""Request fields of SGLang's router: `bootstrap_host`, `bootstrap_port`, `bootstrap_room`.

The router sends the same request to both engines at the same time. The role of an engine selects
its side. The decode engine requests the KV grant of `bootstrap_room` from the prefill engine's HTTP
port. The grant's tickets are random and not derived from the room, because a router may use a room
twice.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from gllm.frontend.answer_writer import WholeAnswerWriter
from gllm.frontend.fields.generation import HandoffFields
from gllm.frontend.handoffs.sides import (
    DecodeHandoff,
    HandoffContext,
    HandoffSubmitter,
    PrefillHandoff,
)
from gllm.options.field_types import FieldError

Value = TypeVar("Value", int, str)


def parse_bootstrap(
    fields: HandoffFields, context: HandoffContext, writer: WholeAnswerWriter
) -> HandoffSubmitter:
    """Return the object that runs a request as the prefill or decode engine of SGLang's router.

    The role of this engine selects the side. All prompts of a request share the first
    `bootstrap_room`.

    Args:
        fields: Request fields with `bootstrap_room`, and for decode host and port of the prefill
            engine.
        context: State of the engine's KV transfers over HTTP.
        writer: Not used.

    Raises:
        FieldError: A field is invalid or missing.
    """
    room = _first("bootstrap_room", fields.bootstrap_room)
    if room is None:
        raise FieldError("bootstrap_room", "bootstrap_room is missing: it names the hand-off")
    participant = context.engine.kv_participant()
    role = "mixed" if participant is None else participant.role
    if role == "mixed":
        raise FieldError(
            "bootstrap_room",
            "bootstrap_room needs an engine with a role: start the engines with --role prefill "
            "and --role decode",
        )
    if role == "prefill":
        if not context.rooms.open(room):
            raise FieldError("bootstrap_room", f"bootstrap_room {room} is in use: take another")
        return PrefillHandoff(context, partial(context.rooms.publish, room))
    host = _first("bootstrap_host", fields.bootstrap_host)
    port = _first("bootstrap_port", fields.bootstrap_port)
    if host is None or port is None:
        name = "bootstrap_host" if host is None else "bootstrap_port"
        raise FieldError(
            name,
            f"{name} is missing: a decode engine needs the address of the prefill engine and "
            "its HTTP port",
        )
    return DecodeHandoff(context, partial(context.client.read_grant, host, port, room))


def _first(name: str, value: Value | Sequence[Value | None] | None) -> Value | None:
    """Return a value, or the first one of a list. Raises FieldError for an empty list."""
    if isinstance(value, list):
        if not value:
            raise FieldError(name, f"{name} is an empty list: it needs a value per prompt")
        return value[0]
    return value  # type: ignore[return-value]
