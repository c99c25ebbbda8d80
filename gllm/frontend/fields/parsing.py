"""Read a request body and convert its JSON to the fields of an endpoint.

Every error of a field names the field.
"""

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gllm.frontend.connection import request_timeout_error
from gllm.frontend.context import SERVER_CONFIG
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.base import RequestFields
from gllm.frontend.fields.content_encoding import (
    BodyTooLargeError,
    check_content_encoding,
    decompress,
)
from gllm.frontend.fields.json_size import SMALL_BODY_BYTES, check_json_size
from gllm.frontend.fields.value_errors import to_field_error
from gllm.frontend.request_id import current_request_id
from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_JSON_DEPTH, MAX_JSON_FIELDS

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Fields = TypeVar("Fields", bound=RequestFields)

_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
"""A JSON string or a bracket."""

_MAX_DIGITS = 400
"""Integers of more decimal digits are larger than every float, and slow to convert."""


async def read_fields(request: web.Request, schema: type[Fields]) -> Fields:
    """Return the fields of a request's body.

    Raises:
        FieldError: A field is invalid.
        ApiError: The body as a whole is invalid.
    """
    body = await _read_body(request)
    if len(body) > SMALL_BODY_BYTES:
        await asyncio.to_thread(check_json_size, body)
    return parse_fields(parse_json_object(body), schema)


async def run_off_loop(request: web.Request, function: Callable[..., Result], *args: Any) -> Result:
    """Call a function, in a thread if the request's body is large.

    For functions whose work grows with the body: they would delay other requests on the event loop.
    """
    length = request.content_length
    if length is None or length > SMALL_BODY_BYTES or "Content-Encoding" in request.headers:
        return await asyncio.to_thread(function, *args)
    return function(*args)


async def defer_100_continue(request: web.Request) -> None:
    """Send no `100 Continue` yet: middleware may still reject the request."""


async def _read_body(request: web.Request) -> bytes:
    """Return a request's body, decompressed.

    Raises:
        ApiError: The body is incomplete, arrives too slowly or cannot be decompressed.
        web.HTTPRequestEntityTooLarge: The body exceeds `--max-body-bytes`.
    """
    config = request.app[SERVER_CONFIG]
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        check_content_encoding(encoding)
    length = request.content_length or 0
    if length > config.max_body_bytes:
        raise web.HTTPRequestEntityTooLarge(config.max_body_bytes, length)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    try:
        async with asyncio.timeout(config.read_timeout):
            body = await request.read()
    except TimeoutError:
        raise request_timeout_error(config.read_timeout) from None
    except web.RequestPayloadError as error:
        # aiohttp's message is a status line before the reason.
        reason = str(error).rstrip().rpartition("\n")[2].strip()
        message = f"The request body cannot be read: {reason}"
        raise ApiError(400, message, code="invalid_body") from error
    if encoding in ("", "identity"):
        return body
    try:
        return await asyncio.to_thread(decompress, body, encoding, config.max_body_bytes)
    except BodyTooLargeError:
        limit = config.max_body_bytes
        raise web.HTTPRequestEntityTooLarge(limit, limit + 1) from None


def parse_fields(values: dict[str, Any], schema: type[Fields]) -> Fields:
    """Convert the values of a JSON object to the fields of a schema.

    Unknown fields are ignored with one warning in the log.

    Raises:
        FieldError: A value has the wrong type or range, a field is not supported, or a required
            field is missing.
    """
    _reject_unsupported(values, schema)
    try:
        fields = msgspec.convert(values, schema, str_keys=True)
    except msgspec.ValidationError as error:
        raise to_field_error(str(error), values, schema) from error
    for name in schema.required_fields:
        if getattr(fields, name) is None:
            raise FieldError(name, f"{name} is missing, but required")
    fields.validate()
    known = {*schema.__struct_fields__, *schema.ignored_fields, *schema.unsupported_fields}
    unknown = sorted(values.keys() - known)
    if unknown:
        message = "request %s: unknown fields were ignored: %.500r"
        log.warning(message, current_request_id(), unknown, extra={"about": unknown})
    return fields


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Return the values of a JSON object.

    Raises:
        FieldError: The value of a field is not valid JSON.
        ApiError: The body is not a JSON object for another reason, or has too many fields.
    """
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        name = _invalid_json_field(body)
        if name is not None:
            message = (
                f"{name} has a value that is not valid JSON: numbers have to be finite, text has "
                f"to be valid Unicode, and nesting has to be at most {MAX_JSON_DEPTH} levels deep"
            )
            raise FieldError(name, message) from error
        message = f"The request body is not valid JSON: {error}"
        raise ApiError(400, message, code="invalid_json") from error
    if not isinstance(values, dict):
        kind = "null" if values is None else f"of type {type(values).__name__}"
        message = f"The request body is {kind}, but has to be a JSON object."
        raise ApiError(400, message, code="invalid_json")
    if len(values) > MAX_JSON_FIELDS:
        message = (
            f"The request body has {len(values)} fields, but at most {MAX_JSON_FIELDS} are allowed."
        )
        raise ApiError(400, message, code="body_too_complex")
    return values


def _reject_unsupported(values: dict[str, Any], schema: type[RequestFields]) -> None:
    """Raise FieldError if an unsupported field has a value that would have an effect."""
    for name, unsupported in schema.unsupported_fields.items():
        value = values.get(name)
        if name in schema.__struct_fields__ or value is None:
            continue
        if not any(_is_same(value, accepted) for accepted in unsupported.accepted_values):
            raise FieldError(name, f"{name} {unsupported.reason}")


def _is_same(value: object, other: object) -> bool:
    """Compare two JSON values; false and 0 differ, unlike in Python."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _invalid_json_field(body: bytes) -> str | None:
    """Return the name of the field whose value makes a body invalid JSON.

    Returns:
        The name, or None if no single field is at fault or the body is too large for a search.
    """
    if len(body) > SMALL_BODY_BYTES:
        return None
    try:
        values = json.loads(body, parse_int=_parse_long_int)
    except RecursionError:
        return _too_deep_field(body)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    for name, value in values.items():
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return str(name)
    return None


def _too_deep_field(body: bytes) -> str | None:
    """Return the name of the first field whose value is nested deeper than MAX_JSON_DEPTH."""
    depth, name = 0, None
    for match in _STRING_OR_BRACKET.finditer(body):
        token = match[0]
        if token in b"[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                return None if name is None else name.decode("utf-8", "replace")
        elif token in b"]}":
            depth -= 1
        elif depth == 1:
            name = token[1:-1]
    return None


def _parse_long_int(digits: str) -> float:
    """Return an integer, or infinity if it has so many digits that Python refuses to convert it."""
    return int(digits) if len(digits) < _MAX_DIGITS else math.inf
