"""Declare the shapes of answers: what /openapi.json says of each endpoint's 200.

The routes write plain JSON; tests validate every answer of theirs against these types. A field that
is not always present is `Unset`.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

Unset = UnsetType
FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class ResponseSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object with these fields and no others."""


class PromptTokensDetails(ResponseSchema):
    """Tokens read from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(ResponseSchema):
    """Tokens of reasoning."""

    reasoning_tokens: int


class Usage(ResponseSchema):
    """Token counts of chat completions and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | Unset = UNSET


class TopLogprob(ResponseSchema):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(ResponseSchema):
    """A token of a message, its log-probability, and the likeliest tokens at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseSchema):
    """Log-probabilities of a message."""

    content: list[TokenLogprob]


class PromptTokenLogprob(ResponseSchema):
    """A token at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


class FunctionCall(ResponseSchema):
    """A function and its arguments, as JSON text; a stream sends the arguments in parts."""

    arguments: str
    name: str | Unset = UNSET


class ToolCall(ResponseSchema):
    """A call of a tool."""

    function: FunctionCall
    id: str | Unset = UNSET
    type: Literal["function"] | Unset = UNSET
    index: int | Unset = UNSET


class ChatMessage(ResponseSchema):
    """The assistant's message; its content is null beside reasoning or calls alone."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | Unset = UNSET
    reasoning_content: str | Unset = UNSET
    tool_calls: list[ToolCall] | Unset = UNSET


class ChatChoice(ResponseSchema):
    """One answer of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | Unset = UNSET


class ChatCompletionResponse(ResponseSchema):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | Unset = UNSET


class ChatMessageDelta(ResponseSchema):
    """An increment of the assistant's message."""

    role: Literal["assistant"] | Unset = UNSET
    content: str | Unset = UNSET
    reasoning: str | Unset = UNSET
    reasoning_content: str | Unset = UNSET
    tool_calls: list[ToolCall] | Unset = UNSET


class ChatChunkChoice(ResponseSchema):
    """An increment of one answer."""

    index: int
    delta: ChatMessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | Unset | None = UNSET
    token_ids: list[int] | Unset = UNSET


class ChatCompletionChunk(ResponseSchema):
    """An event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | Unset = UNSET


class CompletionLogprobsObject(ResponseSchema):
    """Log-probabilities of a text: a list each, with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseSchema):
    """One text, or its increment."""

    index: int
    text: str
    logprobs: CompletionLogprobsObject | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | Unset = UNSET
    prompt_logprobs: PromptLogprobs | Unset = UNSET


class CompletionResponse(ResponseSchema):
    """The answer of /v1/completions, and an event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | Unset = UNSET


class ResponsesOutputItem(ResponseSchema):
    """An item of a response: a message, reasoning, or a function call."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: str
    role: Literal["assistant"] | Unset = UNSET
    content: list[dict[str, Any]] | Unset = UNSET
    summary: list[Any] | Unset = UNSET
    call_id: str | Unset = UNSET
    name: str | Unset = UNSET
    arguments: str | Unset = UNSET


class ResponsesUsage(ResponseSchema):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesResponse(ResponseSchema):
    """The answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[ResponsesOutputItem]
    usage: ResponsesUsage | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: dict[str, Any]
    reasoning: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    truncation: str
    metadata: dict[str, str]
    previous_response_id: None
    background: bool
    store: bool
    service_tier: str


class ResponsesEvent(msgspec.Struct):
    """An event of a streamed response; the other fields depend on its type."""

    type: str
    sequence_number: int


class MessagesContentBlock(ResponseSchema):
    """A block of a message: text, thinking, or the use of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | Unset = UNSET
    thinking: str | Unset = UNSET
    signature: str | Unset = UNSET
    id: str | Unset = UNSET
    name: str | Unset = UNSET
    input: dict[str, Any] | Unset = UNSET


class MessagesUsage(ResponseSchema):
    """Token counts of a message."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int] | Unset = UNSET


class MessagesResponse(ResponseSchema):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessagesContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesEvent(msgspec.Struct):
    """An event of a streamed message; the other fields depend on its type."""

    type: str


class CountTokensResponse(ResponseSchema):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class InputTokensResponse(ResponseSchema):
    """The answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactionResponse(ResponseSchema):
    """The answer of /v1/responses/compact: input items that stand for a conversation."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponsesUsage


class EmbeddingData(ResponseSchema):
    """A vector: numbers, or their float32 bytes as base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseSchema):
    """Token counts of texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(ResponseSchema):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage
