"""POST /v1/messages and POST /v1/messages/count_tokens (Anthropic's Messages API)."""

import json

from aiohttp import web
from msgspec import UNSET

from gllm.engine.interface import EngineInterface, OutputDelta
from gllm.frontend import response_schemas as schemas
from gllm.frontend.answer import send_answer
from gllm.frontend.answer_writer import AnswerWriter
from gllm.frontend.chat_request import count_prompt_tokens, prepare_converted_chat
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.base import JsonObject
from gllm.frontend.fields.messages import (
    CLIENT_FIELD_NAMES,
    CountTokensFields,
    MessagesFields,
    convert_messages_to_chat,
)
from gllm.frontend.json_encoding import json_response
from gllm.frontend.output_blocks import BlockKind, BlockSplitter, OutputBlock
from gllm.frontend.request_run import PreparedRequest
from gllm.frontend.sse import ServerSentEvent
from gllm.text.chat.output_parser import ChatOutputParser
from gllm.text.surrogates import replace_surrogates_in


async def create_message(request: web.Request) -> web.StreamResponse:
    """Generate the assistant's next message, in the format of Anthropic's Messages API."""
    context = request.app[CONTEXT]
    async with prepare_converted_chat(
        request, MessagesFields, convert_messages_to_chat, CLIENT_FIELD_NAMES
    ) as (_, prepared):
        writer = MessagesWriter(context.engine, prepared, request[REQUEST_ID])
        return await send_answer(request, prepared, writer)


async def count_message_tokens(request: web.Request) -> web.StreamResponse:
    """Return the number of prompt tokens of a Messages API request, without running it."""
    num_tokens = await count_prompt_tokens(
        request, CountTokensFields, convert_messages_to_chat, CLIENT_FIELD_NAMES
    )
    return json_response(schemas.CountTokensResponse(input_tokens=num_tokens))


STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""The API's stop reasons by finish reason; other finish reasons are used unchanged."""


class MessagesWriter(AnswerWriter):
    """Formats responses and stream events of Anthropic's Messages API (/v1/messages).

    Args:
        engine: The engine, for the model's name.
        request: The prepared request.
        default_id: Id of the response if the request has no `request_id`.
    """

    def __init__(self, engine: EngineInterface, request: PreparedRequest, default_id: str) -> None:
        self._head: JsonObject = {
            "id": f"msg_{request.fields.request_id or default_id}",
            "type": "message",
            "role": "assistant",
            "model": engine.model.name,
        }
        self._parser = ChatOutputParser(request.output_format)
        self._splitter = BlockSplitter(self)
        self._has_started = False
        self._stop = schemas.MessageStop(None, None)
        """Reason of the end, once the output has ended."""

    def delta_events(self, delta: OutputDelta, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the events for one output delta.

        `message_start` is sent with the first one, because the number of cached tokens is not known
        earlier.
        """
        events: list[ServerSentEvent] = []
        if not self._has_started:
            self._has_started = True
            message = self._message(usage)
            events += [
                _event(schemas.MessageStartEvent(message)),
                _event(schemas.MessagePingEvent()),
            ]
        output_events, reason = self._parser.push(delta.index, delta.text, delta.finish_reason)
        events += self._splitter.push(output_events)
        if reason is not None:
            events += self._splitter.finish(reason)
            self._stop = _message_stop(reason, delta.stop_reason)
        return events

    def end_events(self, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the events with stop reason and token counts, and the end of the stream."""
        end = schemas.MessageDeltaEvent(self._stop, messages_usage(usage))
        return [_event(end), _event(schemas.MessageStopEvent())]

    def error_events(self, error: ApiError) -> list[ServerSentEvent]:
        """Return the `error` event of a failed request."""
        error.body_type = "error"
        return [ServerSentEvent(error.body(), "error")]

    def build_answer(
        self, choices: list[CollectedChoice], usage: UsageCounter
    ) -> schemas.MessagesResponse:
        """Return the complete Messages API response."""
        (choice,) = choices
        self.delta_events(choice.to_delta(), usage)
        return self._message(usage)

    def _message(self, usage: UsageCounter) -> schemas.MessagesResponse:
        """Return the message with the content so far."""
        return schemas.MessagesResponse(
            **self._head,
            content=[_content_block(block) for block in self._splitter.blocks],
            stop_reason=self._stop.stop_reason,
            stop_sequence=self._stop.stop_sequence,
            usage=messages_usage(usage),
        )

    def start_block(self, block: OutputBlock) -> list[ServerSentEvent]:
        """Return the event that starts a content block."""
        return [_event(schemas.ContentBlockStartEvent(block.index, _content_block(block)))]

    def extend_block(self, block: OutputBlock, text: str) -> list[ServerSentEvent]:
        """Return the event with new text of a content block."""
        return [_event(schemas.ContentBlockDeltaEvent(block.index, _block_delta(block.kind, text)))]

    def end_block(self, block: OutputBlock) -> list[ServerSentEvent]:
        """Return the event that ends a content block."""
        return [_event(schemas.ContentBlockStopEvent(block.index))]


def messages_usage(usage: UsageCounter) -> schemas.MessagesUsage:
    """Convert a request's token counts to `usage` of the Messages API.

    Input tokens do not include cached tokens.
    """
    reasoning = usage.num_reasoning_tokens
    return schemas.MessagesUsage(
        input_tokens=usage.num_prompt_tokens - usage.num_cached_tokens,
        cache_read_input_tokens=usage.num_cached_tokens,
        cache_creation_input_tokens=0,
        output_tokens=usage.num_completion_tokens,
        output_tokens_details=UNSET
        if reasoning is None
        else schemas.ThinkingTokensDetails(reasoning),
    )


def _event(event: schemas.MessagesEvent) -> ServerSentEvent:
    return ServerSentEvent(event, str(event.__struct_config__.tag))


def _block_delta(kind: BlockKind, text: str) -> schemas.ContentBlockDelta:
    match kind:
        case "text":
            return schemas.ContentBlockDelta("text_delta", text=text)
        case "reasoning":
            return schemas.ContentBlockDelta("thinking_delta", thinking=text)
        case _:
            return schemas.ContentBlockDelta("input_json_delta", partial_json=text)


def _content_block(block: OutputBlock) -> schemas.MessagesContentBlock:
    """Return a content block with the text that has arrived."""
    match block.kind:
        case "text":
            return schemas.MessagesContentBlock("text", text=block.text)
        case "reasoning":
            return schemas.MessagesContentBlock("thinking", thinking=block.text, signature="")
        case _:
            return schemas.MessagesContentBlock(
                "tool_use", id=block.call_id, name=block.name, input=_parse_object(block.text)
            )


def _parse_object(text: str) -> JsonObject:
    """Return a JSON object; an empty one if the text was cut off."""
    try:
        value = replace_surrogates_in(json.loads(text))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _message_stop(finish_reason: str, stop: int | str | None) -> schemas.MessageStop:
    """Return why an output has ended."""
    if isinstance(stop, str) and finish_reason == "stop":
        return schemas.MessageStop("stop_sequence", stop)
    return schemas.MessageStop(STOP_REASONS.get(finish_reason, finish_reason), None)
