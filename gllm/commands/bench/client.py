"""One request, from its sending to the end of its stream.

Owns what is sent, when output came, and how a request can fail. Knows nothing of load and of
figures. Times are of time.monotonic, taken once for each read of the socket.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from gllm.commands.bench.events import DONE, Chunk, EventReader, error_message
from gllm.commands.bench.load import Planned
from gllm.commands.bench.options import ServeConfig
from gllm.observability.latency import RequestTimeline

KEEP_ALIVE = 4.0
"""Seconds an idle connection is kept: servers drop theirs after 5 or more, and a request sent into
that moment would fail."""


@dataclass
class Outcome:
    """What became of a request."""

    line: RequestTimeline
    prompt_tokens: int
    end: float = 0.0
    pieces: list[str] = field(default_factory=list)
    """The output's text."""
    failure: str = ""
    """Kind of failure; empty where there was none."""
    detail: str = ""
    """What the server or the socket said of it."""

    def fail(self, failure: str, detail: object) -> None:
        """It has failed."""
        self.failure, self.detail = failure, str(detail)


def open_session(config: ServeConfig, api_key: str | None) -> aiohttp.ClientSession:
    """Connections to the server, as many as there are requests."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
        timeout=aiohttp.ClientTimeout(total=config.request_timeout),
        headers=headers,
    )


def request_body(config: ServeConfig, model: str, index: int, planned: Planned) -> bytes:
    """The request's JSON."""
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
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(body | dict(config.extra_body or {}))


async def send(
    session: aiohttp.ClientSession, url: str, body: bytes, prompt_tokens: int
) -> Outcome:
    """Send a request and read its stream to the end; failures are in the outcome."""
    outcome = Outcome(RequestTimeline(time.monotonic()), prompt_tokens)
    try:
        async with session.post(url, data=body) as response:
            if response.status != 200:
                outcome.fail(f"HTTP {response.status}", _reason(await response.read()))
            elif response.content_type != "text/event-stream":
                outcome.fail("no stream", f"the server answered with {response.content_type}")
            else:
                await _read(response, outcome)
    except TimeoutError:
        outcome.fail("timeout", "the request took longer than --request-timeout")
    except aiohttp.ClientPayloadError as error:
        outcome.fail("cut off", error)
    except (aiohttp.ClientError, OSError) as error:
        outcome.fail("connection", error or type(error).__name__)
    except msgspec.DecodeError as error:
        outcome.fail("not understood", error)
    outcome.end = time.monotonic()
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Note when output comes, until the stream ends."""
    decode = msgspec.json.Decoder(Chunk).decode
    reader, ended = EventReader(), False
    while data := await response.content.readany():
        now = time.monotonic()
        for event in reader.feed(data):
            if event == DONE:
                ended = True
                continue
            chunk = decode(event)
            if chunk.error:
                outcome.fail("error in the stream", error_message(chunk.error))
                return
            for choice in chunk.choices:
                outcome.line.mark(now, choice.tokens)
                outcome.pieces.append(choice.shown)
                ended = ended or choice.finish_reason is not None
            if chunk.usage is not None:
                outcome.prompt_tokens = chunk.usage.prompt_tokens
                outcome.line.tokens = chunk.usage.completion_tokens
    if not ended:
        outcome.fail("cut off", "the stream ended without [DONE] or a finish reason")


def _reason(body: bytes) -> str:
    """What a refusal says."""
    try:
        return error_message(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")
