"""From a checked request to its answer, streamed or whole.

Owns the order of events. Knows nothing of the endpoints' own shapes: they give a `Writer`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from aiohttp import web
from msgspec.structs import replace

from gllm.config import SamplingParams
from gllm.engine_api import Delta
from gllm.frontend.collect import Choice, Deltas, Tally, merged
from gllm.frontend.context import ARRIVAL, CONTEXT, REQUEST_ID, Context
from gllm.frontend.errors import ApiError, to_api_error
from gllm.frontend.fields.generation import Generation
from gllm.frontend.metrics import RequestRecord
from gllm.frontend.outcome import OUTCOME, Outcome
from gllm.frontend.sse import Event, EventStream
from gllm.text.output.parser import PLAIN, OutputFormat
from gllm.text.output.reasoning import ReasoningCounter

Json = dict[str, Any]


class Writer(Protocol):
    """How an endpoint writes one answer. The tally counts what was generated so far."""

    def opening(self, tally: Tally) -> list[Event]:
        """What a stream begins with."""

    def delta(self, delta: Delta, tally: Tally) -> list[Event]:
        """What a delta adds to a stream."""

    def closing(self, tally: Tally) -> list[Event]:
        """What a stream that went well ends with."""

    def failed(self, error: ApiError) -> list[Event]:
        """What a stream ends with instead."""

    def whole(self, choices: list[Choice], tally: Tally) -> Json:
        """The answer to a request that does not stream."""


@dataclass(frozen=True)
class Job:
    """A request ready to run."""

    fields: Generation
    prompts: list[list[int]]
    params: SamplingParams
    generates: bool = True
    """If not, what is drawn is not shown: the prompt is all that matters."""
    output: OutputFormat = PLAIN
    """What the choices may hold besides text."""
    reasoning: Callable[[], ReasoningCounter] | None = None
    """Makes what counts a choice's tokens of reasoning, where they can be told apart."""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.params.n


async def answer(
    request: web.Request, context: Context, job: Job, writer: Writer
) -> web.StreamResponse:
    """Run a job and answer with what it brings."""
    tally = Tally(sum(map(len, job.prompts)), job.params.n, job.reasoning)
    request_id = job.fields.request_id or request[REQUEST_ID]
    outcome = request[OUTCOME] = Outcome(job.params, bool(job.fields.stream), tally)
    async with _start(context, job, request_id, request[ARRIVAL], outcome) as source:
        if job.fields.stream:
            return await _stream(request, source, writer, tally)
        choices = await _collect(source, job, tally)
    body = msgspec.json.encode(writer.whole(choices, tally))
    return web.Response(body=body, content_type="application/json")


def _start(context: Context, job: Job, request_id: str, arrival: float, outcome: Outcome) -> Deltas:
    """The engine's deltas for all prompts."""
    sources = []
    n = job.params.n
    for prompt in job.prompts:
        deltas = context.engine.generate(
            prompt,
            job.params,
            priority=job.fields.priority or 0,
            cache_salt=job.fields.cache_salt or "",
            request_id=request_id,
        )
        if not job.generates:
            deltas = _without_output(deltas)
        record = RequestRecord(context.metrics, arrival, len(prompt), n)
        outcome.records.append(record)
        sources.append((deltas, record))
    return merged(sources, n)


async def _without_output(deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """The deltas, as if nothing had been drawn."""
    async with aclosing(deltas):
        async for delta in deltas:
            bare = replace(delta, text="", token_ids=[], logprobs=[], stop_reason=None)
            yield replace(bare, finish_reason="length") if delta.finish_reason == "stop" else bare


async def _collect(source: Deltas, job: Job, tally: Tally) -> list[Choice]:
    """All choices, finished. Raises ApiError for one that failed."""
    choices = [Choice(i) for i in range(job.choices)]
    while deltas := await source.take():
        for delta in deltas:
            _check(delta)
            tally.add(delta)
            choices[delta.index].add(delta)
    return choices


async def _stream(
    request: web.Request, source: Deltas, writer: Writer, tally: Tally
) -> web.StreamResponse:
    """The choices as events. What fails before the first delta still gets its status code, unless
    that was long in coming."""
    stream = EventStream(request, request.app[CONTEXT].config.write_timeout)
    with stream.watched():
        try:
            # A task of its own: its every step would else go through all that a request passes.
            await asyncio.create_task(_send_all(stream, source, writer, tally))
        except ConnectionError:
            return stream.response  # the client is gone, and leaving aborts what runs
        except Exception as error:
            if not stream.is_open:
                raise
            await stream.send(writer.failed(to_api_error(error)))
        await stream.end()
    return stream.response


async def _send_all(stream: EventStream, source: Deltas, writer: Writer, tally: Tally) -> None:
    deltas = await source.take()
    await stream.open()
    await stream.send(writer.opening(tally))
    while deltas:
        events: list[Event] = []
        try:
            for delta in deltas:
                if delta.finish_reason is not None:
                    _check(delta)
                tally.add(delta)
                events += writer.delta(delta, tally)
        finally:
            # What came before a failed choice is shown before its error.
            await stream.send(events)
        deltas = await source.take()
    await stream.send(writer.closing(tally))


def _check(delta: Delta) -> None:
    """Raises ApiError for a choice that failed."""
    if delta.finish_reason == "error":
        raise ApiError(500, delta.error or "generation failed", code="generation_failed")
