"""Answers of OpenAI's chat completions and completions: choices, whole or as chunks.

Owns what both endpoints carry besides their choices. Knows nothing of a choice's own shape, which
is the endpoint's.
"""

import time
from typing import Protocol

import msgspec
from aiohttp import web

from gllm.engine.interface import OutputDelta
from gllm.frontend.answer import JsonObject
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.errors import ApiError
from gllm.frontend.request_run import PreparedRequest
from gllm.frontend.sse import DONE, ServerSentEvent


class ChoiceFormat(Protocol):
    """How an endpoint writes its choices."""

    prefix: str
    """What ids begin with."""
    whole_object: str
    chunk_object: str

    @property
    def is_text_alone(self) -> bool:
        """Whether a delta that ends nothing is one choice with its text, whatever came before."""

    def opening(self, index: int) -> list[JsonObject]:
        """Choices that open a stream, one chunk for each."""

    def pieces(self, delta: OutputDelta, token_ids: bool) -> list[JsonObject]:
        """A delta as choices, one chunk for each; `token_ids` tells whether to show those."""

    def whole(self, choice: CollectedChoice) -> JsonObject:
        """A finished choice."""

    def besides(self, choices: list[CollectedChoice]) -> JsonObject:
        """What an answer carries besides its finished choices."""


MARK = "\x00text\x00"
"""Stands for a text while a frame is made."""


class ChoiceWriter:
    """Writes choices of a shape."""

    def __init__(self, request: web.Request, job: PreparedRequest, shape: ChoiceFormat) -> None:
        fields, options = job.fields, job.fields.stream_options
        self._head = {
            "id": f"{shape.prefix}{fields.request_id or request[REQUEST_ID]}",
            "created": int(time.time()),
            "model": request.app[CONTEXT].engine.model.name,
            "object": shape.chunk_object if fields.stream else shape.whole_object,
        }
        self._shape = shape
        self._encoder = msgspec.json.Encoder()
        # What all chunks begin with, up to their choice.
        self._begin = self._encoder.encode(self._head)[:-1] + b',"choices":['
        self._choices = job.choices
        self._token_ids = bool(fields.return_token_ids)
        self._usage_at_end = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)
        self._is_framed = shape.is_text_alone and not (self._token_ids or self._usage_always)
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """What is before and behind the text of a choice's chunks, where that is always the same:
        most of what a token costs would go into writing it again."""

    def opening(self, tally: UsageCounter) -> list[ServerSentEvent]:
        """As of Writer."""
        pieces = (piece for i in range(self._choices) for piece in self._shape.opening(i))
        return [self._chunk(piece, tally) for piece in pieces]

    def delta(self, delta: OutputDelta, tally: UsageCounter) -> list[ServerSentEvent]:
        """As of Writer."""
        if self._is_framed and delta.text and delta.finish_reason is None:
            before, after = self._frames.get(delta.index) or self._frame(delta.index, tally)
            return [ServerSentEvent(b"%b%b%b" % (before, self._encoder.encode(delta.text), after))]
        return [self._chunk(piece, tally) for piece in self._shape.pieces(delta, self._token_ids)]

    def closing(self, tally: UsageCounter) -> list[ServerSentEvent]:
        """As of Writer."""
        usage = {**self._head, "choices": [], "usage": tally.usage()}
        return [ServerSentEvent(usage), DONE] if self._usage_at_end else [DONE]

    def failed(self, error: ApiError) -> list[ServerSentEvent]:
        """As of Writer."""
        return [ServerSentEvent(error.body()), DONE]

    def whole(self, choices: list[CollectedChoice], tally: UsageCounter) -> JsonObject:
        """As of Writer."""
        written = []
        for choice in choices:
            extra = {"token_ids": choice.token_ids} if self._token_ids else {}
            written.append({**self._shape.whole(choice), **extra})
        besides = self._shape.besides(choices)
        return {**self._head, "choices": written, "usage": tally.usage(), **besides}

    def _frame(self, index: int, tally: UsageCounter) -> tuple[bytes, bytes]:
        (piece,) = self._shape.pieces(OutputDelta(index, MARK, []), False)
        before, after = self._written(piece, tally).split(self._encoder.encode(MARK))
        self._frames[index] = before, after
        return before, after

    def _chunk(self, choice: JsonObject, tally: UsageCounter) -> ServerSentEvent:
        return ServerSentEvent(self._written(choice, tally))

    def _written(self, choice: JsonObject, tally: UsageCounter) -> bytes:
        end = b"]}"
        if self._usage_always:
            end = b'],"usage":' + self._encoder.encode(tally.usage()) + b"}"
        return self._begin + self._encoder.encode(choice) + end
