"""Read a request body and convert its JSON to the fields of an endpoint.

Every error of a field names the field.
"""

import asyncio
import gc
import json
import logging
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gllm.frontend.connection import request_timeout_error
from gllm.frontend.context import SERVER_CONFIG
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.base import RequestFields
from gllm.frontend.fields.value_errors import to_field_error
from gllm.frontend.request_id import current_request_id
from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_JSON_DEPTH, MAX_JSON_FIELDS, MAX_JSON_NUMBERS, MAX_JSON_VALUES
from gllm.text.surrogates import replace_escaped_surrogates

SMALL_BODY_BYTES = 2**16
"""Texts up to this size cannot exceed the limits and are not counted."""
CHUNK_BYTES = 2**18
"""Bytes counted at once. Between two chunks other threads can run."""


def check_json_size(body: bytes) -> None:
    """Check that a JSON request body has no more values than the limit, before it is parsed.

    Takes about 10 ns per byte for strings that contain JSON, so call it in a thread.

    Raises:
        ApiError: There are too many strings, lists, objects or commas.
    """
    if len(body) <= SMALL_BODY_BYTES or _is_surely_small(body):
        return
    num_values = num_commas = 0
    for num_strings, other_text in split_strings(body):
        num_values += num_strings + other_text.count(b"[") + other_text.count(b"{")
        num_commas += other_text.count(b",")
        if num_values > MAX_JSON_VALUES:
            raise _too_many_error(f"{MAX_JSON_VALUES} strings, lists and objects")
        if num_commas > MAX_JSON_NUMBERS:
            raise _too_many_error(f"{MAX_JSON_NUMBERS} commas between values")


def _is_surely_small(body: bytes) -> bool:
    """Return True if quotes, brackets and commas are few even if those in strings count."""
    num_values = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    return num_values <= MAX_JSON_VALUES and body.count(b",") <= MAX_JSON_NUMBERS


def split_strings(body: bytes, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield for each chunk of a JSON text the number of strings and the text outside of strings.

    A string counts for the chunk in which it begins.

    Args:
        body: JSON text.
        chunk_bytes: Size of a chunk in bytes.
    """
    is_in_string = False
    start = 0
    while start < len(body):
        chunk = body[start : start + chunk_bytes]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 and start + len(chunk) < len(body):
            chunk = chunk[:-1]  # keep a backslash and the character that it escapes together
        start += len(chunk)
        # Without escaped backslashes and quotes, every quote begins or ends a string.
        parts = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield (len(parts) - is_in_string) // 2, b"".join(parts[is_in_string::2])
        is_in_string ^= len(parts) % 2 == 0


def _too_many_error(limit: str) -> ApiError:
    message = f"The request body has too many values: at most {limit} are allowed."
    return ApiError(400, message, code="body_too_complex")


GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
"""Window bits that make zlib detect a gzip or zlib header."""
WINDOW_BITS = {"gzip": GZIP_OR_ZLIB, "x-gzip": GZIP_OR_ZLIB, "deflate": GZIP_OR_ZLIB}
"""Window bits of each supported Content-Encoding."""


def check_content_encoding(encoding: str) -> None:
    """Check that the Content-Encoding of a request is supported.

    Raises:
        ApiError: It is not (status 415).
    """
    if encoding not in WINDOW_BITS:
        supported = ", ".join(WINDOW_BITS)
        message = (
            f"Content-Encoding {encoding!r:.100} is not supported: use {supported} or no encoding"
        )
        raise ApiError(415, message, code="unsupported_encoding")


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a request body; stop with an error above `max_bytes`.

    Releases the GIL.

    Args:
        body: Compressed data.
        encoding: Value of Content-Encoding.
        max_bytes: Maximum size of the decompressed body.

    Raises:
        web.HTTPRequestEntityTooLarge: The decompressed body is larger than `max_bytes`.
        ApiError: The data is invalid or incomplete.
    """
    window_bits = WINDOW_BITS[encoding]
    if encoding == "deflate" and body[:1] and body[0] & 0xF != zlib.DEFLATED:
        # Some clients omit the zlib header.
        window_bits = -zlib.MAX_WBITS
    decompressor = zlib.decompressobj(window_bits)
    try:
        data = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        message = f"The request body is not valid {encoding} data: {error}"
        raise ApiError(400, message, code="invalid_body") from error
    if len(data) > max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_bytes, len(data))
    if not decompressor.eof:
        message = f"The request body is incomplete: its {encoding} data has no end."
        raise ApiError(400, message, code="invalid_body")
    return data


log = logging.getLogger(__name__)

Result = TypeVar("Result")
Fields = TypeVar("Fields", bound=RequestFields)

_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
"""A JSON string or a bracket."""

_MAX_DIGITS = 400
"""Integers of more decimal digits are larger than every float, and slow to convert."""


async def read_fields(request: web.Request, schema: type[Fields]) -> Fields:
    """Read the JSON body of an HTTP request and convert it to a request schema.

    Lone surrogates in its strings become U+FFFD.

    Args:
        request: The HTTP request.
        schema: Class of the request body.

    Raises:
        FieldError: A field is invalid.
        ApiError: The body as a whole is invalid, such as text that is not JSON.
    """
    body = await _read_body(request)
    if len(body) > SMALL_BODY_BYTES:
        await asyncio.to_thread(check_json_size, body)
    try:
        values = parse_body(body)
    except (FieldError, ApiError):
        repaired = await run_off_loop(request, replace_escaped_surrogates, body)
        if repaired == body:
            raise
        values = parse_body(repaired)
    return parse_fields(values, schema)


async def run_off_loop(request: web.Request, function: Callable[..., Result], *args: Any) -> Result:
    """Call a function and return its result; run it in a thread if the request body is large.

    For functions whose work grows with the body: they would delay other requests on the event loop.

    Args:
        request: The HTTP request, for the size of its body.
        function: Function to call.
        *args: Its arguments.
    """
    length = request.content_length
    if length is None or length > SMALL_BODY_BYTES or "Content-Encoding" in request.headers:
        return await asyncio.to_thread(function, *args)
    return function(*args)


async def defer_100_continue(request: web.Request) -> None:
    """Delay the response `100 Continue` until the body is read.

    An `Expect` handler for aiohttp's routes: middleware may reject the request before its body is
    sent.
    """


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
    return await asyncio.to_thread(decompress, body, encoding, config.max_body_bytes)


def parse_fields(values: dict[str, Any], schema: type[Fields]) -> Fields:
    """Convert a JSON object to a request schema, with checks of types, ranges and required fields.

    Unknown fields are ignored with one warning in the log.

    Raises:
        FieldError: A value has the wrong type or range, a field is not supported, or a required
            field is missing.
    """
    if not schema.unsupported_fields.keys().isdisjoint(values):
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


@contextmanager
def rename_error_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in a FieldError of the block to those that the client sent.

    For requests of other APIs that are converted to chat completions.

    Args:
        names: Map from field names of chat completions to the client's field names.
    """
    try:
        yield
    except FieldError as error:
        name = names.get(error.param, error.param)
        if name != error.param:
            error.args = (f"{name}: {error}",)
            error.param = name
        raise


def parse_body(body: bytes) -> dict[str, Any]:
    """Parse a JSON request body, which has to be an object.

    Raises:
        FieldError: The value of a field is not valid JSON.
        ApiError: The body is not a JSON object for another reason, or has too many fields.
    """
    try:
        values = _decode_json(body)
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


def _decode_json(body: bytes) -> Any:
    """Return the value of a JSON text.

    Python's garbage collector pauses for a large text: the value has no reference cycles, and a
    body of many lists would cause a collection per 700 of them, full ones included.
    """
    pauses_collector = len(body) > SMALL_BODY_BYTES and gc.isenabled()
    if not pauses_collector:
        return msgspec.json.decode(body)
    gc.disable()
    try:
        return msgspec.json.decode(body)
    finally:
        gc.enable()


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
