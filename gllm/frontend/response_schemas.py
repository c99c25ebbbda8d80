"""Response and stream event schemas of text generation and embeddings.

The routes send these structs and /openapi.json describes them. Fields that are not always present
default to `UNSET`.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

Unset = UnsetType
"""Type of a field that is absent."""
FinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort"]
"""Reason why a choice ended. `function_call` is for clients that sent `functions`."""


class ResponseSchema(msgspec.Struct, forbid_unknown_fields=True):
    """Base class of response bodies: a JSON object with the declared fields and no others."""


ErrorType = Literal[
    "authentication_error",
    "conflict_error",
    "internal_error",
    "invalid_request_error",
    "method_not_allowed",
    "not_found_error",
    "not_implemented_error",
    "permission_error",
    "rate_limit_error",
    "request_timeout",
    "request_too_large",
    "unavailable_error",
]
"""Kind of an error, by its status code."""


class ErrorObject(ResponseSchema):
    """`error` object of a response: message, type, field that caused the error, and error code."""

    message: str
    type: ErrorType
    param: str | None
    code: str | None


class ErrorResponse(ResponseSchema, kw_only=True):
    """Response body of a failed request, and last event of a stream that fails.

    `type` is only present in responses of /v1/messages.
    """

    type: Literal["error"] | Unset = UNSET
    error: ErrorObject


class PromptTokensDetails(ResponseSchema):
    """Details of the prompt tokens: number read from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(ResponseSchema):
    """Details of the output tokens: reasoning tokens, and draft tokens of speculation."""

    reasoning_tokens: int | Unset = UNSET
    accepted_prediction_tokens: int | Unset = UNSET
    rejected_prediction_tokens: int | Unset = UNSET


class CompletionUsage(ResponseSchema):
    """`usage` of /v1/completions and /v1/chat/completions: token counts of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | Unset = UNSET


class KvTransferParams(ResponseSchema):
    """`kv_transfer_params` of a prefill engine's response, by which another engine fetches the KV.

    vLLM's routers copy it unchanged to the decode request.
    """

    do_remote_prefill: Literal[True]
    do_remote_decode: Literal[False]
    remote_engine_id: str
    remote_block_ids: list[int]
    remote_host: None
    remote_port: None


class TopLogprob(ResponseSchema):
    """One of the most likely tokens at a position, with its log-probability and UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """An output token with its log-probability, and the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseSchema):
    """Log-probabilities of the output tokens of a chat message, in order."""

    content: list[TokenLogprob]


class PromptTokenLogprob(ResponseSchema):
    """A candidate token at a prompt position: log-probability, rank among all tokens, and text."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]
"""An entry per prompt token: likely tokens by id; None for the first token."""


class FunctionCall(ResponseSchema, kw_only=True):
    """Function name and arguments (text of a JSON object) of a tool call; streamed in parts."""

    name: str | Unset = UNSET
    arguments: str


class CustomToolInput(ResponseSchema, kw_only=True):
    """Name and input (free text) of a custom tool's call; streamed in parts."""

    name: str | Unset = UNSET
    input: str


class ChatToolCall(ResponseSchema):
    """A tool call in an assistant message, or a part of one in a stream."""

    index: int | Unset = UNSET
    id: str | Unset = UNSET
    type: Literal["function", "custom"] | Unset = UNSET
    function: FunctionCall | Unset = UNSET
    custom: CustomToolInput | Unset = UNSET


class ChatMessage(ResponseSchema):
    """Assistant message; `content` is null if there are only reasoning or tool calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | Unset = UNSET
    reasoning_content: str | Unset = UNSET
    tool_calls: list[ChatToolCall] | Unset = UNSET
    function_call: FunctionCall | Unset = UNSET


class ChatChoice(ResponseSchema):
    """One choice of a /v1/chat/completions response."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | Unset = UNSET


class CompletionEnvelope(ResponseSchema):
    """Fields common to responses and stream chunks of completions and chat completions."""

    id: str
    created: int
    model: str


class ChatCompletionResponse(CompletionEnvelope):
    """Response of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: PromptLogprobs | Unset = UNSET
    kv_transfer_params: KvTransferParams | Unset | None = UNSET


class ChatMessageDelta(ResponseSchema):
    """Part of an assistant message in a stream chunk."""

    role: Literal["assistant"] | Unset = UNSET
    content: str | Unset = UNSET
    reasoning: str | Unset = UNSET
    reasoning_content: str | Unset = UNSET
    tool_calls: list[ChatToolCall] | Unset = UNSET
    function_call: FunctionCall | Unset = UNSET


class ChatChunkChoice(ResponseSchema):
    """One choice in a stream chunk of /v1/chat/completions."""

    index: int
    delta: ChatMessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | Unset | None = UNSET
    token_ids: list[int] | Unset = UNSET


class ChatCompletionChunk(CompletionEnvelope):
    """Stream chunk of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    kv_transfer_params: KvTransferParams | Unset | None = UNSET
    usage: CompletionUsage | Unset = UNSET


class GeneratedTokens(ResponseSchema):
    """One choice of /inference/v1/generate: output token ids, those of one delta in a stream."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int]


class GenerateResponse(ResponseSchema):
    """Response of /inference/v1/generate: output token ids."""

    request_id: str
    choices: list[GeneratedTokens]
    prompt_logprobs: PromptLogprobs | None
    kv_transfer_params: KvTransferParams | None
    usage: CompletionUsage


class GenerateEvent(ResponseSchema):
    """Stream chunk of /inference/v1/generate."""

    request_id: str
    choices: list[GeneratedTokens]
    kv_transfer_params: KvTransferParams | Unset | None = UNSET
    usage: CompletionUsage | Unset = UNSET


class RenderedRequest(ResponseSchema):
    """Response of the render endpoints: tokenized prompt and sampling parameters of a request.

    It is a request body of /inference/v1/generate.
    """

    request_id: str
    token_ids: list[int]
    features: None
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, bool | None] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None


class CompletionLogprobsObject(ResponseSchema):
    """`logprobs` of /v1/completions: parallel lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseSchema):
    """One choice of /v1/completions; in a stream, the part that a chunk adds."""

    index: int
    text: str
    logprobs: CompletionLogprobsObject | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | Unset = UNSET
    token_ids: list[int] | Unset = UNSET


class CompletionResponse(CompletionEnvelope):
    """Response of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: CompletionUsage
    kv_transfer_params: KvTransferParams | Unset | None = UNSET


class CompletionChunk(CompletionEnvelope):
    """Stream chunk of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    kv_transfer_params: KvTransferParams | Unset | None = UNSET
    usage: CompletionUsage | Unset = UNSET


ItemType = Literal["message", "reasoning", "function_call", "custom_tool_call"]
"""Type of an output item of /v1/responses."""
ItemStatus = Literal["in_progress", "completed", "incomplete"]
"""Status of an output item of /v1/responses."""
ResponsesStatus = Literal["in_progress", "completed", "incomplete", "failed"]
"""Status of a response of /v1/responses."""


class ResponsesContentPart(ResponseSchema):
    """Text part of an input or output item of /v1/responses."""

    type: Literal["output_text", "reasoning_text", "input_text"]
    text: str
    annotations: list[Any] | Unset = UNSET
    logprobs: list[TokenLogprob] | Unset = UNSET


class ResponsesOutputItem(ResponseSchema):
    """Output item of /v1/responses: a message, reasoning or a tool call."""

    id: str
    status: ItemStatus
    type: ItemType
    role: Literal["assistant"] | Unset = UNSET
    call_id: str | Unset = UNSET
    namespace: str | Unset = UNSET
    name: str | Unset = UNSET
    arguments: str | Unset = UNSET
    input: str | Unset = UNSET
    summary: list[Any] | Unset = UNSET
    content: list[ResponsesContentPart] | Unset = UNSET


class InputTokensDetails(ResponseSchema):
    """Details of the input tokens: numbers read from and written to the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class ResponsesUsage(ResponseSchema):
    """`usage` of /v1/responses: token counts of the request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class IncompleteDetails(ResponseSchema):
    """Reason why a response of /v1/responses is incomplete, such as `max_output_tokens`."""

    reason: str


class ResponsesText(ResponseSchema):
    """`text` of the request, repeated in the response: format of the output text."""

    format: dict[str, Any]


class ResponsesReasoning(ResponseSchema):
    """`reasoning` of the request, repeated in the response: reasoning effort."""

    effort: str | None
    summary: None


class ResponsesResponse(ResponseSchema):
    """Response of /v1/responses: status, output items, token counts and request parameters."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponsesStatus
    error: ErrorObject | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[ResponsesOutputItem]
    usage: ResponsesUsage | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: ResponsesText
    reasoning: ResponsesReasoning
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    truncation: str
    metadata: dict[str, str]
    previous_response_id: str | None
    background: bool
    store: bool
    service_tier: str


class ResponseDeletion(ResponseSchema):
    """Answer to DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItemList(ResponseSchema):
    """Answer to GET /v1/responses/{id}/input_items: all of them at once."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


ResponsesStateType = Literal[
    "response.created",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
]
TextDeltaType = Literal[
    "response.output_text.delta",
    "response.reasoning_text.delta",
    "response.function_call_arguments.delta",
    "response.custom_tool_call_input.delta",
]
TextDoneType = Literal[
    "response.output_text.done",
    "response.reasoning_text.done",
    "response.function_call_arguments.done",
    "response.custom_tool_call_input.done",
]
ItemEventType = Literal["response.output_item.added", "response.output_item.done"]
PartEventType = Literal["response.content_part.added", "response.content_part.done"]


class ResponsesStateEvent(ResponseSchema):
    """Stream event of /v1/responses: the status of the response changed."""

    type: ResponsesStateType
    sequence_number: int
    response: ResponsesResponse


class ResponsesItemEvent(ResponseSchema):
    """Stream event of /v1/responses: an output item starts or ends."""

    type: ItemEventType
    sequence_number: int
    output_index: int
    item: ResponsesOutputItem


class ResponsesPartEvent(ResponseSchema):
    """Stream event of /v1/responses: the text of a message or of reasoning starts or ends."""

    type: PartEventType
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: ResponsesContentPart


class ResponsesTextDeltaEvent(ResponseSchema, kw_only=True):
    """Stream event of /v1/responses: more text of an item, or more of a tool call's arguments."""

    type: TextDeltaType
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int | Unset = UNSET
    delta: str
    logprobs: list[TokenLogprob] | Unset = UNSET


class ResponsesTextDoneEvent(ResponseSchema):
    """Stream event of /v1/responses: the complete text of an item, or arguments of a tool call."""

    type: TextDoneType
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int | Unset = UNSET
    text: str | Unset = UNSET
    logprobs: list[TokenLogprob] | Unset = UNSET
    name: str | Unset = UNSET
    arguments: str | Unset = UNSET
    input: str | Unset = UNSET


ResponsesEvent = (
    ResponsesStateEvent
    | ResponsesItemEvent
    | ResponsesPartEvent
    | ResponsesTextDeltaEvent
    | ResponsesTextDoneEvent
)
"""Event of a streamed response."""


class MessagesContentBlock(ResponseSchema):
    """Content block of a /v1/messages response: text, thinking or tool use."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | Unset = UNSET
    thinking: str | Unset = UNSET
    signature: str | Unset = UNSET
    id: str | Unset = UNSET
    name: str | Unset = UNSET
    input: dict[str, Any] | Unset = UNSET


class ThinkingTokensDetails(ResponseSchema):
    """Details of the output tokens: number of thinking tokens."""

    thinking_tokens: int


class MessagesUsage(ResponseSchema):
    """`usage` of /v1/messages: token counts of the request; input excludes cached tokens."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokensDetails | Unset = UNSET


class MessagesResponse(ResponseSchema):
    """Response of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessagesContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesEvent(ResponseSchema, tag_field="type"):
    """Base class of the stream events of /v1/messages."""


class MessageStartEvent(MessagesEvent, tag="message_start"):
    """Stream event of /v1/messages: start of the message, with empty content."""

    message: MessagesResponse


class MessagePingEvent(MessagesEvent, tag="ping"):
    """Stream event of /v1/messages without data, sent after the start of the message."""


class ContentBlockStartEvent(MessagesEvent, tag="content_block_start"):
    """Stream event of /v1/messages: a content block starts."""

    index: int
    content_block: MessagesContentBlock


class ContentBlockDelta(ResponseSchema):
    """Text added to a content block; `partial_json` is part of a tool call's input."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"]
    text: str | Unset = UNSET
    thinking: str | Unset = UNSET
    partial_json: str | Unset = UNSET


class ContentBlockDeltaEvent(MessagesEvent, tag="content_block_delta"):
    """Stream event of /v1/messages: text is added to a content block."""

    index: int
    delta: ContentBlockDelta


class ContentBlockStopEvent(MessagesEvent, tag="content_block_stop"):
    """Stream event of /v1/messages: a content block ends."""

    index: int


class MessageStop(ResponseSchema):
    """Stop reason of a message, and the stop sequence that was generated, if any."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDeltaEvent(MessagesEvent, tag="message_delta"):
    """Stream event of /v1/messages after the content: stop reason and token counts."""

    delta: MessageStop
    usage: MessagesUsage


class MessageStopEvent(MessagesEvent, tag="message_stop"):
    """Last stream event of /v1/messages."""


MESSAGES_EVENTS = (
    MessageStartEvent,
    MessagePingEvent,
    ContentBlockStartEvent,
    ContentBlockDeltaEvent,
    ContentBlockStopEvent,
    MessageDeltaEvent,
    MessageStopEvent,
)
"""Events of a streamed message."""


class CountTokensResponse(ResponseSchema):
    """Response of /v1/messages/count_tokens: number of prompt tokens."""

    input_tokens: int


class InputTokensResponse(ResponseSchema):
    """Response of /v1/responses/input_tokens: number of prompt tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactionItem(ResponseSchema):
    """Item of a compacted conversation: a user's message, or the summary by the model.

    Clients send these items as input of later requests, in place of the conversation.
    """

    id: str
    type: Literal["message", "compaction"]
    role: Literal["user"] | Unset = UNSET
    status: Literal["completed"] | Unset = UNSET
    content: list[ResponsesContentPart] | Unset = UNSET
    encrypted_content: str | Unset = UNSET


class CompactionResponse(ResponseSchema):
    """Response of /v1/responses/compact: input items that replace a conversation."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[CompactionItem]
    usage: ResponsesUsage


class EmbeddingData(ResponseSchema):
    """One embedding of /v1/embeddings: a list of numbers, or Base64 of float32 numbers."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseSchema):
    """`usage` of /v1/embeddings: number of prompt tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(ResponseSchema):
    """Response of /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage
