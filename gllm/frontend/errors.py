"""Errors of all endpoints in OpenAI's format: status codes of exceptions, and their answers."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET

from gllm.engine.fleet_control import UnknownEngineError
from gllm.engine.interface import (
    EmbeddingError,
    EngineUnavailableError,
    NodeDrainError,
    OverloadedError,
    PoisonRequestError,
    ProfileError,
    UnknownNodeError,
)
from gllm.engine.request_checks import PromptTooLongError
from gllm.frontend.request_id import current_request_id
from gllm.frontend.response_schemas import ErrorObject, ErrorResponse, ErrorType, Unset
from gllm.options.field_types import FieldError
from gllm.text.chat.placeholders import MediaPartError

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_MESSAGE_CHARACTERS = 1000
"""Maximum characters of an error message, which may quote the request."""

ERROR_TYPES: Mapping[int, ErrorType] = {
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
"""Value of `type` by status code."""

ENGINE_ERRORS: Mapping[type[Exception], tuple[int, str, str | None]] = {
    EmbeddingError: (500, "embedding_failed", None),
    NodeDrainError: (409, "node_not_drainable", "name"),
    ProfileError: (409, "profile_failed", None),
    UnknownEngineError: (404, "engine_not_found", "name"),
    UnknownNodeError: (404, "node_not_found", "name"),
}
"""Status, code and `param` of the engine's errors whose message is the answer's."""

ANTHROPIC_PATH = "/v1/messages"
"""Start of the paths of Anthropic's API."""

DROPPED_REASON_HEADER = "x-llm-d-request-dropped-reason"
"""Header with llm-d's name of the reason why a request was refused."""
DROPPED_REASONS = {
    "full": "rejected-saturated",
    "no_engines": "rejected-no-endpoints",
}
"""Value of that header by the reason of an EngineUnavailableError; others have none."""


class ApiError(Exception):
    """Error that is sent to the client: HTTP status, message, invalid field and error code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers
        self.body_type: Literal["error"] | Unset = UNSET
        """`type` of the body, for APIs whose clients expect it."""

    def body(self) -> ErrorResponse:
        """Return the JSON body of the error, without lone surrogates, which JSON cannot encode."""
        kind = ERROR_TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "internal_error"
        )
        param = None if self.param is None else _encodable(self.param)
        error = ErrorObject(_encodable(self.message), kind, param, self.code)
        return ErrorResponse(type=self.body_type, error=error)


def to_api_error(error: Exception) -> ApiError:
    """Convert any exception to an `ApiError` for the client.

    An unexpected exception is logged and becomes status 500 without its message.
    """
    match error:
        case ApiError():
            return error
        case PromptTooLongError():
            return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
        case FieldError():
            return ApiError(400, str(error), param=error.param, code="invalid_value")
        case EngineUnavailableError():
            dropped = error.dropped_reason or DROPPED_REASONS.get(error.reason, "")
            code = f"engine_{error.reason}"
            return _dropped(503, error.message, code, error.retry_after, dropped)
        case OverloadedError():
            return _dropped(429, error.message, "overloaded", error.retry_after, error.reason)
        case PoisonRequestError():
            # Clients repeat a request after a status of 500 unless this header forbids it.
            headers = {"x-should-retry": "false"}
            return ApiError(500, str(error), code="request_poisoned", headers=headers)
        case web.HTTPException():
            status, message = error.status, error.text or error.reason
            headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
            return ApiError(status, message, code=f"http_{status}", headers=headers)
        case _ if type(error) in ENGINE_ERRORS:
            status, code, param = ENGINE_ERRORS[type(error)]
            return ApiError(status, str(error), param=param, code=code)
        case _:
            log.error("request %s failed", current_request_id(), exc_info=error)
            return ApiError(500, "The server failed on this request.", code="internal_error")


def to_client_error(error: Exception, path: str, architecture: str = "") -> ApiError:
    """Convert any exception to an `ApiError` in the format of the API that the path belongs to.

    Clients of Anthropic's API expect `"type": "error"`, from every step before the endpoint too.
    They recognize a prompt that is too long by its message.

    Args:
        error: The exception.
        path: Path of the request.
        architecture: Class of the served model, for the error of images; empty if unknown.
    """
    api_error = to_api_error(error)
    if isinstance(error, MediaPartError) and architecture:
        served = f"{architecture} is served, of which only the language model is computed"
        api_error.message = f"{api_error.message} ({served})"
    if path.startswith(ANTHROPIC_PATH):
        api_error.body_type = "error"
        if api_error.code == "context_length_exceeded":
            api_error.message = f"prompt is too long: {api_error.message}"
    return api_error


def _dropped(
    status: int, message: str, code: str, retry_after: int, dropped_reason: str
) -> ApiError:
    """Return the API error of a request that the engine does not accept at present."""
    headers = {"Retry-After": str(retry_after)}
    if dropped_reason:
        headers[DROPPED_REASON_HEADER] = dropped_reason
    return ApiError(status, message, code=code, headers=headers)


def error_response(error: ApiError) -> web.Response:
    """Return the HTTP response with the JSON body of an `ApiError`."""
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(error.body()),
        content_type="application/json",
        headers=error.headers,
    )


def _encodable(text: str) -> str:
    """Return the text, shortened, with lone surrogates replaced: JSON cannot contain them."""
    return text[:MAX_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
