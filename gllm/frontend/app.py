"""The HTTP server's routes and what wraps all of them.

Owns the registries of endpoints and of what every request passes. Knows nothing of what they do:
adding one is a file in routes/ or middleware/ and a line here.
"""

import re

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.engine.interface import EngineLike
from gllm.frontend import answer_schemas as schemas
from gllm.frontend import control_schemas, errors
from gllm.frontend.connection import Runner
from gllm.frontend.context import CONTEXT, Context
from gllm.frontend.endpoint import ROUTED, Endpoint
from gllm.frontend.fields.chat import ChatFields
from gllm.frontend.fields.completions import CompletionFields
from gllm.frontend.fields.control import AbortFields
from gllm.frontend.fields.embeddings import EmbeddingFields
from gllm.frontend.fields.messages import CountFields, MessageFields
from gllm.frontend.fields.reading import continue_later
from gllm.frontend.fields.responses import CompactFields, InputTokensFields, ResponseFields
from gllm.frontend.fields.tokens import DetokenizeFields, TokenizeFields
from gllm.frontend.metrics import Metrics
from gllm.frontend.middleware import arrival, cors, draining, keys, observe, origin, rate_limit
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
from gllm.frontend.routes.openapi import ALL

ENDPOINTS = (
    Endpoint("GET", "/", page.index, content="text/html", is_open=True),
    Endpoint("GET", "/page/{path}", page.file, content="*/*", is_open=True),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat.create,
        ChatFields,
        answer=schemas.ChatCompletion,
        event=schemas.ChatCompletionChunk,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        completions.create,
        CompletionFields,
        answer=schemas.TextCompletion,
        event=schemas.TextCompletion,
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        responses.create,
        ResponseFields,
        answer=schemas.ResponseObject,
        event=schemas.ResponseEvent,
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        responses.count,
        InputTokensFields,
        answer=schemas.InputTokenCount,
    ),
    Endpoint(
        "POST",
        "/v1/responses/compact",
        responses.compact,
        CompactFields,
        answer=schemas.Compaction,
    ),
    Endpoint(
        "POST",
        "/v1/messages",
        messages.create,
        MessageFields,
        answer=schemas.MessageAnswer,
        event=schemas.MessageEvent,
    ),
    Endpoint(
        "POST", "/v1/messages/count_tokens", messages.count, CountFields, answer=schemas.TokenCount
    ),
    Endpoint(
        "POST", "/v1/embeddings", embeddings.create, EmbeddingFields, answer=schemas.EmbeddingList
    ),
    Endpoint("GET", "/v1/models", models.listing, answer=control_schemas.ModelList),
    Endpoint("GET", "/v1/models/{model}", models.one, answer=control_schemas.ModelCard),
    Endpoint("GET", "/health", health.health, is_open=True, answer=control_schemas.Status),
    Endpoint("GET", "/ready", health.ready, is_open=True, answer=control_schemas.Status),
    Endpoint("GET", "/metrics", metrics.metrics, content="text/plain", is_open=True),
    Endpoint("GET", "/version", version.version, answer=control_schemas.VersionAnswer),
    Endpoint("GET", "/openapi.json", openapi.document),
    Endpoint(
        "POST", "/tokenize", tokens.tokenize, TokenizeFields, answer=control_schemas.TokenizeAnswer
    ),
    Endpoint(
        "POST",
        "/detokenize",
        tokens.detokenize,
        DetokenizeFields,
        answer=control_schemas.DetokenizeAnswer,
    ),
    Endpoint("GET", "/tokenizer_info", tokens.info, answer=control_schemas.TokenizerInfo),
    Endpoint("GET", "/server_info", server_info.server_info, answer=control_schemas.ServerInfo),
    Endpoint("GET", "/load", server_info.load, answer=control_schemas.LoadAnswer),
    Endpoint(
        "POST",
        "/abort",
        control.abort,
        AbortFields,
        is_control=True,
        answer=control_schemas.Aborted,
    ),
    Endpoint(
        "POST", "/reset_prefix_cache", control.reset_prefix_cache, answer=control_schemas.Status
    ),
    Endpoint("POST", "/start_profile", control.start_profile, answer=control_schemas.ProfileStatus),
    Endpoint("POST", "/stop_profile", control.stop_profile, answer=control_schemas.ProfileStatus),
    *unsupported.endpoints(),
)

MIDDLEWARE = (arrival, observe, draining, errors, origin, cors, keys, rate_limit)
"""What every request passes, outermost first."""


def make_app(engine: EngineLike, config: ServerConfig) -> web.Application:
    """The application around an engine, which may still be loading.

    Raises ValueError that names the flag for what cannot be.
    """
    app = web.Application(client_max_size=config.max_body_bytes)
    app[CONTEXT] = Context(engine, config, Metrics(engine))
    for one in MIDDLEWARE:
        one.install(app, config)
    app[ALL] = ENDPOINTS
    routed = {}
    for endpoint in ENDPOINTS:
        # Names of models may have slashes.
        path = re.sub(r"{(model|path)}", r"{\1:.+}", endpoint.path)
        for method in endpoint.methods:
            route = app.router.add_route(
                method, path, endpoint.handler, expect_handler=continue_later
            )
            routed[route] = endpoint
    app[ROUTED] = routed
    return app


def make_runner(app: web.Application, config: ServerConfig) -> Runner:
    """What serves the application."""
    return Runner(app, config)
