"""POST /v1/responses, /v1/responses/input_tokens and /v1/responses/compact (OpenAI)."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from gllm.engine.interface import EngineInterface, OutputDelta
from gllm.frontend import response_schemas as schemas
from gllm.frontend.answer import send_answer, send_whole_answer
from gllm.frontend.answer_writer import AnswerWriter, WholeAnswerWriter
from gllm.frontend.chat_request import count_prompt_tokens, prepare_converted_chat
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.context import CLIENT_ID, CONTEXT, REQUEST_ID
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.base import JsonObject, Warn
from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.responses import (
    CLIENT_FIELD_NAMES,
    NOT_STORED,
    CompactFields,
    InputTokensFields,
    ResponsesFields,
    convert_input,
    convert_prompt_to_chat,
    convert_responses_to_chat,
    encode_summary,
    namespaced_names,
    resolve_references,
    to_items,
)
from gllm.frontend.json_encoding import json_response
from gllm.frontend.logprobs import chat_logprobs
from gllm.frontend.output_blocks import BlockKind, BlockSplitter, OutputBlock
from gllm.frontend.request_run import PreparedRequest
from gllm.frontend.response_store import NotStoredError, StoredResponse
from gllm.frontend.sse import ServerSentEvent
from gllm.text.chat.output_parser import ChatOutputParser
from gllm.text.output.events import ContentDelta

Fields = TypeVar("Fields", bound=ResponsesFields | InputTokensFields | CompactFields)
Result = TypeVar("Result")
SUMMARY_PROMPT = (
    "Summarize the conversation above, so that it can go on without it: facts, decisions, results "
    "of tool calls, and what is left to do. Answer with the summary alone."
)
"""Last message of the chat, which requests the summary."""


class StoredConversation:
    """The stored conversation that a request continues, and the one that its response ends.

    Args:
        request: The HTTP request.
    """

    def __init__(self, request: web.Request) -> None:
        self._store = request.app[CONTEXT].responses
        self._owner = request.get(CLIENT_ID) or ""
        self._new_items: list[JsonObject] = []
        """Items of the request's input, after `converter` has resolved them."""

    def converter(
        self, convert: Callable[[Fields, Warn, Sequence[JsonObject]], JsonObject]
    ) -> Callable[[Fields, Warn], JsonObject]:
        """Return a conversion to a chat that includes the stored items.

        It raises FieldError or ApiError if an item or the previous response is not stored.
        """

        def convert_with_history(fields: Fields, warn: Warn) -> JsonObject:
            self._new_items = resolve_references(to_items(fields.input or []), self._get_items)
            history: list[JsonObject] = []
            if fields.previous_response_id is not None:
                history = self._get_history(fields.previous_response_id)
            resolved = msgspec.structs.replace(fields, input=self._new_items)
            return convert(resolved, warn, history)

        return convert_with_history

    def is_stored(self, fields: ResponsesFields) -> bool:
        """Return True if the response of a request is stored."""
        return fields.store is not False and self._store.is_enabled

    def save(self, response: schemas.ResponsesResponse) -> None:
        """Store a response with the conversation that it ends, if its request asks for it.

        One that is too large, or whose previous response is gone by now, gets `store` false.
        """
        if not response.store:
            return
        stored = StoredResponse(msgspec.json.encode(response), msgspec.json.encode(self._new_items))
        named = [item["id"] for item in self._new_items if isinstance(item.get("id"), str)]
        named += [item.id for item in response.output]
        previous = response.previous_response_id
        response.store = self._store.add(
            self._owner, response.id, stored, named, previous, time.monotonic()
        )

    def _get_history(self, response_id: str) -> list[JsonObject]:
        """Return the items up to a stored response. Raises ApiError."""
        try:
            return self._store.get_conversation(self._owner, response_id, time.monotonic())
        except NotStoredError:
            message = f"previous_response_id: {response_id!r:.200} {NOT_STORED}"
            code = "previous_response_not_found"
            raise ApiError(400, message, param="previous_response_id", code=code) from None

    def _get_items(self, item_ids: Collection[str]) -> Mapping[str, JsonObject]:
        """Return those items of several ids that are stored, by id."""
        return self._store.get_items(self._owner, item_ids, time.monotonic())


def _use_stored(request: web.Request, method: Callable[[str, str, float], Result]) -> Result:
    """Call a method of the store for the response that a path names. Raises ApiError."""
    response_id = request.match_info["response_id"]
    try:
        return method(request.get(CLIENT_ID) or "", response_id, time.monotonic())
    except NotStoredError:
        message = f"{response_id!r:.200} {NOT_STORED}"
        raise ApiError(404, message, code="response_not_found") from None


async def get_response(request: web.Request) -> web.Response:
    """Return a stored response, as it was sent."""
    stored = _use_stored(request, request.app[CONTEXT].responses.get)
    return web.Response(body=stored.response, content_type="application/json")


async def list_input_items(request: web.Request) -> web.Response:
    """Return the input items of the request of a stored response, without those before it."""
    stored = _use_stored(request, request.app[CONTEXT].responses.get)
    items = msgspec.json.decode(stored.input_items)
    ids = [item.get("id") for item in items]
    return json_response(
        schemas.InputItemList("list", items, False, *((ids[0], ids[-1]) if ids else (None, None)))
    )


async def delete_response(request: web.Request) -> web.Response:
    """Remove a stored response; responses that continue it stay."""
    _use_stored(request, request.app[CONTEXT].responses.remove)
    response_id = request.match_info["response_id"]
    return json_response(schemas.ResponseDeletion(response_id, "response", True))


class CompactionWriter(WholeAnswerWriter):
    """Formats the response of /v1/responses/compact: the user's messages and a summary.

    The model generates the summary, because the chat ends with SUMMARY_PROMPT.

    Args:
        request: The prepared chat, with the conversation.
        default_id: Id of the response.
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
    ) -> schemas.CompactionResponse:
        """Return the user's messages and the encoded summary as input items."""
        message, _ = self._parser.parse(choices[0].text, choices[0].finish_reason)
        summary = encode_summary(message.content)
        item = schemas.CompactionItem(f"cmp_{self._id}", "compaction", encrypted_content=summary)
        return schemas.CompactionResponse(
            id=f"resp_{self._id}",
            object="response.compaction",
            created_at=int(time.time()),
            output=[*(self._user(i, text) for i, text in enumerate(self._users)), item],
            usage=responses_usage(usage),
        )

    def _user(self, index: int, text: str) -> schemas.CompactionItem:
        """Return a user message as an item."""
        content = [schemas.ResponsesContentPart("input_text", text)]
        return schemas.CompactionItem(
            f"msg_{self._id}_{index}", "message", "user", "completed", content
        )


async def create_response(request: web.Request) -> web.StreamResponse:
    """Generate output for the input items, in the format of OpenAI's Responses API."""
    context = request.app[CONTEXT]
    conversation = StoredConversation(request)
    async with prepare_converted_chat(
        request,
        ResponsesFields,
        conversation.converter(convert_responses_to_chat),
        CLIENT_FIELD_NAMES,
    ) as (fields, prepared):
        writer = ResponsesWriter(
            context.engine, prepared, fields, request[REQUEST_ID], conversation
        )
        return await send_answer(request, prepared, writer)


async def count_input_tokens(request: web.Request) -> web.Response:
    """Return the number of prompt tokens of a Responses API request, without running it."""
    as_chat = StoredConversation(request).converter(convert_prompt_to_chat)
    num_tokens = await count_prompt_tokens(request, InputTokensFields, as_chat, CLIENT_FIELD_NAMES)
    return json_response(
        schemas.InputTokensResponse(object="response.input_tokens", input_tokens=num_tokens)
    )


async def compact_conversation(request: web.Request) -> web.StreamResponse:
    """Replace a conversation by its user messages and a summary that the model generates."""
    async with prepare_converted_chat(
        request,
        CompactFields,
        StoredConversation(request).converter(_summary_fields),
        CLIENT_FIELD_NAMES,
    ) as (_, prepared):
        writer = CompactionWriter(prepared, request[REQUEST_ID])
        return await send_whole_answer(request, prepared, writer)


def _summary_fields(
    fields: CompactFields, warn: Warn, history: Sequence[JsonObject]
) -> dict[str, Any]:
    """Return the fields of the chat completion that summarizes the conversation."""
    messages = convert_input(fields.input, fields.instructions, warn, history)
    return {"messages": [*messages, {"role": "user", "content": SUMMARY_PROMPT}]}


class BlockNames(NamedTuple):
    """Names in the Responses API for one kind of output: text, reasoning or tool call."""

    id_prefix: str
    item_type: schemas.ItemType
    delta_type: schemas.TextDeltaType
    """Type of the event with new text."""
    done_type: schemas.TextDoneType
    """Type of the event with the complete text."""


BLOCK_NAMES: dict[BlockKind, BlockNames] = {
    "text": BlockNames(
        "msg", "message", "response.output_text.delta", "response.output_text.done"
    ),
    "reasoning": BlockNames(
        "rs", "reasoning", "response.reasoning_text.delta", "response.reasoning_text.done"
    ),
    "call": BlockNames(
        "fc", "function_call", "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    ),
    "custom": BlockNames(
        "ctc", "custom_tool_call", "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ),
}  # fmt: skip
INCOMPLETE_REASONS = {"length": "max_output_tokens", "abort": "abort"}
"""Reason of an incomplete answer, by finish reason."""


class ResponsesWriter(AnswerWriter):
    """Formats responses and stream events of OpenAI's Responses API (/v1/responses).

    Args:
        engine: The engine, for the model's name and tokenizer.
        request: The prepared request, converted to a chat completion.
        fields: The parsed request body, whose parameters the response repeats.
        default_id: Id of the response if the request has no `request_id`.
        conversation: Stores the response.
    """

    def __init__(
        self,
        engine: EngineInterface,
        request: PreparedRequest,
        fields: ResponsesFields,
        default_id: str,
        conversation: StoredConversation,
    ) -> None:
        self._conversation = conversation
        self._id = fields.request_id or default_id
        self._model = engine.model.name
        self._tokenizer = engine.tokenizer
        self._created = int(time.time())
        self._params = request.params
        self._fields = fields
        self._namespaced = namespaced_names(fields.tools or [])
        """Namespace and name of tools in namespaces, by the name that the model sees."""
        self._sequence_number = 0
        self._parser = ChatOutputParser(request.output_format)
        self._splitter = BlockSplitter(self)
        self._incomplete_reason: str | None = None
        self._pending_logprobs: list[schemas.TokenLogprob] = []
        """Log-probabilities of tokens whose text has not been written yet."""
        self._logprobs: dict[int, list[schemas.TokenLogprob]] = defaultdict(list)
        """Log-probabilities of the written text, by block index."""

    def start_events(self, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the events `response.created` and `response.in_progress`."""
        response = self._response("in_progress", None)
        types: tuple[schemas.ResponsesStateType, ...] = ("response.created", "response.in_progress")
        return [self._state_event(event_type, response) for event_type in types]

    def delta_events(self, delta: OutputDelta, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the events for one output delta."""
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
        """Return the last events of the stream, with the complete response."""
        response = self._finished_response(usage)
        if self._incomplete_reason:
            return [self._state_event("response.incomplete", response)]
        return [self._state_event("response.completed", response)]

    def error_events(self, error: ApiError) -> list[ServerSentEvent]:
        """Return the events that end the open output item and report the failed response."""
        events = self._splitter.end_block("incomplete")
        response = self._response("failed", None)
        response.error = error.body().error
        return [*events, self._state_event("response.failed", response)]

    def build_answer(
        self, choices: list[CollectedChoice], usage: UsageCounter
    ) -> schemas.ResponsesResponse:
        """Return the complete Responses API response."""
        (choice,) = choices
        self.delta_events(choice.to_delta(), usage)
        return self._finished_response(usage)

    def start_block(self, block: OutputBlock) -> list[ServerSentEvent]:
        """Return the events that start an output item."""
        events = [self._item_event("response.output_item.added", block)]
        if not block.is_call:
            events.append(self._part_event("response.content_part.added", block))
        return events

    def extend_block(self, block: OutputBlock, text: str) -> list[ServerSentEvent]:
        """Return the event with new text of an item, and its log-probabilities."""
        logprobs: list[schemas.TokenLogprob] | schemas.Unset = UNSET
        if block.kind == "text":
            logprobs, self._pending_logprobs = self._pending_logprobs, []
            self._logprobs[block.index] += logprobs
        return [
            self._event(
                schemas.ResponsesTextDeltaEvent(
                    type=BLOCK_NAMES[block.kind].delta_type,
                    sequence_number=self._sequence_number,
                    item_id=self._item_id(block),
                    output_index=block.index,
                    content_index=UNSET if block.is_call else 0,
                    delta=text,
                    logprobs=logprobs,
                )
            )
        ]

    def end_block(self, block: OutputBlock) -> list[ServerSentEvent]:
        """Return the events that end an output item."""
        events = []
        if block.kind == "text" and self._pending_logprobs:
            events += self.extend_block(block, "")  # log-probabilities of tokens without text
        done = schemas.ResponsesTextDoneEvent(
            BLOCK_NAMES[block.kind].done_type,
            self._sequence_number,
            self._item_id(block),
            block.index,
        )
        events.append(self._event(done))
        if block.kind == "call":
            _, done.name = self._tool_name(block)
            done.arguments = block.text
        elif block.kind == "custom":
            done.input = block.text
        else:
            part = self._content_part(block)
            done.content_index, done.text, done.logprobs = 0, part.text, part.logprobs
            events.append(self._part_event("response.content_part.done", block))
        return [*events, self._item_event("response.output_item.done", block)]

    def _finished_response(self, usage: UsageCounter) -> schemas.ResponsesResponse:
        """Return the response without an error, and store it."""
        status: schemas.ResponsesStatus = "incomplete" if self._incomplete_reason else "completed"
        response = self._response(status, usage)
        self._conversation.save(response)
        return response

    def _delta_logprobs(self, delta: OutputDelta) -> list[schemas.TokenLogprob]:
        if self._params.logprobs is None:
            return []
        return chat_logprobs(self._tokenizer, delta.logprobs, self._params.logprobs).content

    def _event(self, event: schemas.ResponsesEvent) -> ServerSentEvent:
        """Return an event, which has the present sequence number, and increment the number."""
        self._sequence_number += 1
        return ServerSentEvent(event, event.type)

    def _state_event(
        self, event_type: schemas.ResponsesStateType, response: schemas.ResponsesResponse
    ) -> ServerSentEvent:
        return self._event(schemas.ResponsesStateEvent(event_type, self._sequence_number, response))

    def _item_event(self, event_type: schemas.ItemEventType, block: OutputBlock) -> ServerSentEvent:
        number, item = self._sequence_number, self._item(block)
        return self._event(schemas.ResponsesItemEvent(event_type, number, block.index, item))

    def _part_event(self, event_type: schemas.PartEventType, block: OutputBlock) -> ServerSentEvent:
        number, part = self._sequence_number, self._content_part(block)
        event = schemas.ResponsesPartEvent(
            event_type, number, self._item_id(block), block.index, 0, part
        )
        return self._event(event)

    def _item_id(self, block: OutputBlock) -> str:
        return f"{BLOCK_NAMES[block.kind].id_prefix}_{self._id}_{block.index}"

    def _tool_name(self, block: OutputBlock) -> tuple[str | schemas.Unset, str]:
        """Return the namespace and the name of a called tool, as the client knows it."""
        return self._namespaced.get(block.name, (UNSET, block.name))

    def _item(self, block: OutputBlock) -> schemas.ResponsesOutputItem:
        """Return a block as an output item, with its content once the block has ended."""
        item = schemas.ResponsesOutputItem(
            self._item_id(block), block.status, BLOCK_NAMES[block.kind].item_type
        )
        if block.is_call:
            item.call_id = block.call_id
            item.namespace, item.name = self._tool_name(block)
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

    def _content_part(self, block: OutputBlock) -> schemas.ResponsesContentPart:
        """Return the content of a text or reasoning block."""
        if block.kind == "reasoning":
            return schemas.ResponsesContentPart("reasoning_text", block.text)
        logprobs = list(self._logprobs[block.index])
        return schemas.ResponsesContentPart("output_text", block.text, [], logprobs)

    def _response(
        self, status: schemas.ResponsesStatus, usage: UsageCounter | None
    ) -> schemas.ResponsesResponse:
        """Return the response object, with token counts if `usage` is given."""
        fields, reason = self._fields, self._incomplete_reason
        effort = None if fields.reasoning is None else fields.reasoning.effort
        return schemas.ResponsesResponse(
            id=f"resp_{self._id}",
            object="response",
            created_at=self._created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=None,
            incomplete_details=None if reason is None else schemas.IncompleteDetails(reason),
            model=self._model,
            output=[self._item(block) for block in self._splitter.blocks],
            usage=None if usage is None else responses_usage(usage),
            instructions=fields.instructions,
            max_output_tokens=fields.max_output_tokens,
            temperature=self._params.temperature,
            top_p=self._params.top_p,
            top_logprobs=fields.top_logprobs or 0,
            text=schemas.ResponsesText((fields.text and fields.text.format) or {"type": "text"}),
            reasoning=schemas.ResponsesReasoning(effort, None),
            tools=fields.tools or [],
            tool_choice=fields.tool_choice or "auto",
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            truncation=fields.truncation or "disabled",
            metadata=fields.metadata or {},
            previous_response_id=fields.previous_response_id,
            background=False,
            store=self._conversation.is_stored(fields),
            service_tier="default",
        )


def responses_usage(usage: UsageCounter) -> schemas.ResponsesUsage:
    """Convert a request's token counts to `usage` of the Responses API.

    Writes to the prefix cache are not counted separately.
    """
    return schemas.ResponsesUsage(
        input_tokens=usage.num_prompt_tokens,
        input_tokens_details=schemas.InputTokensDetails(
            usage.num_cached_tokens, cache_write_tokens=0
        ),
        output_tokens=usage.num_completion_tokens,
        output_tokens_details=schemas.CompletionTokensDetails(usage.num_reasoning_tokens or 0),
        total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
    )
