"""Interface of a dialect of hand-offs over HTTP, and the state that all of them share."""

from dataclasses import dataclass, field
from typing import Protocol

from gllm.engine.interface import EngineInterface
from gllm.frontend.fields.generation import HandoffFields
from gllm.frontend.handoffs.access import ControlAccess
from gllm.frontend.handoffs.grant import GrantSealer
from gllm.frontend.handoffs.legs import HandoffLeg
from gllm.frontend.handoffs.room_client import RoomClient
from gllm.frontend.handoffs.rooms import RoomTable
from gllm.frontend.handoffs.totals import HandoffTotals


@dataclass
class HandoffBorder:
    """State of the hand-offs over HTTP of one engine."""

    engine: EngineInterface
    access: ControlAccess
    sealer: GrantSealer
    client: RoomClient
    totals: HandoffTotals
    rooms: RoomTable = field(default_factory=RoomTable)


class HandoffDialect(Protocol):
    """Fields by which a router of another project directs hand-offs."""

    @property
    def field_names(self) -> tuple[str, ...]:
        """Fields of the request."""

    def parse(self, fields: HandoffFields, border: HandoffBorder) -> HandoffLeg | None:
        """Return this engine's half of a hand-off; None if the fields ask for none.

        Raises:
            FieldError: a field is invalid.
        """
