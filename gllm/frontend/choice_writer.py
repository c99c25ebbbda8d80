"""Write answers of OpenAI's completions and chat completions, whole or as chunks.

Both APIs have the same envelope around their choices. Each endpoint formats its own choices by a
`ChoiceFormat`.
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
    """Formats the choices of one endpoint as JSON."""

    prefix: str
    """Prefix of answer ids."""
    answer_object: str
    """Value of `object` in a whole answer."""
    chunk_object: str
    """Value of `object` in a chunk of a stream."""

    @property
    def is_plain_text(self) -> bool:
        """True if a delta that finishes nothing is always one choice with the delta's text."""

    def start_choices(self, index: int) -> list[JsonObject]:
        """Return the choices that start a stream, one per chunk."""

    def delta_choices(self, delta: OutputDelta, token_ids: bool) -> list[JsonObject]:
        """Return a delta as choices, one per chunk; include token ids if `token_ids` is True."""

    def whole_choice(self, choice: CollectedChoice) -> JsonObject:
        """Return a finished choice."""

    def extra_fields(self, choices: list[CollectedChoice]) -> JsonObject:
        """Return the fields of an answer in addition to its choices and usage."""


TEXT_PLACEHOLDER = "\x00text\x00"
"""Text of the delta from which a frame is built."""


class ChoiceWriter:
    """AnswerWriter of completions and chat completions."""

    def __init__(
        self, http_request: web.Request, request: PreparedRequest, choice_format: ChoiceFormat
    ) -> None:
        fields, options = request.fields, request.fields.stream_options
        self._envelope = {
            "id": f"{choice_format.prefix}{fields.request_id or http_request[REQUEST_ID]}",
            "created": int(time.time()),
            "model": http_request.app[CONTEXT].engine.model.name,
            "object": choice_format.chunk_object if fields.stream else choice_format.answer_object,
        }
        self._format = choice_format
        self._encoder = msgspec.json.Encoder()
        self._chunk_prefix = self._encoder.encode(self._envelope)[:-1] + b',"choices":['
        """Encoded chunk up to its choice, the same for all chunks."""
        self._num_choices = request.num_choices
        self._handoff = request.handoff
        self._token_ids = bool(fields.return_token_ids)
        self._usage_at_end = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)
        self._uses_frames = choice_format.is_plain_text and not (
            self._token_ids or self._usage_always
        )
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """Encoded chunk of each choice, before and after its text. Reused for every delta with
        text alone, because encoding the rest again would be most of a token's cost."""

    def start_events(self, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the chunks that start every choice."""
        choices = (
            c for index in range(self._num_choices) for c in self._format.start_choices(index)
        )
        return [self._chunk(choice, usage) for choice in choices]

    def delta_events(self, delta: OutputDelta, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the chunks of a delta."""
        if self._uses_frames and delta.text and delta.finish_reason is None:
            before, after = self._frames.get(delta.index) or self._build_frame(delta.index, usage)
            text = self._encoder.encode(delta.text)
            return [ServerSentEvent(b"%b%b%b" % (before, text, after))]
        choices = self._format.delta_choices(delta, self._token_ids)
        return [self._chunk(choice, usage) for choice in choices]

    def end_events(self, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the chunk with the token counts, if requested, and the end of the stream.

        The chunk also has the fields of a hand-off, if there are any.
        """
        extra = self._handoff_fields()
        if self._usage_at_end:
            extra["usage"] = usage.to_openai()
        if not extra:
            return [DONE]
        return [ServerSentEvent({**self._envelope, "choices": [], **extra}), DONE]

    def error_events(self, error: ApiError) -> list[ServerSentEvent]:
        """Return the error and the end of the stream."""
        return [ServerSentEvent(error.body()), DONE]

    def build_answer(self, choices: list[CollectedChoice], usage: UsageCounter) -> JsonObject:
        """Return the whole answer."""
        formatted = []
        for choice in choices:
            token_ids = {"token_ids": choice.token_ids} if self._token_ids else {}
            formatted.append({**self._format.whole_choice(choice), **token_ids})
        return {
            **self._envelope,
            "choices": formatted,
            "usage": usage.to_openai(),
            **self._format.extra_fields(choices),
            **self._handoff_fields(),
        }

    def _handoff_fields(self) -> JsonObject:
        """Return the fields that a hand-off adds to the answer."""
        return {} if self._handoff is None else self._handoff.answer_fields()

    def _build_frame(self, index: int, usage: UsageCounter) -> tuple[bytes, bytes]:
        (choice,) = self._format.delta_choices(OutputDelta(index, TEXT_PLACEHOLDER, []), False)
        placeholder = self._encoder.encode(TEXT_PLACEHOLDER)
        before, after = self._encode_chunk(choice, usage).split(placeholder)
        self._frames[index] = before, after
        return before, after

    def _chunk(self, choice: JsonObject, usage: UsageCounter) -> ServerSentEvent:
        return ServerSentEvent(self._encode_chunk(choice, usage))

    def _encode_chunk(self, choice: JsonObject, usage: UsageCounter) -> bytes:
        end = b"]}"
        if self._usage_always:
            end = b'],"usage":' + self._encoder.encode(usage.to_openai()) + b"}"
        return self._chunk_prefix + self._encoder.encode(choice) + end
