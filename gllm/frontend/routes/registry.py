"""The table of all HTTP endpoints.

`register_endpoints` adds their routes to the application. The OpenAPI document and docs/api.md are
generated from the table.
"""

from typing import get_args

from gllm.frontend import response_schemas as schemas
from gllm.frontend import server_response_schemas as server_schemas
from gllm.frontend.endpoint import Endpoint, PathParameter, QueryParameter
from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.completions import CompletionFields, EmbeddingFields
from gllm.frontend.fields.control import AbortFields, EngineRoleFields, RoleSwitchFields
from gllm.frontend.fields.messages import CountTokensFields, MessagesFields
from gllm.frontend.fields.responses import CompactFields, InputTokensFields, ResponsesFields
from gllm.frontend.fields.token_generation import GenerateFields
from gllm.frontend.fields.tokens import DetokenizeFields, TokenizeFields
from gllm.frontend.handoffs.registry import get_grant
from gllm.frontend.routes import (
    chat,
    completions,
    control,
    embeddings,
    engines,
    messages,
    models,
    nodes,
    page,
    render,
    responses,
    server,
    token_generation,
    unsupported,
)

GENERATION_ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat.create_chat_completion,
        schemas.ChatCompletionResponse,
        ChatCompletionFields,
        event_schemas=(schemas.ChatCompletionChunk,),
        operation="chat",
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        completions.create_completion,
        schemas.CompletionResponse,
        CompletionFields,
        event_schemas=(schemas.CompletionChunk,),
        operation="text_completion",
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions/render",
        render.render_chat_completion,
        schemas.RenderedRequest,
        ChatCompletionFields,
    ),
    Endpoint(
        "POST",
        "/v1/completions/render",
        render.render_completion,
        schemas.RenderedRequest,
        CompletionFields,
        answers_list=True,
    ),
    Endpoint(
        "POST",
        "/inference/v1/generate",
        token_generation.generate_tokens,
        schemas.GenerateResponse,
        GenerateFields,
        event_schemas=(schemas.GenerateEvent,),
        operation="text_completion",
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        responses.create_response,
        schemas.ResponsesResponse,
        ResponsesFields,
        event_schemas=get_args(schemas.ResponsesEvent),
        operation="chat",
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        responses.count_input_tokens,
        schemas.InputTokensResponse,
        InputTokensFields,
    ),
    Endpoint(
        "POST",
        "/v1/responses/compact",
        responses.compact_conversation,
        schemas.CompactionResponse,
        CompactFields,
    ),
    Endpoint(
        "POST",
        "/v1/messages",
        messages.create_message,
        schemas.MessagesResponse,
        MessagesFields,
        event_schemas=schemas.MESSAGES_EVENTS,
        operation="chat",
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        messages.count_message_tokens,
        schemas.CountTokensResponse,
        CountTokensFields,
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        embeddings.create_embeddings,
        schemas.EmbeddingsResponse,
        EmbeddingFields,
    ),
)

MODEL_ENDPOINTS = (
    Endpoint("GET", "/v1/models", models.list_models, server_schemas.ModelListResponse),
    Endpoint(
        "GET",
        "/v1/models/{model}",
        models.get_model,
        server_schemas.ModelCard,
        path_parameters=(PathParameter("model", "name of a model"),),
    ),
    Endpoint("POST", "/tokenize", models.tokenize, server_schemas.TokenizeResponse, TokenizeFields),
    Endpoint(
        "POST",
        "/detokenize",
        models.detokenize,
        server_schemas.DetokenizeResponse,
        DetokenizeFields,
    ),
    Endpoint(
        "GET", "/tokenizer_info", models.get_tokenizer_info, server_schemas.TokenizerInfoResponse
    ),
)

SERVER_ENDPOINTS = (
    Endpoint(
        "GET",
        "/health",
        server.get_health,
        server_schemas.HealthResponse,
        is_public=True,
        is_polled=True,
    ),
    Endpoint(
        "GET",
        "/ready",
        server.get_readiness,
        server_schemas.StatusResponse,
        is_public=True,
        is_polled=True,
    ),
    Endpoint(
        "GET",
        "/health/ready",
        server.get_readiness,
        server_schemas.StatusResponse,
        is_public=True,
        is_polled=True,
    ),
    Endpoint(
        "GET",
        "/metrics",
        server.get_metrics,
        content_type="text/plain",
        is_public=True,
        is_polled=True,
    ),
    Endpoint("GET", "/version", server.get_version, server_schemas.VersionResponse),
    Endpoint("GET", "/openapi.json", server.get_openapi_document),
    Endpoint("GET", "/server_info", server.get_server_info, server_schemas.ServerInfoResponse),
    Endpoint("GET", "/load", server.get_load, server_schemas.LoadResponse),
    Endpoint(
        "GET",
        "/v1/loads",
        server.get_loads,
        server_schemas.LoadsResponse,
        query_parameters=(QueryParameter("include", "no effect: an answer always has all fields"),),
        is_polled=True,
    ),
    Endpoint(
        "POST",
        "/sleep",
        control.sleep,
        server_schemas.StatusResponse,
        query_parameters=control.SLEEP_PARAMETERS,
    ),
    Endpoint(
        "POST",
        "/wake_up",
        control.wake_up,
        server_schemas.StatusResponse,
        query_parameters=(QueryParameter("tags", "no effect: a server wakes up as a whole"),),
    ),
    Endpoint(
        "GET",
        "/is_sleeping",
        control.get_is_sleeping,
        server_schemas.SleepingResponse,
        is_polled=True,
    ),
    Endpoint("GET", "/nodes", nodes.list_nodes, server_schemas.NodeListResponse, is_polled=True),
    Endpoint(
        "POST",
        "/nodes/{name}/drain",
        nodes.drain_node,
        server_schemas.NodeDrainResponse,
        path_parameters=(PathParameter("name", "name of a machine, as in /nodes"),),
        is_control=True,
    ),
    Endpoint(
        "POST",
        "/abort",
        control.abort_requests,
        server_schemas.AbortResponse,
        AbortFields,
        is_control=True,
    ),
    Endpoint(
        "POST", "/reset_prefix_cache", control.reset_prefix_cache, server_schemas.StatusResponse
    ),
    Endpoint("POST", "/start_profile", control.start_profile, server_schemas.ProfileResponse),
    Endpoint("POST", "/stop_profile", control.stop_profile, server_schemas.ProfileResponse),
)

ENGINE_NAME = PathParameter("name", "name of an engine, as in /engines")
FLEET_ENDPOINTS = (
    Endpoint("GET", "/engines", engines.list_engines, server_schemas.EngineListResponse),
    Endpoint("GET", "/workload", engines.list_lengths, content_type="text/csv"),
    Endpoint(
        "POST",
        "/workload/profile",
        engines.reset_profile,
        server_schemas.StatusResponse,
        is_control=True,
    ),
    Endpoint(
        "POST",
        "/engines/{name}/drain",
        engines.drain_engine,
        server_schemas.DrainResponse,
        path_parameters=(ENGINE_NAME,),
        query_parameters=(
            QueryParameter(
                "migrate",
                "true: its running requests go to other engines at once; default false",
                {"type": "boolean"},
            ),
        ),
        is_control=True,
    ),
    Endpoint(
        "POST",
        "/engines/{name}/undrain",
        engines.undrain_engine,
        server_schemas.StatusResponse,
        path_parameters=(ENGINE_NAME,),
        is_control=True,
    ),
    Endpoint(
        "POST",
        "/engines/{name}/role",
        engines.set_engine_role,
        server_schemas.EngineRoleResponse,
        EngineRoleFields,
        path_parameters=(ENGINE_NAME,),
        is_control=True,
    ),
    Endpoint(
        "GET",
        "/kv_handoffs/{room}",
        get_grant,
        content_type="text/plain",
        path_parameters=(PathParameter("room", "`bootstrap_room` of the request"),),
        is_public=True,
        is_control=True,
    ),
    Endpoint(
        "POST",
        "/pd_role_switch",
        engines.switch_role,
        server_schemas.RoleSwitchResponse,
        RoleSwitchFields,
        is_control=True,
    ),
)

CHAT_PAGE_ENDPOINTS = (
    Endpoint("GET", "/", page.get_chat_page, content_type="text/html", is_public=True),
    Endpoint(
        "GET",
        "/page/{path}",
        page.get_chat_page_file,
        content_type="*/*",
        path_parameters=(PathParameter("path", "path of a file of the chat page"),),
        is_public=True,
    ),
)

ENDPOINTS = (
    *GENERATION_ENDPOINTS,
    *MODEL_ENDPOINTS,
    *SERVER_ENDPOINTS,
    *FLEET_ENDPOINTS,
    *CHAT_PAGE_ENDPOINTS,
    *unsupported.UNSUPPORTED_ENDPOINTS,
)
