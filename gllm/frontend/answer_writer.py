"""Base classes of the writers that build the JSON of an endpoint's answer."""

from abc import ABC, abstractmethod

from msgspec import UNSET

from gllm.engine.interface import OutputDelta
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.errors import ApiError
from gllm.frontend.response_schemas import KvTransferParams, ResponseSchema, Unset
from gllm.frontend.sse import DONE, ServerSentEvent


class WholeAnswerWriter(ABC):
    """Builds an endpoint's answer to a request that does not stream."""

    transfer_params: KvTransferParams | Unset | None = UNSET
    """Field that a hand-off adds to the answer."""

    @abstractmethod
    def build_answer(self, choices: list[CollectedChoice], usage: UsageCounter) -> ResponseSchema:
        """Return the body of the answer."""


class AnswerWriter(WholeAnswerWriter):
    """Builds an endpoint's answer, as a stream of events or whole."""

    def start_events(self, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the events before the first delta."""
        return []

    @abstractmethod
    def delta_events(self, delta: OutputDelta, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the events of a delta."""

    @abstractmethod
    def end_events(self, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the events after the last delta of a successful request."""

    def error_events(self, error: ApiError) -> list[ServerSentEvent]:
        """Return the last events of a request that failed."""
        return [ServerSentEvent(error.body()), DONE]
