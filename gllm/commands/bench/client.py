"""Send one request and record when its output arrives.

Times are of time.monotonic, taken once per read of the socket.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from gllm.commands.bench.events import StreamChunk
from gllm.commands.bench.load import PlannedRequest
from gllm.commands.bench.options import ServeConfig
from gllm.deploy.server_client import DONE, EventReader, error_message
from gllm.observability.latency import RequestTimeline

KEEP_ALIVE_SECONDS = 4.0
"""Time that an idle connection is kept. Servers close theirs after 5 s or more; a request sent at
that moment would fail."""


@dataclass
class RequestResult:
    """Result of one request."""

    timeline: RequestTimeline
    prompt_tokens: int
    end: float = 0.0
    text_parts: list[str] = field(default_factory=list)
    """Text of the output, one entry per chunk."""
    failure: str = ""
    """Kind of failure; empty if the request succeeded."""
    detail: str = ""
    """Message of the server or the socket about the failure."""

    def fail(self, failure: str, detail: object) -> None:
        """Mark the request as failed."""
        self.failure, self.detail = failure, str(detail)


def open_session(config: ServeConfig, api_key: str | None) -> aiohttp.ClientSession:
    """Return a session without a limit on connections."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=config.request_timeout),
        headers=headers,
    )


def request_body(config: ServeConfig, model: str, index: int, planned: PlannedRequest) -> bytes:
    """Return the JSON body of a request."""
    body: dict[str, Any] = {"model": model}
    if config.chat:
        body["messages"] = [{"role": "user", "content": planned.prompt}]
    else:
        body["prompt"] = planned.prompt
    body["max_tokens"] = planned.output_tokens
    body["temperature"] = config.temperature
    if config.temperature > 0:
        body["seed"] = config.load.seed + index
    if config.ignore_eos:
        body["ignore_eos"] = True
    if planned.priority is not None:
        body["priority"] = planned.priority
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(body | dict(config.extra_body or {}))


async def send(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    prompt_tokens: int,
    conversation: str = "",
) -> RequestResult:
    """Send a request and read its stream to the end; failures are recorded in the result.

    Args:
        session: connections to the server.
        url: of the endpoint.
        body: JSON of the request.
        prompt_tokens: planned length of the prompt.
        conversation: sent as x-session-id, by which routers keep conversations together.
    """
    headers = {"x-session-id": conversation} if conversation else None
    result = RequestResult(RequestTimeline(time.monotonic()), prompt_tokens)
    try:
        async with session.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                result.fail(f"HTTP {response.status}", _error_detail(await response.read()))
            elif response.content_type != "text/event-stream":
                result.fail("no stream", f"the server returned {response.content_type}")
            else:
                await _read_stream(response, result)
    except TimeoutError:
        result.fail("timeout", "the request took longer than --request-timeout")
    except aiohttp.ClientPayloadError as error:
        result.fail("cut off", error)
    except (aiohttp.ClientError, OSError) as error:
        result.fail("connection", error or type(error).__name__)
    except msgspec.DecodeError as error:
        result.fail("invalid event", error)
    result.end = time.monotonic()
    return result


async def _read_stream(response: aiohttp.ClientResponse, result: RequestResult) -> None:
    """Record the time of each chunk until the stream ends."""
    decode = msgspec.json.Decoder(StreamChunk).decode
    reader, has_ended = EventReader(), False
    while data := await response.content.readany():
        now = time.monotonic()
        for event in reader.feed(data):
            if event == DONE:
                has_ended = True
                continue
            chunk = decode(event)
            if chunk.error:
                result.fail("error in the stream", error_message(chunk.error))
                return
            for choice in chunk.choices:
                result.timeline.record_output(now, choice.num_tokens)
                result.text_parts.append(choice.output_text)
                has_ended = has_ended or choice.finish_reason is not None
            if chunk.usage is not None:
                result.prompt_tokens = chunk.usage.prompt_tokens
                result.timeline.num_tokens = chunk.usage.completion_tokens
    if not has_ended:
        result.fail("cut off", "the stream ended without [DONE] or a finish reason")


def _error_detail(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        return error_message(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")
