"""From a checked request to its answer, streamed or whole.

Owns the order of events. Knows nothing of the endpoints' own shapes: they give a `AnswerWriter`.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol

import msgspec
from aiohttp import web
from msgspec.structs import replace

from gllm.engine.interface import OutputDelta
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.context import ARRIVAL, CONTEXT, REQUEST_ID, ServerContext
from gllm.frontend.errors import ApiError, to_api_error
from gllm.frontend.json_encoding import encode_json_in_pieces
from gllm.frontend.request_run import PreparedRequest, RequestRun
from gllm.frontend.request_summary import SUMMARY, RequestSummary
from gllm.frontend.sse import EventStream, ServerSentEvent

JsonObject = dict[str, Any]
MAX_INLINE_LOGPROBS = 2048
"""Log-probabilities written at once on the event loop; more are written in a thread."""


class WholeAnswerWriter(Protocol):
    """How an endpoint writes a whole answer. The tally counts what was generated."""

    def whole(self, choices: list[CollectedChoice], tally: UsageCounter) -> JsonObject:
        """The answer to a request that does not stream."""


class AnswerWriter(WholeAnswerWriter, Protocol):
    """How an endpoint writes one answer, streamed or whole."""

    def opening(self, tally: UsageCounter) -> list[ServerSentEvent]:
        """What a stream begins with."""

    def delta(self, delta: OutputDelta, tally: UsageCounter) -> list[ServerSentEvent]:
        """What a delta adds to a stream."""

    def closing(self, tally: UsageCounter) -> list[ServerSentEvent]:
        """What a stream that went well ends with."""

    def failed(self, error: ApiError) -> list[ServerSentEvent]:
        """What a stream ends with instead."""


async def send_answer(
    request: web.Request, context: ServerContext, job: PreparedRequest, writer: AnswerWriter
) -> web.StreamResponse:
    """RequestRun a job and answer with what it brings."""
    if not job.fields.stream:
        return await send_whole_answer(request, context, job, writer)
    with _running(request, context, job) as (run, tally):
        return await _stream(request, run, writer, tally)


async def send_whole_answer(
    request: web.Request, context: ServerContext, job: PreparedRequest, writer: WholeAnswerWriter
) -> web.Response:
    """RequestRun a job and answer once all of it is there."""
    with _running(request, context, job) as (run, tally):
        await run.start()
        choices = await _collect(run, job, tally)
        if num_logprobs(choices) > MAX_INLINE_LOGPROBS:
            body = await asyncio.to_thread(_encode_whole, writer, choices, tally)
        else:
            body = msgspec.json.encode(writer.whole(choices, tally))
    return web.Response(body=body, content_type="application/json")


@contextmanager
def _running(
    request: web.Request, context: ServerContext, job: PreparedRequest
) -> Iterator[tuple[RequestRun, UsageCounter]]:
    """RequestRun a job within the block; the request's record of it is kept."""
    tally = UsageCounter(sum(map(len, job.prompts)), job.params.n, job.reasoning)
    request_id = job.fields.request_id or request[REQUEST_ID]
    run = RequestRun(context.engine, context.metrics, job, request_id, request[ARRIVAL])
    with closing(run):
        request[SUMMARY] = RequestSummary(job.params, bool(job.fields.stream), tally, run.records)
        yield run, tally


def num_logprobs(parts: Sequence[OutputDelta] | Sequence[CollectedChoice]) -> int:
    """Count the log-probabilities that parts of an answer return."""
    scored = [
        len(entries) * (len(entries[0].top_ids) + 1)
        for part in parts
        for entries in (part.logprobs, part.prompt_logprobs)
        if entries
    ]
    return sum(scored)


def _encode_whole(
    writer: WholeAnswerWriter, choices: list[CollectedChoice], tally: UsageCounter
) -> bytes:
    return encode_json_in_pieces(writer.whole(choices, tally))


async def _collect(
    run: RequestRun, job: PreparedRequest, tally: UsageCounter
) -> list[CollectedChoice]:
    """All choices, finished. Raises ApiError for one that failed."""
    choices = [CollectedChoice(i) for i in range(job.choices)]

    def push() -> bool:
        for delta in run.take():
            if delta.finish_reason == "error":
                raise _failure(delta)
            tally.add(delta)
            choices[delta.index].add(delta)
        return True

    await run.pour(push)
    return choices


async def _stream(
    request: web.Request, run: RequestRun, writer: AnswerWriter, tally: UsageCounter
) -> web.StreamResponse:
    """The choices as events. What fails before the first delta still gets its status code, unless
    that was long in coming."""
    stream = EventStream(request, request.app[CONTEXT].config.write_timeout)
    with stream.watched():
        try:
            await run.start()
            await _send_all(stream, run, writer, tally)
        except ConnectionError:
            return stream.response  # the client is gone, and leaving aborts what runs
        except Exception as error:
            if not stream.is_open:
                raise
            stream.put(writer.failed(to_api_error(error)))
        await stream.end()
    return stream.response


async def _send_all(
    stream: EventStream, run: RequestRun, writer: AnswerWriter, tally: UsageCounter
) -> None:
    events = writer.opening(tally)
    large: list[OutputDelta] = []

    def write(deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            failed = delta.finish_reason == "error"
            shown = replace(delta, finish_reason=None) if failed else delta
            tally.add(shown)
            events.extend(writer.delta(shown, tally))
            if failed:
                raise _failure(delta)

    def put() -> None:
        stream.put(events)
        events.clear()

    def push() -> bool:
        deltas = run.take()
        if num_logprobs(deltas) > MAX_INLINE_LOGPROBS:
            large.extend(deltas)
            return False
        try:
            write(deltas)
        finally:
            # What came before a choice failed is shown before its error.
            put()
        return stream.is_fluent

    while not run.ended:
        await run.pour(push)
        if large:
            try:
                await asyncio.to_thread(write, large)
            finally:
                put()
                large.clear()
        await stream.flush()
    stream.put(writer.closing(tally))


def _failure(delta: OutputDelta) -> ApiError:
    """Why a choice has failed."""
    return ApiError(500, delta.error or "generation failed", code="generation_failed")
