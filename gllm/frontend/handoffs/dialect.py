"""Interface of a dialect of hand-offs over HTTP, and the state that all of them share."""

from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter

from gllm.engine.interface import EngineInterface
from gllm.frontend.answer_writer import WholeAnswerWriter
from gllm.frontend.fields.generation import HandoffFields
from gllm.frontend.handoffs.access import ControlAccess
from gllm.frontend.handoffs.grant import GrantSealer
from gllm.frontend.handoffs.legs import HandoffLeg
from gllm.frontend.handoffs.rooms import RoomClient, RoomTable
from gllm.frontend.metrics import LABELS
from gllm.frontend.node_metrics import PREFIX

OUTCOMES = {
    "prefill": ("held", "not_held"),
    "decode": ("granted", "no_grant", "unfit_grant"),
}
"""Outcomes by half. `granted`: the KV blocks may be fetched; the others are ordinary prefills."""


class HandoffTotals:
    """Counts halves of hand-offs by outcome."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        """Create the metric.

        Args:
            model: name of the served model.
            registry: of the server's metrics.
        """
        self._model = model
        self._counter = Counter(
            PREFIX + "http_handoffs",
            "Halves of hand-offs that routers of other projects direct, by outcome",
            (*LABELS, "half", "outcome"),
            registry=registry,
        )
        for half, outcomes in OUTCOMES.items():
            for outcome in outcomes:
                self._counter.labels(model, half, outcome)

    def count(self, half: str, outcome: str) -> None:
        """Count a half of a hand-off: a key of OUTCOMES, and one of its outcomes."""
        self._counter.labels(self._model, half, outcome).inc()


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

    def parse(
        self, fields: HandoffFields, border: HandoffBorder, writer: WholeAnswerWriter
    ) -> HandoffLeg | None:
        """Return this engine's half of a hand-off; None if the fields ask for none.

        The half sets `writer.transfer_params` if the answer has a field of the dialect.

        Raises:
            FieldError: a field is invalid.
        """
