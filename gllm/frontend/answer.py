"""From a checked request to its answer, streamed or whole.

Owns the order of events. Knows nothing of the endpoints' own shapes: they give a `Writer`.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol

import msgspec
from aiohttp import web
from msgspec.structs import replace

from gllm.engine.interface import Delta
from gllm.frontend.collect import Choice, Tally
from gllm.frontend.context import ARRIVAL, CONTEXT, REQUEST_ID, Context
from gllm.frontend.encoding import encode_piecewise
from gllm.frontend.errors import ApiError, to_api_error
from gllm.frontend.outcome import OUTCOME, Outcome
from gllm.frontend.run import Job, Run
from gllm.frontend.sse import Event, EventStream

Json = dict[str, Any]
MAX_SCORED = 2048
"""Log-probabilities written at once on the event loop; more are written in a thread."""


class WholeWriter(Protocol):
    """How an endpoint writes a whole answer. The tally counts what was generated."""

    def whole(self, choices: list[Choice], tally: Tally) -> Json:
        """The answer to a request that does not stream."""


class Writer(WholeWriter, Protocol):
    """How an endpoint writes one answer, streamed or whole."""

    def opening(self, tally: Tally) -> list[Event]:
        """What a stream begins with."""

    def delta(self, delta: Delta, tally: Tally) -> list[Event]:
        """What a delta adds to a stream."""

    def closing(self, tally: Tally) -> list[Event]:
        """What a stream that went well ends with."""

    def failed(self, error: ApiError) -> list[Event]:
        """What a stream ends with instead."""


async def answer(
    request: web.Request, context: Context, job: Job, writer: Writer
) -> web.StreamResponse:
    """Run a job and answer with what it brings."""
    if not job.fields.stream:
        return await answer_whole(request, context, job, writer)
    with _running(request, context, job) as (run, tally):
        return await _stream(request, run, writer, tally)


async def answer_whole(
    request: web.Request, context: Context, job: Job, writer: WholeWriter
) -> web.Response:
    """Run a job and answer once all of it is there."""
    with _running(request, context, job) as (run, tally):
        await run.start()
        choices = await _collect(run, job, tally)
        if num_scored(choices) > MAX_SCORED:
            body = await asyncio.to_thread(_encode_whole, writer, choices, tally)
        else:
            body = msgspec.json.encode(writer.whole(choices, tally))
    return web.Response(body=body, content_type="application/json")


@contextmanager
def _running(request: web.Request, context: Context, job: Job) -> Iterator[tuple[Run, Tally]]:
    """Run a job within the block; the request's record of it is kept."""
    tally = Tally(sum(map(len, job.prompts)), job.params.n, job.reasoning)
    request_id = job.fields.request_id or request[REQUEST_ID]
    run = Run(context.engine, context.metrics, job, request_id, request[ARRIVAL])
    with closing(run):
        request[OUTCOME] = Outcome(job.params, bool(job.fields.stream), tally, run.records)
        yield run, tally


def num_scored(parts: Sequence[Delta] | Sequence[Choice]) -> int:
    """Count the log-probabilities that parts of an answer return."""
    scored = [
        len(entries) * (len(entries[0].top_ids) + 1)
        for part in parts
        for entries in (part.logprobs, part.prompt_logprobs)
        if entries
    ]
    return sum(scored)


def _encode_whole(writer: WholeWriter, choices: list[Choice], tally: Tally) -> bytes:
    return encode_piecewise(writer.whole(choices, tally))


async def _collect(run: Run, job: Job, tally: Tally) -> list[Choice]:
    """All choices, finished. Raises ApiError for one that failed."""
    choices = [Choice(i) for i in range(job.choices)]

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
    request: web.Request, run: Run, writer: Writer, tally: Tally
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


async def _send_all(stream: EventStream, run: Run, writer: Writer, tally: Tally) -> None:
    events = writer.opening(tally)
    large: list[Delta] = []

    def write(deltas: list[Delta]) -> None:
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
        if num_scored(deltas) > MAX_SCORED:
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


def _failure(delta: Delta) -> ApiError:
    """Why a choice has failed."""
    return ApiError(500, delta.error or "generation failed", code="generation_failed")
