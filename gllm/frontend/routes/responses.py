"""POST /v1/responses, /v1/responses/input_tokens and /v1/responses/compact (OpenAI)."""

import time
from collections import defaultdict
from typing import Any

from aiohttp import web

from gllm.engine.interface import EngineInterface, OutputDelta
from gllm.frontend.answer import JsonObject, send_answer, send_whole_answer
from gllm.frontend.chat_request import count_prompt_tokens, prepare_converted_chat
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.responses import (
    CLIENT_FIELD_NAMES,
    CompactFields,
    InputTokensFields,
    ResponsesFields,
    convert_input,
    convert_prompt_to_chat,
    convert_responses_to_chat,
    encode_summary,
)
from gllm.frontend.json_encoding import json_response
from gllm.frontend.logprobs import chat_logprobs
from gllm.frontend.output_blocks import BlockKind, BlockSplitter, OutputBlock
from gllm.frontend.request_run import PreparedRequest
from gllm.frontend.response_schemas import (
    CompactionResponse,
    InputTokensResponse,
    ItemType,
    ResponsesOutputItem,
    ResponsesResponse,
    ResponsesStatus,
    ResponsesUsage,
    TokenLogprob,
)
from gllm.frontend.sse import ServerSentEvent
from gllm.text.chat.output_parser import ChatOutputParser
from gllm.text.output.events import ContentDelta

SUMMARY_PROMPT = (
    "Summarize the conversation above, so that it can go on without it: facts, decisions, results "
    "of tool calls, and what is left to do. Answer with the summary alone."
)
"""Last message of the chat, which requests the summary."""


class CompactionWriter:
    """WholeAnswerWriter of a chat whose last message is SUMMARY_PROMPT.

    Args:
        request: The chat.
        default_id: Id of the answer.
    """

    def __init__(self, request: PreparedRequest, default_id: str) -> None:
        assert isinstance(request.fields, ChatCompletionFields), (
            "the conversation was converted to a chat"
        )
        self._parser = ChatOutputParser(request.output_format)
        conversation = request.fields.messages[:-1]
        self._users = [message["content"] for message in conversation if message["role"] == "user"]
        self._id = default_id

    def build_answer(
        self, choices: list[CollectedChoice], usage: UsageCounter
    ) -> CompactionResponse:
        """Return the compacted conversation as input items."""
        message, _ = self._parser.parse(choices[0].text, choices[0].finish_reason)
        item = {
            "id": f"cmp_{self._id}",
            "type": "compaction",
            "encrypted_content": encode_summary(message.content),
        }
        return CompactionResponse(
            id=f"resp_{self._id}",
            object="response.compaction",
            created_at=int(time.time()),
            output=[*(self._user(i, text) for i, text in enumerate(self._users)), item],
            usage=responses_usage(usage),
        )

    def _user(self, index: int, text: str) -> JsonObject:
        """Return a user message as an item."""
        return {
            "id": f"msg_{self._id}_{index}",
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": text}],
        }


async def create_response(request: web.Request) -> web.StreamResponse:
    """Generate an answer to the input, in the format of OpenAI's Responses API."""
    context = request.app[CONTEXT]
    async with prepare_converted_chat(
        request, ResponsesFields, convert_responses_to_chat, CLIENT_FIELD_NAMES
    ) as (
        fields,
        job,
    ):
        writer = ResponsesWriter(context.engine, job, fields, request[REQUEST_ID])
        return await send_answer(request, context, job, writer)


async def count_input_tokens(request: web.Request) -> web.Response:
    """Count the tokens of an input."""
    num_tokens = await count_prompt_tokens(
        request, InputTokensFields, convert_prompt_to_chat, CLIENT_FIELD_NAMES
    )
    return json_response(
        InputTokensResponse(object="response.input_tokens", input_tokens=num_tokens)
    )


async def compact_conversation(request: web.Request) -> web.StreamResponse:
    """Compact a conversation to the user's messages and a summary by the model."""
    context = request.app[CONTEXT]
    async with prepare_converted_chat(
        request, CompactFields, _summary_fields, CLIENT_FIELD_NAMES
    ) as (
        _,
        job,
    ):
        writer = CompactionWriter(job, request[REQUEST_ID])
        return await send_whole_answer(request, context, job, writer)


def _summary_fields(fields: CompactFields) -> dict[str, Any]:
    """Return the fields of the chat completion that summarizes the conversation."""
    messages = convert_input(fields.input, fields.instructions)
    return {"messages": [*messages, {"role": "user", "content": SUMMARY_PROMPT}]}


ID_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc", "custom": "ctc"}
"""Prefix of item ids, by block kind."""
ITEM_TYPES: dict[BlockKind, ItemType] = {
    "text": "message",
    "reasoning": "reasoning",
    "call": "function_call",
    "custom": "custom_tool_call",
}
"""Type of an item, by block kind."""
TEXT_TYPES = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
    "custom": "custom_tool_call_input",
}
"""The API's name of a block's text, by block kind."""
INCOMPLETE_REASONS = {"length": "max_output_tokens", "abort": "abort"}
"""Reason of an incomplete answer, by finish reason."""


class ResponsesWriter:
    """AnswerWriter of the Responses API.

    Args:
        engine: The engine, for the model's name and tokenizer.
        request: The request to answer, converted to a chat completion.
        fields: The request's own fields, which the answer repeats.
        default_id: Id of the answer if the request has no `request_id`.
    """

    def __init__(
        self,
        engine: EngineInterface,
        request: PreparedRequest,
        fields: ResponsesFields,
        default_id: str,
    ) -> None:
        self._id = fields.request_id or default_id
        self._model = engine.model.name
        self._tokenizer = engine.tokenizer
        self._created = int(time.time())
        self._params = request.params
        self._fields = fields
        self._sequence_number = 0
        self._parser = ChatOutputParser(request.output_format)
        self._splitter = BlockSplitter(self)
        self._incomplete_reason: str | None = None
        self._pending_logprobs: list[TokenLogprob] = []
        """Log-probabilities of tokens whose text has not been written yet."""
        self._logprobs: dict[int, list[TokenLogprob]] = defaultdict(list)
        """Log-probabilities of the written text, by block index."""

    def start_events(self, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the events that announce the response."""
        response = self._response("in_progress", None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def delta_events(self, delta: OutputDelta, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the events of a delta."""
        self._pending_logprobs += self._delta_logprobs(delta)
        output_events, reason = self._parser.push(delta.index, delta.text, delta.finish_reason)
        events = self._splitter.push(output_events)
        if reason is not None:
            self._incomplete_reason = INCOMPLETE_REASONS.get(reason)
            if not self._splitter.blocks:
                events += self._splitter.push([ContentDelta("")])
            events += self._splitter.finish(reason)
        return events

    def end_events(self, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the event with the whole response."""
        response = self._response(self._final_status, usage)
        return [self._event(f"response.{self._final_status}", response=response)]

    def error_events(self, error: ApiError) -> list[ServerSentEvent]:
        """Return the end of the open item and the failed response."""
        events = self._splitter.end_block("incomplete")
        response = self._response("failed", None)
        response.error = error.body()["error"]
        return [*events, self._event("response.failed", response=response)]

    def build_answer(
        self, choices: list[CollectedChoice], usage: UsageCounter
    ) -> ResponsesResponse:
        """Return the whole response."""
        (choice,) = choices
        self.delta_events(choice.to_delta(), usage)
        return self._response(self._final_status, usage)

    def start_block(self, block: OutputBlock) -> list[ServerSentEvent]:
        """Return the events that start an output item."""
        item = self._item(block)
        events = [self._event("response.output_item.added", output_index=block.index, item=item)]
        if not block.is_call:
            part = self._content_part(block)
            events.append(self._item_event(block, "response.content_part.added", part=part))
        return events

    def extend_block(self, block: OutputBlock, text: str) -> list[ServerSentEvent]:
        """Return the event of an item's increment, with its log-probabilities."""
        logprobs: JsonObject = {}
        if block.kind == "text":
            logprobs["logprobs"], self._pending_logprobs = self._pending_logprobs, []
            self._logprobs[block.index] += logprobs["logprobs"]
        event_type = f"response.{TEXT_TYPES[block.kind]}.delta"
        return [self._item_event(block, event_type, delta=text, **logprobs)]

    def end_block(self, block: OutputBlock) -> list[ServerSentEvent]:
        """Return the events that end an output item."""
        done = f"response.{TEXT_TYPES[block.kind]}.done"
        events = []
        if block.kind == "text" and self._pending_logprobs:
            events += self.extend_block(block, "")  # log-probabilities of tokens without text
        if block.kind == "call":
            events += [self._item_event(block, done, name=block.name, arguments=block.text)]
        elif block.kind == "custom":
            events += [self._item_event(block, done, input=block.text)]
        else:
            part = self._content_part(block)
            content = {name: value for name, value in part.items() if name in ("text", "logprobs")}
            events += [
                self._item_event(block, done, **content),
                self._item_event(block, "response.content_part.done", part=part),
            ]
        item = self._item(block)
        return [
            *events,
            self._event("response.output_item.done", output_index=block.index, item=item),
        ]

    @property
    def _final_status(self) -> ResponsesStatus:
        """Status of a response without an error."""
        return "incomplete" if self._incomplete_reason else "completed"

    def _delta_logprobs(self, delta: OutputDelta) -> list[TokenLogprob]:
        if self._params.logprobs is None:
            return []
        return chat_logprobs(self._tokenizer, delta.logprobs, self._params.logprobs).content

    def _event(self, event_type: str, **data: object) -> ServerSentEvent:
        """Return an event with the next sequence number."""
        data = {"type": event_type, "sequence_number": self._sequence_number, **data}
        self._sequence_number += 1
        return ServerSentEvent(data, event_type)

    def _item_event(self, block: OutputBlock, event_type: str, **data: object) -> ServerSentEvent:
        """Return an event of an output item."""
        position = {"item_id": self._item_id(block), "output_index": block.index}
        if not block.is_call:
            position["content_index"] = 0
        return self._event(event_type, **position, **data)

    def _item_id(self, block: OutputBlock) -> str:
        return f"{ID_PREFIXES[block.kind]}_{self._id}_{block.index}"

    def _item(self, block: OutputBlock) -> ResponsesOutputItem:
        """Return a block as an output item, with its content once the block has ended."""
        item = ResponsesOutputItem(self._item_id(block), block.status, ITEM_TYPES[block.kind])
        if block.is_call:
            item.call_id, item.name = block.call_id, block.name
        if block.kind == "call":
            item.arguments = block.text
        elif block.kind == "custom":
            item.input = block.text
        else:
            item.content = [] if block.status == "in_progress" else [self._content_part(block)]
        if block.kind == "reasoning":
            item.summary = []
        if block.kind == "text":
            item.role = "assistant"
        return item

    def _content_part(self, block: OutputBlock) -> JsonObject:
        """Return the content of a text or reasoning block."""
        part: JsonObject = {"type": TEXT_TYPES[block.kind], "text": block.text}
        if block.kind == "reasoning":
            return part
        return {**part, "annotations": [], "logprobs": list(self._logprobs[block.index])}

    def _response(self, status: ResponsesStatus, usage: UsageCounter | None) -> ResponsesResponse:
        """Return the response object, with token counts if `usage` is given."""
        fields, reason = self._fields, self._incomplete_reason
        return ResponsesResponse(
            id=f"resp_{self._id}",
            object="response",
            created_at=self._created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=None,
            incomplete_details=None if reason is None else {"reason": reason},
            model=self._model,
            output=[self._item(block) for block in self._splitter.blocks],
            usage=None if usage is None else responses_usage(usage),
            instructions=fields.instructions,
            max_output_tokens=fields.max_output_tokens,
            temperature=self._params.temperature,
            top_p=self._params.top_p,
            top_logprobs=fields.top_logprobs or 0,
            text={"format": (fields.text and fields.text.format) or {"type": "text"}},
            reasoning={"effort": fields.reasoning and fields.reasoning.effort, "summary": None},
            tools=fields.tools or [],
            tool_choice=fields.tool_choice or "auto",
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            truncation=fields.truncation or "disabled",
            metadata=fields.metadata or {},
            previous_response_id=None,
            background=False,
            store=False,
            service_tier="default",
        )


def responses_usage(usage: UsageCounter) -> ResponsesUsage:
    """Return the API's `usage`. Writes to the prefix cache are not counted separately."""
    return ResponsesUsage(
        input_tokens=usage.num_prompt_tokens,
        input_tokens_details={"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        output_tokens=usage.num_completion_tokens,
        output_tokens_details={"reasoning_tokens": usage.num_reasoning_tokens or 0},
        total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
    )
