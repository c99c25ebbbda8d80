"""Bad requests of a soak test, by HTTP and as bytes that are no HTTP. All have to be refused."""

import asyncio
import re
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

BAD_SECONDS = 120.0
"""Maximum time of an answer to a bad request."""
JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class BadRequest(NamedTuple):
    """A request that a server refuses with a status of 400 to 499."""

    path: str
    body: bytes
    method: str = "POST"


def _completion(**fields: Any) -> BadRequest:
    return BadRequest(COMPLETIONS, msgspec.json.encode({"prompt": "Hello", **fields}))


def _chat(**fields: Any) -> BadRequest:
    messages = [{"role": "user", "content": "Hello"}]
    return BadRequest(CHAT, msgspec.json.encode({"messages": messages, **fields}))


BAD_REQUESTS = {
    "no JSON": BadRequest(COMPLETIONS, b'{"prompt": '),
    "no UTF-8": BadRequest(COMPLETIONS, b'{"prompt": "\xff\xfe"}'),
    "an array": BadRequest(CHAT, b"[1, 2, 3]"),
    "empty body": BadRequest(CHAT, b""),
    "deep nesting": BadRequest(CHAT, b'{"messages": ' + b"[" * 100_000),
    "no such path": BadRequest("/v1/nothing", b"{}"),
    "wrong method": BadRequest(COMPLETIONS, b"", "DELETE"),
    "other model": _completion(model="another"),
    "wrong type": _completion(max_tokens="many"),
    "negative tokens": _completion(max_tokens=-1),
    "temperature": _completion(temperature=-3),
    "top_p": _chat(top_p=7),
    "too many choices": _completion(n=100_000),
    "long prompt": _completion(prompt="word " * 200_000),
    "unknown token": _completion(prompt=[10**9]),
    "logit bias": _completion(logit_bias={"1000000000": 1}),
    "no messages": BadRequest(CHAT, b'{"messages": []}'),
    "unknown role": BadRequest(CHAT, b'{"messages": [{"role": "nobody", "content": "x"}]}'),
    "bad schema": _chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "no such type"}},
        }
    ),
    "bad expression": _completion(guided_regex="(["),
    "bad tool": _chat(tools=[{"type": "function"}]),
}
"""Requests by name."""

_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
RAW_REQUESTS = {
    "garbage": bytes(range(256)) * 16,
    "long header": b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    "wrong chunk": _HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
    "wrong length": _HEAD + b"Content-Length: many\r\n\r\n{}",
    "half a body": _HEAD + b'Content-Length: 1000\r\n\r\n{"prompt": "Hel',
    "half a header": _HEAD,
}
"""Bytes by name; the client ends its side of the connection after them."""


async def send_bad(session: aiohttp.ClientSession, url: str, bad: BadRequest) -> str:
    """Send a request; return the problem with the answer, empty if the request was refused."""
    try:
        async with (
            asyncio.timeout(BAD_SECONDS),
            session.request(bad.method, url + bad.path, data=bad.body, headers=JSON) as response,
        ):
            body = await response.read()
    except aiohttp.ClientConnectionError:
        # A server may close the connection before it has read a large body.
        return "" if len(bad.body) > 2**16 else "the connection was closed"
    except (aiohttp.ClientError, TimeoutError) as error:
        return repr(error)
    return "" if 400 <= response.status < 500 else f"HTTP {response.status}: {body[:200]!r}"


async def send_raw(url: str, data: bytes) -> str:
    """Send bytes; return the problem with the answer, empty if it is a refusal or none."""
    address = urlsplit(url)
    answer = b""
    try:
        async with asyncio.timeout(BAD_SECONDS):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                writer.write(data)
                with suppress(OSError):
                    await writer.drain()
                    writer.write_eof()
                    answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        return repr(error)
    is_refused = not answer or re.match(rb"HTTP/1\.[01] 4\d\d ", answer)
    return "" if is_refused else f"{answer[:200]!r}"
