"""POST /v1/chat/completions."""

from typing import cast

import msgspec
from aiohttp import web
from msgspec import UNSET

from gllm.engine.interface import OutputDelta
from gllm.frontend import response_schemas as schemas
from gllm.frontend.answer import send_answer
from gllm.frontend.chat_request import prepare_chat_request
from gllm.frontend.choice_writer import ChoiceWriter, build_envelope
from gllm.frontend.choices import CollectedChoice
from gllm.frontend.context import CONTEXT
from gllm.frontend.fields.base import JsonObject
from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.logprobs import chat_logprobs, prompt_logprobs
from gllm.frontend.request_run import PreparedRequest
from gllm.text.chat.output_parser import ChatOutputParser
from gllm.text.output.events import (
    AssistantMessage,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCall,
    ToolCallArgumentsDelta,
    ToolCallStart,
)
from gllm.text.tokenizer import Tokenizer

CHAT_ID_PREFIX = "chatcmpl-"
"""Prefix of answer ids."""


def message_to_json(message: AssistantMessage, legacy: bool = False) -> schemas.ChatMessage:
    """Convert the parsed output of a choice to the `message` object of a chat completion.

    `content` is null if the message has no text but reasoning or tool calls.

    Args:
        message: The parsed output.
        legacy: Write the first tool call as `function_call`, for clients that sent `functions`.
    """
    has_other_parts = bool(message.reasoning or message.tool_calls)
    content = message.content or (None if has_other_parts else "")
    answer = schemas.ChatMessage("assistant", content)
    if message.reasoning:
        answer.reasoning = answer.reasoning_content = message.reasoning
    if message.tool_calls:
        calls = [_chat_tool_call(call) for call in message.tool_calls.values()]
        if legacy:
            answer.function_call = calls[0].function
        else:
            answer.tool_calls = calls
    return answer


def _chat_tool_call(call: ToolCall) -> schemas.ChatToolCall:
    return msgspec.convert(call.to_dict(), schemas.ChatToolCall)


class MessageDeltaWriter:
    """Converts the parsed output of one streamed chat choice to `delta` objects.

    Args:
        legacy: Write the first tool call as `function_call`, for clients that sent `functions`.
    """

    def __init__(self, legacy: bool) -> None:
        self._legacy = legacy
        self._custom: set[int] = set()
        """Indices of calls of custom tools."""

    def event_to_json(self, event: OutputEvent) -> schemas.ChatMessageDelta | None:
        """Return the `delta` object for a piece of parsed output; None if it adds nothing."""
        match event:
            case ContentDelta(text):
                return schemas.ChatMessageDelta(content=text)
            case ReasoningDelta(text):
                # Under both names that clients read.
                return schemas.ChatMessageDelta(reasoning=text, reasoning_content=text)
            case ToolCallStart(index, call_id, name, is_custom):
                if is_custom:
                    self._custom.add(index)
                call = _chat_tool_call(ToolCall(call_id, name, is_custom=is_custom))
                call.index = index
                return self._call_delta(index, call)
            case ToolCallArgumentsDelta(index, text):
                if index in self._custom:
                    part = schemas.ChatToolCall(index, custom=schemas.CustomToolInput(input=text))
                else:
                    part = schemas.ChatToolCall(
                        index, function=schemas.FunctionCall(arguments=text)
                    )
                return self._call_delta(index, part)
            case _:
                return None

    def _call_delta(
        self, index: int, call: schemas.ChatToolCall
    ) -> schemas.ChatMessageDelta | None:
        if not self._legacy:
            return schemas.ChatMessageDelta(tool_calls=[call])
        # `function_call` can hold a single call.
        return schemas.ChatMessageDelta(function_call=call.function) if index == 0 else None


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Generate the assistant's next message of a chat."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, ChatCompletionFields)
    context.check_model(fields.model)
    with context.admit():
        prepared = await prepare_chat_request(context, fields)
        choice_format = ChatChoiceFormat(context.engine.tokenizer, prepared)
        object_name = "chat.completion.chunk" if fields.stream else "chat.completion"
        envelope = build_envelope(request, prepared, CHAT_ID_PREFIX, object_name)
        writer = ChoiceWriter(prepared, choice_format, envelope)
        return await send_answer(request, prepared, writer)


class ChatChoiceFormat:
    """Formats the choices of chat completions: messages, message deltas and log-probabilities.

    Args:
        tokenizer: The model's tokenizer.
        request: The prepared request.
    """

    chunk_type = schemas.ChatCompletionChunk

    def __init__(self, tokenizer: Tokenizer, request: PreparedRequest) -> None:
        fields = request.fields
        self._tokenizer = tokenizer
        self._parser = ChatOutputParser(request.output_format)
        self._uses_functions = isinstance(fields, ChatCompletionFields) and bool(fields.functions)
        """True if the client uses the older `functions`: the answer has `function_call`."""
        self._finish_reasons = {"tool_calls": "function_call"} if self._uses_functions else {}
        """Finish reasons in the terms of the client's API, where they differ."""
        self._delta_writers: dict[int, MessageDeltaWriter] = {}
        """Writers of the choices that have started, by index."""
        self._num_top_logprobs = request.params.logprobs
        """Number of most likely tokens to return per output token; None: no log-probabilities."""
        self._num_prompt_logprobs = request.params.prompt_logprobs
        """The same for prompt tokens."""
        self._write_token_ids = bool(fields.return_tokens_as_token_ids)
        """True if log-probabilities have `token_id:ID` in place of the token's text."""

    @property
    def is_plain_text(self) -> bool:
        """True if the output is text without reasoning, tool calls and log-probabilities."""
        return self._parser.is_plain_text and self._num_top_logprobs is None

    def start_choices(self, index: int) -> list[schemas.ChatChunkChoice]:
        """Return one chunk choice with the assistant's role and an empty text."""
        return [
            schemas.ChatChunkChoice(index, schemas.ChatMessageDelta("assistant", ""), None, None)
        ]

    def delta_choices(self, delta: OutputDelta, token_ids: bool) -> list[schemas.ChatChunkChoice]:
        """Return a chunk choice per piece of parsed output, then one with the finish reason.

        The first choice has the token ids and the log-probabilities of the whole delta.
        """
        new_ids: list[int] | schemas.Unset = delta.token_ids if token_ids else UNSET
        logprobs = self._logprobs(delta)
        events, finish_reason = self._parser.push(delta.index, delta.text, delta.finish_reason)
        writer = self._delta_writers.get(delta.index)
        if writer is None:
            writer = self._delta_writers[delta.index] = MessageDeltaWriter(self._uses_functions)
        messages = [json for json in map(writer.event_to_json, events) if json is not None]
        if not messages and finish_reason is None and (new_ids or logprobs):
            messages = [schemas.ChatMessageDelta(content="")]
        choices = []
        for message in messages:
            choices.append(
                schemas.ChatChunkChoice(delta.index, message, logprobs, None, token_ids=new_ids)
            )
            new_ids, logprobs = [] if token_ids else UNSET, None
        if finish_reason is not None:
            reason = cast(
                "schemas.FinishReason", self._finish_reasons.get(finish_reason, finish_reason)
            )
            choices.append(
                schemas.ChatChunkChoice(
                    delta.index,
                    schemas.ChatMessageDelta(),
                    logprobs,
                    reason,
                    delta.stop_reason,
                    new_ids,
                )
            )
        return choices

    def build_answer(
        self,
        envelope: JsonObject,
        choices: list[CollectedChoice],
        usage: schemas.CompletionUsage,
        token_ids: bool,
    ) -> schemas.ChatCompletionResponse:
        """Return the chat completion response, with parsed messages and log-probabilities."""
        formatted = [self._whole_choice(choice, token_ids) for choice in choices]
        answer = schemas.ChatCompletionResponse(**envelope, choices=formatted, usage=usage)
        if self._num_prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(
                self._tokenizer, choices[0].prompt_logprobs, self._num_prompt_logprobs
            )
        return answer

    def _whole_choice(self, choice: CollectedChoice, token_ids: bool) -> schemas.ChatChoice:
        """Return a choice with its message."""
        message, finish_reason = self._parser.parse(choice.text, choice.finish_reason)
        finish_reason = self._finish_reasons.get(finish_reason or "", finish_reason)
        return schemas.ChatChoice(
            index=choice.index,
            message=message_to_json(message, self._uses_functions),
            logprobs=self._logprobs(choice),
            finish_reason=cast("schemas.FinishReason", finish_reason),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if token_ids else UNSET,
        )

    def _logprobs(self, output: OutputDelta | CollectedChoice) -> schemas.ChatLogprobs | None:
        """Return the log-probabilities of output tokens, if requested."""
        if self._num_top_logprobs is None or not output.logprobs:
            return None
        return chat_logprobs(
            self._tokenizer, output.logprobs, self._num_top_logprobs, self._write_token_ids
        )
