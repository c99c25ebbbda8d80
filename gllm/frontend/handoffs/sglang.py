"""Bootstrap fields of SGLang: `bootstrap_host`, `bootstrap_port`, `bootstrap_room`.

The router sends the same request to both engines at the same time. Their roles tell them which half
is theirs. The decode engine asks the prefill engine, by its HTTP port, for the grant of the room:
the tickets are random, and not derived from the room, because a router may use a room twice.
"""

from collections.abc import Sequence
from typing import TypeVar

from gllm.frontend.answer_writer import WholeAnswerWriter
from gllm.frontend.fields.generation import HandoffFields
from gllm.frontend.handoffs.dialect import HandoffBorder
from gllm.frontend.handoffs.legs import DecodeLeg, HandoffLeg, PrefillLeg
from gllm.options.field_types import FieldError

Value = TypeVar("Value", int, str)


class SglangDialect:
    """HandoffDialect of SGLang."""

    field_names = ("bootstrap_room", "bootstrap_host", "bootstrap_port")

    def parse(
        self, fields: HandoffFields, border: HandoffBorder, writer: WholeAnswerWriter
    ) -> HandoffLeg | None:
        """See HandoffDialect. The first room is that of all prompts of the request."""
        room = _first("bootstrap_room", fields.bootstrap_room)
        if room is None:
            raise FieldError("bootstrap_room", "bootstrap_room is missing: it names the hand-off")
        participant = border.engine.kv_participant()
        role = "mixed" if participant is None else participant.role
        if role == "mixed":
            raise FieldError(
                "bootstrap_room",
                "bootstrap_room needs an engine with a role: start the engines with --role prefill "
                "and --role decode",
            )
        if role == "prefill":
            if not border.rooms.open(room):
                raise FieldError("bootstrap_room", f"bootstrap_room {room} is in use: take another")
            return PrefillLeg(
                border.engine,
                border.sealer,
                border.totals.count,
                lambda grant: border.rooms.publish(room, grant),
            )
        host = _first("bootstrap_host", fields.bootstrap_host)
        port = _first("bootstrap_port", fields.bootstrap_port)
        if host is None or port is None:
            name = "bootstrap_host" if host is None else "bootstrap_port"
            raise FieldError(
                name,
                f"{name} is missing: a decode engine needs the address of the prefill engine and "
                "its HTTP port",
            )
        return DecodeLeg(
            border.engine,
            border.sealer,
            border.totals.count,
            lambda: border.client.read_grant(host, port, room),
        )


def _first(name: str, value: Value | Sequence[Value | None] | None) -> Value | None:
    """Return a value, or the first one of a list. Raises FieldError for an empty list."""
    if isinstance(value, list):
        if not value:
            raise FieldError(name, f"{name} is an empty list: it needs a value per prompt")
        return value[0]
    return value  # type: ignore[return-value]
