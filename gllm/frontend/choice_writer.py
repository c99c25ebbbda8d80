"""Format OpenAI-style responses, which have a list of choices, as one response or as chunks.

Each endpoint formats its own choices by a `ChoiceFormat`. The other fields are the same in all
chunks.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web
from msgspec import UNSET

from gllm.engine.interface import OutputDelta
from gllm.frontend import response_schemas as schemas
from gllm.frontend.answer_writer import AnswerWriter
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.fields.base import JsonObject
from gllm.frontend.request_run import PreparedRequest
from gllm.frontend.sse import DONE, ServerSentEvent

ChunkChoice = schemas.ChatChunkChoice | schemas.CompletionChoice | schemas.GeneratedTokens
"""Choice in a chunk."""
WholeAnswer = schemas.ChatCompletionResponse | schemas.CompletionResponse | schemas.GenerateResponse


class ChoiceFormat(Protocol):
    """Interface that formats the choices of one OpenAI-style endpoint as JSON objects.

    Implementations: chat completions, completions, and the token ids of /inference/v1/generate.
    """

    @property
    def chunk_type(
        self,
    ) -> type[schemas.ChatCompletionChunk | schemas.CompletionChunk | schemas.GenerateEvent]:
        """Class of a stream chunk."""

    @property
    def is_plain_text(self) -> bool:
        """True if every delta before the last is one chunk choice with the delta's text.

        Such chunks are encoded once per choice, and then only their text is replaced.
        """

    def start_choices(self, index: int) -> Sequence[ChunkChoice]:
        """Return the chunk choices sent before the first output of a choice, such as the role."""

    def delta_choices(self, delta: OutputDelta, token_ids: bool) -> Sequence[ChunkChoice]:
        """Return the chunk choices for an output delta, with token ids if `token_ids` is True.

        Each one is sent in a chunk of its own.
        """

    def build_answer(
        self,
        envelope: JsonObject,
        choices: list[CollectedChoice],
        usage: schemas.CompletionUsage,
        token_ids: bool,
    ) -> WholeAnswer:
        """Return the complete response body.

        Args:
            envelope: Fields of the response other than its choices: id, model, creation time,
                object.
            choices: The finished choices.
            usage: Token counts.
            token_ids: Include token ids.
        """


TEXT_PLACEHOLDER = "\x00text\x00"
"""Text of the delta from which a frame is built."""


def build_envelope(
    http_request: web.Request, request: PreparedRequest, prefix: str, object_name: str
) -> JsonObject:
    """Return the fields `id`, `created`, `model` and `object` of an OpenAI response and its chunks.

    Args:
        http_request: The HTTP request, whose id is used if the client sent no `request_id`.
        request: The prepared request.
        prefix: Prefix of the response's id, such as `chatcmpl-`.
        object_name: Value of `object`.
    """
    return {
        "id": f"{prefix}{request.fields.request_id or http_request[REQUEST_ID]}",
        "created": int(time.time()),
        "model": http_request.app[CONTEXT].engine.model.name,
        "object": object_name,
    }


class ChoiceWriter(AnswerWriter):
    """Formats responses and chunks of chat completions, completions and /inference/v1/generate.

    Args:
        request: The prepared request, for the number of choices and the stream options.
        choice_format: Formats the choices for the endpoint.
        envelope: Fields of the response and of all chunks other than the choices.
    """

    def __init__(
        self, request: PreparedRequest, choice_format: ChoiceFormat, envelope: JsonObject
    ) -> None:
        fields, options = request.fields, request.fields.stream_options
        self._envelope = envelope
        self._format = choice_format
        self._encoder = msgspec.json.Encoder()
        empty_chunk = choice_format.chunk_type(**self._envelope, choices=[])
        self._chunk_prefix = self._encoder.encode(empty_chunk).removesuffix(b"]}")
        """Encoded chunk up to its choice, the same for all chunks."""
        self._request = request
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
        """Return the chunks that start the stream of every choice."""
        return [
            ServerSentEvent(self._encode_chunk(choice, usage))
            for index in range(self._request.num_choices)
            for choice in self._format.start_choices(index)
        ]

    def delta_events(self, delta: OutputDelta, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the chunks for one output delta."""
        if self._uses_frames and delta.text and delta.finish_reason is None:
            before, after = self._frames.get(delta.index) or self._build_frame(delta.index, usage)
            text = self._encoder.encode(delta.text)
            return [ServerSentEvent(b"%b%b%b" % (before, text, after))]
        choices = self._format.delta_choices(delta, self._token_ids)
        return [ServerSentEvent(self._encode_chunk(choice, usage)) for choice in choices]

    def end_events(self, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the chunk with the token counts, if requested, and the `[DONE]` event.

        The chunk also has `kv_transfer_params` if the request transfers KV blocks.
        """
        if self.transfer_params is UNSET and not self._usage_at_end:
            return [DONE]
        chunk = self._format.chunk_type(
            **self._envelope,
            choices=[],
            kv_transfer_params=self.transfer_params,
            usage=usage.to_openai() if self._usage_at_end else UNSET,
        )
        return [ServerSentEvent(chunk), DONE]

    def build_answer(self, choices: list[CollectedChoice], usage: UsageCounter) -> WholeAnswer:
        """Return the complete response body."""
        answer = self._format.build_answer(
            self._envelope, choices, usage.to_openai(), self._token_ids
        )
        if self.transfer_params is not UNSET:
            answer.kv_transfer_params = self.transfer_params
        return answer

    def _build_frame(self, index: int, usage: UsageCounter) -> tuple[bytes, bytes]:
        (choice,) = self._format.delta_choices(OutputDelta(index, TEXT_PLACEHOLDER, []), False)
        placeholder = self._encoder.encode(TEXT_PLACEHOLDER)
        before, after = self._encode_chunk(choice, usage).split(placeholder)
        self._frames[index] = before, after
        return before, after

    def _encode_chunk(self, choice: ChunkChoice, usage: UsageCounter) -> bytes:
        end = b"]}"
        if self._usage_always:
            end = b'],"usage":' + self._encoder.encode(usage.to_openai()) + b"}"
        return self._chunk_prefix + self._encoder.encode(choice) + end
