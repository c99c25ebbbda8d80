"""The table of all HTTP endpoints.

`register_endpoints` adds their routes to the application. The OpenAPI document and docs/api.md are
generated from the table.
"""

from gllm.frontend import answer_schemas as answers
from gllm.frontend import control_schemas as control_answers
from gllm.frontend.endpoint import Endpoint, PathParameter
from gllm.frontend.fields.chat import ChatFields
from gllm.frontend.fields.completions import CompletionFields
from gllm.frontend.fields.control import AbortFields
from gllm.frontend.fields.embeddings import EmbeddingFields
from gllm.frontend.fields.messages import CountFields, MessageFields
from gllm.frontend.fields.responses import CompactFields, InputTokensFields, ResponseFields
from gllm.frontend.fields.tokens import DetokenizeFields, TokenizeFields
from gllm.frontend.routes import (
    chat,
    completions,
    control,
    embeddings,
    health,
    messages,
    metrics,
    models,
    openapi,
    page,
    responses,
    server_info,
    tokens,
    unsupported,
    version,
)

GENERATION_ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat.create,
        request_schema=ChatFields,
        response_schema=answers.ChatCompletion,
        event_schema=answers.ChatCompletionChunk,
        operation="chat",
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        completions.create,
        request_schema=CompletionFields,
        response_schema=answers.TextCompletion,
        event_schema=answers.TextCompletion,
        operation="text_completion",
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        responses.create,
        request_schema=ResponseFields,
        response_schema=answers.ResponseObject,
        event_schema=answers.ResponseEvent,
        operation="chat",
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        responses.count,
        request_schema=InputTokensFields,
        response_schema=answers.InputTokenCount,
    ),
    Endpoint(
        "POST",
        "/v1/responses/compact",
        responses.compact,
        request_schema=CompactFields,
        response_schema=answers.Compaction,
    ),
    Endpoint(
        "POST",
        "/v1/messages",
        messages.create,
        request_schema=MessageFields,
        response_schema=answers.MessageAnswer,
        event_schema=answers.MessageEvent,
        operation="chat",
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        messages.count,
        request_schema=CountFields,
        response_schema=answers.TokenCount,
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        embeddings.create,
        request_schema=EmbeddingFields,
        response_schema=answers.EmbeddingList,
    ),
)

MODEL_ENDPOINTS = (
    Endpoint("GET", "/v1/models", models.listing, response_schema=control_answers.ModelList),
    Endpoint(
        "GET",
        "/v1/models/{model}",
        models.one,
        response_schema=control_answers.ModelCard,
        path_parameters=(PathParameter("model", "name of a model"),),
    ),
    Endpoint(
        "POST",
        "/tokenize",
        tokens.tokenize,
        request_schema=TokenizeFields,
        response_schema=control_answers.TokenizeAnswer,
    ),
    Endpoint(
        "POST",
        "/detokenize",
        tokens.detokenize,
        request_schema=DetokenizeFields,
        response_schema=control_answers.DetokenizeAnswer,
    ),
    Endpoint("GET", "/tokenizer_info", tokens.info, response_schema=control_answers.TokenizerInfo),
)

SERVER_ENDPOINTS = (
    Endpoint(
        "GET",
        "/health",
        health.health,
        response_schema=control_answers.Status,
        is_public=True,
        is_polled=True,
    ),
    Endpoint(
        "GET",
        "/ready",
        health.ready,
        response_schema=control_answers.Status,
        is_public=True,
        is_polled=True,
    ),
    Endpoint(
        "GET",
        "/metrics",
        metrics.metrics,
        content_type="text/plain",
        is_public=True,
        is_polled=True,
    ),
    Endpoint("GET", "/version", version.version, response_schema=control_answers.VersionAnswer),
    Endpoint("GET", "/openapi.json", openapi.document),
    Endpoint(
        "GET", "/server_info", server_info.server_info, response_schema=control_answers.ServerInfo
    ),
    Endpoint("GET", "/load", server_info.load, response_schema=control_answers.LoadAnswer),
    Endpoint(
        "POST",
        "/abort",
        control.abort,
        request_schema=AbortFields,
        response_schema=control_answers.Aborted,
        is_control=True,
    ),
    Endpoint(
        "POST",
        "/reset_prefix_cache",
        control.reset_prefix_cache,
        response_schema=control_answers.Status,
    ),
    Endpoint(
        "POST",
        "/start_profile",
        control.start_profile,
        response_schema=control_answers.ProfileStatus,
    ),
    Endpoint(
        "POST",
        "/stop_profile",
        control.stop_profile,
        response_schema=control_answers.ProfileStatus,
    ),
)

CHAT_PAGE_ENDPOINTS = (
    Endpoint("GET", "/", page.index, content_type="text/html", is_public=True),
    Endpoint(
        "GET",
        "/page/{path}",
        page.file,
        content_type="*/*",
        path_parameters=(PathParameter("path", "path of a file of the chat page"),),
        is_public=True,
    ),
)

ENDPOINTS = (
    *GENERATION_ENDPOINTS,
    *MODEL_ENDPOINTS,
    *SERVER_ENDPOINTS,
    *CHAT_PAGE_ENDPOINTS,
    *unsupported.UNSUPPORTED_ENDPOINTS,
)
