"""Every error of every endpoint in OpenAI's shape.

Owns the mapping of exceptions to status codes, and the middleware that applies it. Knows nothing of
what the routes do.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from gllm.config.field_types import FieldError
from gllm.config.server import ServerConfig
from gllm.engine.interface import EngineUnavailableError, PromptTooLongError
from gllm.frontend.request_id import current_request_id

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_MESSAGE_CHARACTERS = 1000
"""Characters of an error message; messages may quote what the client sent."""

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict_error",
    413: "request_too_large",
    414: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    500: "internal_error",
    501: "not_implemented_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An error with its status code, and the field and the code word that clients may look for."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers: dict[str, str] = {}
        self.extra_fields: dict[str, Any] = {}
        """What an endpoint's own clients look for in the body, beside `error`."""

    def body(self) -> dict[str, Any]:
        """The error as JSON values, safe to encode whatever the client sent."""
        kind = ERROR_TYPES.get(
            self.status, ERROR_TYPES[400] if self.status < 500 else ERROR_TYPES[500]
        )
        param = None if self.param is None else _encodable(self.param)
        message = _encodable(self.message)
        told = {"message": message, "type": kind, "param": param, "code": self.code}
        return {**self.extra_fields, "error": told}


def to_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception; what is not its fault is logged, not told."""
    match error:
        case ApiError():
            return error
        case PromptTooLongError():
            return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
        case FieldError():
            return ApiError(400, str(error), param=error.param, code="invalid_value")
        case EngineUnavailableError():
            told = ApiError(503, error.message, code=f"engine_{error.reason}")
            told.headers["Retry-After"] = str(error.retry_after)
            return told
        case web.HTTPException():
            told = ApiError(error.status, error.text or error.reason, code=f"http_{error.status}")
            if "Allow" in error.headers:
                told.headers["Allow"] = error.headers["Allow"]
            return told
        case _:
            log.error("request %s failed", current_request_id(), exc_info=error)
            return ApiError(500, "The server failed on this request.", code="internal_error")


def install(app: web.Application, config: ServerConfig) -> None:
    """Put the middleware into an application."""
    app.middlewares.append(error_middleware)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns whatever a handler raises into an answer."""
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client is gone: nobody reads an answer
    except Exception as error:
        return error_response(to_api_error(error))


def error_response(error: ApiError) -> web.Response:
    """The answer that an error is."""
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(error.body()),
        content_type="application/json",
        headers=error.headers,
    )


def _encodable(text: str) -> str:
    """The text, shortened, without lone surrogates, which have no place in JSON."""
    return text[:MAX_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
