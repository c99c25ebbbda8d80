"""Answers of OpenAI's chat completions and completions: choices, whole or as chunks.

Owns what both endpoints carry besides their choices. Knows nothing of a choice's own shape, which
is the endpoint's.
"""

import time
from typing import Protocol

import msgspec
from aiohttp import web

from gllm.engine.interface import Delta
from gllm.frontend.answer import Json
from gllm.frontend.collect import Choice, Tally
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.errors import ApiError
from gllm.frontend.run import Job
from gllm.frontend.sse import DONE, Event


class Shape(Protocol):
    """How an endpoint writes its choices."""

    prefix: str
    """What ids begin with."""
    whole_object: str
    chunk_object: str

    @property
    def is_text_alone(self) -> bool:
        """Whether a delta that ends nothing is one choice with its text, whatever came before."""

    def opening(self, index: int) -> list[Json]:
        """Choices that open a stream, one chunk for each."""

    def pieces(self, delta: Delta, token_ids: bool) -> list[Json]:
        """A delta as choices, one chunk for each; `token_ids` tells whether to show those."""

    def whole(self, choice: Choice) -> Json:
        """A finished choice."""

    def besides(self, choices: list[Choice]) -> Json:
        """What an answer carries besides its finished choices."""


MARK = "\x00text\x00"
"""Stands for a text while a frame is made."""


class ChunkWriter:
    """Writes choices of a shape."""

    def __init__(self, request: web.Request, job: Job, shape: Shape) -> None:
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

    def opening(self, tally: Tally) -> list[Event]:
        """As of Writer."""
        pieces = (piece for i in range(self._choices) for piece in self._shape.opening(i))
        return [self._chunk(piece, tally) for piece in pieces]

    def delta(self, delta: Delta, tally: Tally) -> list[Event]:
        """As of Writer."""
        if self._is_framed and delta.text and delta.finish_reason is None:
            before, after = self._frames.get(delta.index) or self._frame(delta.index, tally)
            return [Event(b"%b%b%b" % (before, self._encoder.encode(delta.text), after))]
        return [self._chunk(piece, tally) for piece in self._shape.pieces(delta, self._token_ids)]

    def closing(self, tally: Tally) -> list[Event]:
        """As of Writer."""
        usage = {**self._head, "choices": [], "usage": tally.usage()}
        return [Event(usage), DONE] if self._usage_at_end else [DONE]

    def failed(self, error: ApiError) -> list[Event]:
        """As of Writer."""
        return [Event(error.body()), DONE]

    def whole(self, choices: list[Choice], tally: Tally) -> Json:
        """As of Writer."""
        written = []
        for choice in choices:
            extra = {"token_ids": choice.token_ids} if self._token_ids else {}
            written.append({**self._shape.whole(choice), **extra})
        besides = self._shape.besides(choices)
        return {**self._head, "choices": written, "usage": tally.usage(), **besides}

    def _frame(self, index: int, tally: Tally) -> tuple[bytes, bytes]:
        (piece,) = self._shape.pieces(Delta(index, MARK, []), False)
        before, after = self._written(piece, tally).split(self._encoder.encode(MARK))
        self._frames[index] = before, after
        return before, after

    def _chunk(self, choice: Json, tally: Tally) -> Event:
        return Event(self._written(choice, tally))

    def _written(self, choice: Json, tally: Tally) -> bytes:
        end = b"]}"
        if self._usage_always:
            end = b'],"usage":' + self._encoder.encode(tally.usage()) + b"}"
        return self._begin + self._encoder.encode(choice) + end
