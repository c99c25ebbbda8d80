"""Base classes of the writers that format the output of a request for one endpoint."""

from abc import ABC, abstractmethod

from msgspec import UNSET

from gllm.engine.interface import OutputDelta
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.errors import ApiError
from gllm.frontend.response_schemas import KvTransferParams, ResponseSchema, Unset
from gllm.frontend.sse import DONE, ServerSentEvent


class WholeAnswerWriter(ABC):
    """Base class: formats the output of a request as one endpoint's complete JSON response."""

    transfer_params: KvTransferParams | Unset | None = UNSET
    """`kv_transfer_params` of the response if KV blocks are transferred; UNSET: no such field."""

    @abstractmethod
    def build_answer(self, choices: list[CollectedChoice], usage: UsageCounter) -> ResponseSchema:
        """Return the response body for the finished choices of a request and its token counts."""


class AnswerWriter(WholeAnswerWriter):
    """Base class: formats the output of a request as one endpoint's response, streamed or complete.

    Streams are server-sent events: start events, then events per output delta, then end or error
    events.
    """

    def start_events(self, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the events before the first delta."""
        return []

    @abstractmethod
    def delta_events(self, delta: OutputDelta, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the server-sent events for one output delta."""

    @abstractmethod
    def end_events(self, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the events after the last delta of a successful request."""

    def error_events(self, error: ApiError) -> list[ServerSentEvent]:
        """Return the last events of a stream whose request failed."""
        return [ServerSentEvent(error.body()), DONE]
