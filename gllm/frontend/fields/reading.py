"""From the bytes of a body to the fields of a schema.

Owns the reading, and that whatever is wrong is told by the field's name. Knows nothing of engines
and of answers.
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

from gllm.config.field_types import FieldError
from gllm.config.limits import MAX_JSON_DEPTH, MAX_JSON_FIELDS
from gllm.frontend.connection import too_slow
from gllm.frontend.context import CONTEXT
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.body import Body
from gllm.frontend.fields.inflate import BodyTooLarge, check_encoding, inflate
from gllm.frontend.fields.json_size import SMALL_BYTES, check_json_size
from gllm.frontend.request_id import current_id

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Fields = TypeVar("Fields", bound=Body)

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
"""A JSON string or a bracket."""


async def read_fields(request: web.Request, schema: type[Fields]) -> Fields:
    """The fields of a request's body. Raises FieldError and ApiError."""
    body = await _read(request)
    if len(body) > SMALL_BYTES:
        await asyncio.to_thread(check_json_size, body)
    return convert(parse_object(body), schema)


async def off_loop(request: web.Request, function: Callable[..., Result], *args: Any) -> Result:
    """Return what a function returns; it runs in a thread where the request's body is large, for
    its work grows with the body."""
    length = request.content_length
    if length is None or length > SMALL_BYTES or "Content-Encoding" in request.headers:
        return await asyncio.to_thread(function, *args)
    return function(*args)


async def continue_later(request: web.Request) -> None:
    """What to do for `Expect: 100-continue` on arrival: nothing, before the request is allowed."""


async def _read(request: web.Request) -> bytes:
    """A request's body, decompressed. Raises ApiError and what aiohttp raises for one that is too
    large."""
    config = request.app[CONTEXT].config
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        check_encoding(encoding)
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
        raise too_slow(config.read_timeout) from None
    except web.RequestPayloadError as error:
        # aiohttp's message is a status line before the reason.
        why = str(error).rstrip().rpartition("\n")[2].strip()
        raise ApiError(400, f"the body cannot be read: {why}", code="invalid_body") from error
    if encoding in ("", "identity"):
        return body
    try:
        return await asyncio.to_thread(inflate, body, encoding, config.max_body_bytes)
    except BodyTooLarge:
        largest = config.max_body_bytes
        raise web.HTTPRequestEntityTooLarge(largest, largest + 1) from None


def convert(values: dict[str, Any], schema: type[Fields]) -> Fields:
    """The fields of JSON values. Raises FieldError."""
    _refuse(values, schema)
    try:
        fields = msgspec.convert(values, schema, str_keys=True)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error
    fields.check()
    known = {*schema.__struct_fields__, *schema.inert, *schema.refused}
    unknown = sorted(values.keys() - known)
    if unknown:
        told = "request %s: fields without meaning here were ignored: %.500r"
        log.warning(told, current_id(), unknown, extra={"about": unknown})
    return fields


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises FieldError naming the field that is no JSON, ApiError without one."""
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        culprit = _culprit(body)
        if culprit is not None:
            raise FieldError(culprit, f"{culprit} holds what JSON has no value for") from error
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise ApiError(400, "the body has to be a JSON object", code="invalid_json")
    if len(values) > MAX_JSON_FIELDS:
        raise ApiError(
            400, f"The body has more than {MAX_JSON_FIELDS} fields.", code="body_too_complex"
        )
    return values


def _refuse(values: dict[str, Any], schema: type[Body]) -> None:
    """Raises FieldError for a field that asks for what this server does not do."""
    for name, refused in schema.refused.items():
        value = values.get(name)
        if name in schema.__struct_fields__ or value is None:
            continue
        if not any(_same(value, off) for off in refused.off):
            raise FieldError(name, f"{name} {refused.why}")


def _same(value: object, other: object) -> bool:
    """Equality that tells False from 0."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _named(message: str) -> FieldError:
    """msgspec's complaint with the field in front, which is where its path begins."""
    what, _, path = message.partition(" - at `")
    name = re.split(r"\W", path.partition("$.")[2], maxsplit=1)[0]
    return FieldError(name, f"{name}: {what}")


def _culprit(body: bytes) -> str | None:
    """The field whose value keeps a body from being JSON; None where that is not to be told, as for
    a body so large that the search would take long."""
    if len(body) > SMALL_BYTES:
        return None
    try:
        loose = json.loads(body, parse_int=_lenient_int)
    except RecursionError:
        return _deepest_field(body)
    except ValueError:
        return None
    if not isinstance(loose, dict):
        return None
    for name, value in loose.items():
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return str(name)
    return None


def _deepest_field(body: bytes) -> str | None:
    """The first field whose value nests deeper than any request has to."""
    depth, name = 0, None
    for found in _TOKEN.finditer(body):
        token = found[0]
        if token in b"[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                return None if name is None else name.decode("utf-8", "replace")
        elif token in b"]}":
            depth -= 1
        elif depth == 1:
            name = token[1:-1]
    return None


def _lenient_int(digits: str) -> float:
    """An integer, or infinity for one that Python itself refuses to read."""
    return int(digits) if len(digits) < 400 else math.inf
