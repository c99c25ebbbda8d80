"""Client of `gllm bench serve`: wait for the server, send the requests, record their outputs.

Times are of time.monotonic, taken once per read of the socket.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec

from gllm.commands.bench.load import PlannedRequest
from gllm.commands.bench.options import RequestConfig
from gllm.deploy.server_client import DONE, EventReader, error_message
from gllm.observability.latency import RequestTimeline
from gllm.observability.progress import show_progress

FALLBACK_VOCABULARY = 256
"""Vocabulary size assumed if the server does not report it."""
POLL_SECONDS = 0.5
"""Time between two attempts to reach the server."""


class StreamDelta(msgspec.Struct):
    """`delta` object of a streamed chunk of /v1/chat/completions."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str:
        """Content of the delta, or reasoning text if it has no content."""
        return self.content or self.reasoning or self.reasoning_content or ""


class StreamChoice(msgspec.Struct):
    """Entry of `choices` in a streamed chunk of /v1/completions or /v1/chat/completions."""

    text: str | None = None
    delta: StreamDelta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def output_text(self) -> str:
        """Generated text of the chunk, from either endpoint's field."""
        return self.text or (self.delta.text if self.delta else "")

    @property
    def num_tokens(self) -> int:
        """Number of token ids; 1 if the chunk has text but no ids."""
        if self.token_ids:
            return len(self.token_ids)
        return int(bool(self.output_text or (self.delta and self.delta.tool_calls)))


class StreamPromptDetails(msgspec.Struct):
    """`prompt_tokens_details` of a `usage` object."""

    cached_tokens: int | None = None
    """Prompt tokens that were in the server's prefix cache; None if it does not say."""


class StreamUsage(msgspec.Struct):
    """`usage` object of a streamed chunk: the server's counts of prompt and output tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: StreamPromptDetails | None = None


class StreamChunk(msgspec.Struct):
    """Streamed chunk of /v1/completions or /v1/chat/completions: one server-sent event, decoded."""

    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None
    error: Any = None


KEEP_ALIVE_SECONDS = 4.0
"""Time that an idle connection is kept. Servers close theirs after 5 s or more; a request sent at
that moment would fail."""


@dataclass
class RequestResult:
    """Outcome of one benchmark request: times of its chunks, output text and failure."""

    timeline: RequestTimeline
    prompt_tokens: int
    end: float = 0.0
    text_parts: list[str] = field(default_factory=list)
    """Text of the output, one entry per chunk."""
    token_ids: list[int] = field(default_factory=list)
    """Ids of the output, if the server sends them."""
    cached_tokens: int | None = None
    """Prompt tokens in the server's prefix cache; None if it does not say."""
    failure: str = ""
    """Kind of failure; empty if the request succeeded."""
    detail: str = ""
    """Message of the server or the socket about the failure."""

    def fail(self, failure: str, detail: object) -> None:
        """Mark the request as failed.

        Args:
            failure: kind of failure, by which the report counts.
            detail: message of the server or the socket.
        """
        self.failure, self.detail = failure, str(detail)


def open_session(config: RequestConfig, api_key: str | None) -> aiohttp.ClientSession:
    """Return an HTTP session with the API key in its headers and no limit on connections."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=config.request_timeout),
        headers=headers,
    )


def request_body(config: RequestConfig, model: str, index: int, planned: PlannedRequest) -> bytes:
    """Return the JSON body of a streaming request with a given prompt and output length."""
    body: dict[str, Any] = {"model": model}
    if config.chat:
        is_text = isinstance(planned.prompt, str)
        body["messages"] = (
            [{"role": "user", "content": planned.prompt}] if is_text else planned.prompt
        )
    else:
        body["prompt"] = planned.prompt
    body["max_tokens"] = planned.output_tokens
    body["temperature"] = config.temperature
    if config.temperature > 0:
        body["seed"] = config.request_seed + index
    if config.ignore_eos:
        body["ignore_eos"] = True
    if planned.priority is not None:
        body["priority"] = planned.priority
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode({**body, **config.request_fields, **(config.extra_body or {})})


async def send(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    prompt_tokens: int,
    conversation: str = "",
) -> RequestResult:
    """Send a streaming request and read its stream to the end; failures are recorded in the result.

    Args:
        session: HTTP session of the benchmark.
        url: URL of the completions or chat completions endpoint.
        body: request as JSON.
        prompt_tokens: planned length of the prompt; the server's own count replaces it.
        conversation: value of the header x-session-id, by which a router sends all requests of a
            conversation to the same engine; empty for no header.
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
                result.token_ids += choice.token_ids or ()
                has_ended = has_ended or choice.finish_reason is not None
            if chunk.usage is not None:
                result.prompt_tokens = chunk.usage.prompt_tokens
                result.timeline.num_tokens = chunk.usage.completion_tokens
                if (details := chunk.usage.prompt_tokens_details) is not None:
                    result.cached_tokens = details.cached_tokens
    if not has_ended:
        result.fail("cut off", "the stream ended without [DONE] or a finish reason")


def _error_detail(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        return error_message(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")


Send = Callable[[int], Awaitable[RequestResult]]
"""Coroutine function that sends the request with an index in the load."""


@dataclass
class LoadResult:
    """Results of all requests of a benchmark run, and its duration in seconds."""

    begin: float
    """Start time, of time.monotonic."""
    outcomes: dict[int, RequestResult] = field(default_factory=dict)
    """Results by index in the load."""
    seconds: float = 0.0
    interrupted: bool = False


async def run_load(
    arrivals: Sequence[float], send: Send, max_concurrency: int | None, progress: bool
) -> LoadResult:
    """Send every request at its arrival time and wait for all results.

    Requests beyond `max_concurrency` wait in order of arrival before they are sent. SIGINT ends the
    run early; the results up to then are returned.

    Args:
        arrivals: seconds from now at which each request is sent, in ascending order.
        send: coroutine function that sends the request with a given index and returns its result.
        max_concurrency: maximum number of requests in progress; None for no limit.
        progress: True to show a progress bar.
    """
    result = LoadResult(time.monotonic())
    limit = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    with show_progress("request", len(arrivals), is_shown=progress) as bar:

        async def send_one(index: int) -> None:
            async with limit:
                result.outcomes[index] = await send(index)
            bar.update()

        async def send_all() -> None:
            async with asyncio.TaskGroup() as group:
                for index, arrival in enumerate(arrivals):
                    wait = result.begin + arrival - time.monotonic()
                    if wait > 0:
                        await asyncio.sleep(wait)
                    group.create_task(send_one(index))

        result.interrupted = await run_until_interrupted(asyncio.ensure_future(send_all()))
    result.seconds = time.monotonic() - result.begin
    return result


async def run_until_interrupted(work: "asyncio.Future[None]") -> bool:
    """Run a task until it ends or SIGINT cancels it; return True if SIGINT did."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, work.cancel)
    try:
        await asyncio.wait({work})
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if work.cancelled():
        return True
    work.result()
    return False


class TargetServerError(Exception):
    """Raised if the benchmarked server is not ready in time or refuses access."""


class ServedModel(NamedTuple):
    """Name and vocabulary size of the model that the benchmarked server serves."""

    name: str
    vocab_size: int


async def wait_until_ready(
    session: aiohttp.ClientSession,
    base_url: str,
    model: str | None,
    seconds: float,
    poll_seconds: float = POLL_SECONDS,
) -> ServedModel:
    """Wait until the server is healthy and return the named model, or the first that it serves.

    Args:
        session: HTTP session of the benchmark.
        base_url: URL of the server, without a path.
        model: name of the model; None for the first one of /v1/models.
        seconds: timeout of the wait.
        poll_seconds: interval between two attempts.

    Raises:
        TargetServerError: the timeout has passed, or the server refuses access.
    """
    deadline = time.monotonic() + seconds
    reason = "no response"
    while (seconds_left := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(seconds_left):
                await _check_health(session, base_url)
                return await _describe(session, base_url, model)
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or reason
        await asyncio.sleep(min(poll_seconds, seconds_left))
    raise TargetServerError(
        f"no server is ready at {base_url} within {seconds:g} s ({reason}): start one, or set "
        "--port or --base-url"
    )


async def _check_health(session: aiohttp.ClientSession, base_url: str) -> None:
    """Raise ClientResponseError if /health reports an error; many servers have no /health."""
    async with session.get(f"{base_url}/health") as response:
        if response.status >= 500:
            response.raise_for_status()


async def _describe(
    session: aiohttp.ClientSession, base_url: str, model: str | None
) -> ServedModel:
    async with session.get(f"{base_url}/v1/models") as response:
        if response.status in (401, 403):
            raise TargetServerError(
                f"{base_url} returned HTTP status {response.status}: set --api-key"
            )
        if response.status >= 500:
            response.raise_for_status()
        try:
            models = {str(listed["id"]): listed for listed in (await response.json())["data"]}
            name = model or next(iter(models))
        except (ValueError, LookupError, TypeError, StopIteration, aiohttp.ContentTypeError):
            if model is None:
                raise TargetServerError(f"{base_url} lists no models: set --model") from None
            models, name = {}, model
    size = models.get(name, {}).get("vocab_size")
    return ServedModel(name, size if isinstance(size, int) else FALLBACK_VOCABULARY)
