"""The table of all HTTP endpoints.

`register_endpoints` adds their routes to the application. The OpenAPI document and docs/api.md are
generated from the table.
"""

from typing import get_args

from gllm.frontend import response_schemas as schemas
from gllm.frontend import server_response_schemas as server_schemas
from gllm.frontend.endpoint import EndpointParameter, delete, get, get_probe, post, post_command
from gllm.frontend.fields.chat import ChatCompletionFields, DetokenizeFields, TokenizeFields
from gllm.frontend.fields.completions import CompletionFields, EmbeddingFields
from gllm.frontend.fields.control import AbortFields, EngineRoleFields, RoleSwitchFields
from gllm.frontend.fields.messages import CountTokensFields, MessagesFields
from gllm.frontend.fields.responses import CompactFields, InputTokensFields, ResponsesFields
from gllm.frontend.fields.token_generation import GenerateFields
from gllm.frontend.handoffs.registry import get_grant
from gllm.frontend.routes import (
    chat,
    completions,
    control,
    embeddings,
    engines,
    messages,
    models,
    page,
    render,
    responses,
    server,
    token_generation,
    unsupported,
)

RESPONSE_ID = EndpointParameter("response_id", "id of a stored response")
GENERATION_ENDPOINTS = (
    post(
        "/v1/chat/completions",
        chat.create_chat_completion,
        schemas.ChatCompletionResponse,
        ChatCompletionFields,
        event_schemas=(schemas.ChatCompletionChunk,),
        operation="chat",
    ),
    post(
        "/v1/completions",
        completions.create_completion,
        schemas.CompletionResponse,
        CompletionFields,
        event_schemas=(schemas.CompletionChunk,),
        operation="text_completion",
    ),
    post(
        "/v1/chat/completions/render",
        render.render_chat_completion,
        schemas.RenderedRequest,
        ChatCompletionFields,
    ),
    post(
        "/v1/completions/render",
        render.render_completion,
        schemas.RenderedRequest,
        CompletionFields,
        answers_list=True,
    ),
    post(
        "/inference/v1/generate",
        token_generation.generate_tokens,
        schemas.GenerateResponse,
        GenerateFields,
        event_schemas=(schemas.GenerateEvent,),
        operation="text_completion",
    ),
    post(
        "/v1/responses",
        responses.create_response,
        schemas.ResponsesResponse,
        ResponsesFields,
        event_schemas=get_args(schemas.ResponsesEvent),
        operation="chat",
    ),
    post(
        "/v1/responses/input_tokens",
        responses.count_input_tokens,
        schemas.InputTokensResponse,
        InputTokensFields,
    ),
    post(
        "/v1/responses/compact",
        responses.compact_conversation,
        schemas.CompactionResponse,
        CompactFields,
    ),
    get(
        "/v1/responses/{response_id}/input_items",
        responses.list_input_items,
        schemas.InputItemList,
        path_parameters=(RESPONSE_ID,),
    ),
    get(
        "/v1/responses/{response_id}",
        responses.get_response,
        schemas.ResponsesResponse,
        path_parameters=(RESPONSE_ID,),
    ),
    delete(
        "/v1/responses/{response_id}",
        responses.delete_response,
        schemas.ResponseDeletion,
        path_parameters=(RESPONSE_ID,),
    ),
    post(
        "/v1/messages",
        messages.create_message,
        schemas.MessagesResponse,
        MessagesFields,
        event_schemas=schemas.MESSAGES_EVENTS,
        operation="chat",
    ),
    post(
        "/v1/messages/count_tokens",
        messages.count_message_tokens,
        schemas.CountTokensResponse,
        CountTokensFields,
    ),
    post(
        "/v1/embeddings", embeddings.create_embeddings, schemas.EmbeddingsResponse, EmbeddingFields
    ),
)

MODEL_ENDPOINTS = (
    get("/v1/models", models.list_models, server_schemas.ModelListResponse),
    get(
        "/v1/models/{model}",
        models.get_model,
        server_schemas.ModelCard,
        path_parameters=(EndpointParameter("model", "name of a model"),),
    ),
    post("/tokenize", models.tokenize, server_schemas.TokenizeResponse, TokenizeFields),
    post("/detokenize", models.detokenize, server_schemas.DetokenizeResponse, DetokenizeFields),
    get("/tokenizer_info", models.get_tokenizer_info, server_schemas.TokenizerInfoResponse),
)

SERVER_ENDPOINTS = (
    get_probe("/health", server.get_health, server_schemas.HealthResponse),
    get_probe("/ready", server.get_readiness, server_schemas.StatusResponse),
    get_probe("/health/ready", server.get_readiness, server_schemas.StatusResponse),
    get_probe("/metrics", server.get_metrics, content_type="text/plain"),
    get("/version", server.get_version, server_schemas.VersionResponse),
    get("/openapi.json", server.get_openapi_document),
    get("/server_info", server.get_server_info, server_schemas.ServerInfoResponse),
    get("/load", server.get_load, server_schemas.LoadResponse),
    get(
        "/v1/loads",
        server.get_loads,
        server_schemas.LoadsResponse,
        query_parameters=(
            EndpointParameter("include", "no effect: an answer always has all fields"),
        ),
        is_polled=True,
    ),
    post(
        "/sleep",
        control.sleep,
        server_schemas.StatusResponse,
        query_parameters=control.SLEEP_PARAMETERS,
    ),
    post(
        "/wake_up",
        control.wake_up,
        server_schemas.StatusResponse,
        query_parameters=(EndpointParameter("tags", "no effect: a server wakes up as a whole"),),
    ),
    get("/is_sleeping", control.get_is_sleeping, server_schemas.SleepingResponse, is_polled=True),
    get("/nodes", engines.list_nodes, server_schemas.NodeListResponse, is_polled=True),
    post_command(
        "/nodes/{name}/drain",
        engines.drain_node,
        server_schemas.NodeDrainResponse,
        path_parameters=(EndpointParameter("name", "name of a machine, as in /nodes"),),
    ),
    post_command("/abort", control.abort_requests, server_schemas.AbortResponse, AbortFields),
    post("/reset_prefix_cache", control.reset_prefix_cache, server_schemas.StatusResponse),
    post("/start_profile", control.start_profile, server_schemas.ProfileResponse),
    post("/stop_profile", control.stop_profile, server_schemas.ProfileResponse),
)

ENGINE_NAME = EndpointParameter("name", "name of an engine, as in /engines")
FLEET_ENDPOINTS = (
    get("/engines", engines.list_engines, server_schemas.EngineListResponse),
    get("/workload", engines.list_request_lengths, content_type="text/csv"),
    post_command(
        "/workload/profile", engines.reset_workload_profile, server_schemas.StatusResponse
    ),
    post_command(
        "/engines/{name}/drain",
        engines.drain_engine,
        server_schemas.DrainResponse,
        path_parameters=(ENGINE_NAME,),
        query_parameters=(
            EndpointParameter(
                "migrate",
                "true: its running requests go to other engines at once; default false",
                {"type": "boolean"},
            ),
            EndpointParameter(
                "scaling",
                "true: autoscaling may remove the engine or use it again; default false",
                {"type": "boolean"},
            ),
        ),
    ),
    post_command(
        "/engines/{name}/undrain",
        engines.undrain_engine,
        server_schemas.StatusResponse,
        path_parameters=(ENGINE_NAME,),
    ),
    post_command(
        "/engines/{name}/role",
        engines.set_engine_role,
        server_schemas.EngineRoleResponse,
        EngineRoleFields,
        path_parameters=(ENGINE_NAME,),
    ),
    get(
        "/kv_handoffs/{room}",
        get_grant,
        content_type="text/plain",
        path_parameters=(EndpointParameter("room", "`bootstrap_room` of the request"),),
        is_public=True,
        is_control=True,
    ),
    post_command(
        "/pd_role_switch", engines.switch_role, server_schemas.RoleSwitchResponse, RoleSwitchFields
    ),
)

CHAT_PAGE_ENDPOINTS = (
    get("/", page.get_chat_page, content_type="text/html", is_public=True),
    get(
        "/page/{path}",
        page.get_chat_page_file,
        content_type="*/*",
        path_parameters=(EndpointParameter("path", "path of a file of the chat page"),),
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
