"""From a checked request to its answer, streamed or whole.

Owns the order of events and what an answer carries besides its choices. Knows nothing of the
endpoints' own shapes: they give a `Shape`.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
from aiohttp import web

from gllm.config import SamplingParams
from gllm.engine_api import Delta
from gllm.frontend.collect import Choice, Merged, Tally
from gllm.frontend.context import ARRIVAL, REQUEST_ID, Context
from gllm.frontend.errors import ApiError, to_api_error
from gllm.frontend.fields import Common
from gllm.frontend.metrics import RequestRecord
from gllm.frontend.sse import EventStream

Json = dict[str, Any]


class Shape(Protocol):
    """How an endpoint writes its choices."""

    prefix: str
    """What ids begin with."""
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> list[Json]:
        """Choices that open a stream, one chunk for each."""

    def pieces(self, delta: Delta, token_ids: bool) -> list[Json]:
        """A delta as choices, one chunk for each; `token_ids` tells whether to show those."""

    def whole(self, choice: Choice) -> Json:
        """A finished choice."""

    def besides(self, choices: list[Choice]) -> Json:
        """What an answer carries besides its finished choices."""


@dataclass(frozen=True)
class Job:
    """A request ready to run."""

    fields: Common
    prompts: list[list[int]]
    params: SamplingParams
    generates: bool = True
    """If not, what is drawn is not shown: the prompt is all that matters."""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.params.n


async def answer(
    request: web.Request, context: Context, job: Job, shape: Shape
) -> web.StreamResponse:
    """Run a job and answer with what it brings."""
    tally = Tally(sum(map(len, job.prompts)), job.params.n)
    head = {
        "id": f"{shape.prefix}{job.fields.request_id or request[REQUEST_ID]}",
        "created": int(time.time()),
        "model": context.engine.model.name,
    }
    async with _start(context, job, request[ARRIVAL]) as merged:
        if job.fields.stream:
            head = {**head, "object": shape.chunk_object}
            return await _stream(request, merged, job, shape, head, tally)
        choices = await _collect(merged, job, tally)
    written = []
    for choice in choices:
        extra = {"token_ids": choice.token_ids} if job.fields.return_token_ids else {}
        written.append({**shape.whole(choice), **extra})
    body = {
        **head,
        "object": shape.whole_object,
        "choices": written,
        "usage": tally.usage(),
        **shape.besides(choices),
    }
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _start(context: Context, job: Job, arrival: float) -> Merged:
    """The engine's deltas for all prompts."""
    sources = []
    n = job.params.n
    for prompt in job.prompts:
        deltas = context.engine.generate(
            prompt,
            job.params,
            priority=job.fields.priority or 0,
            cache_salt=job.fields.cache_salt or "",
        )
        if not job.generates:
            deltas = _without_output(deltas)
        sources.append((deltas, RequestRecord(context.metrics, arrival, len(prompt), n)))
    return Merged(sources, n)


async def _without_output(deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """The deltas, as if nothing had been drawn."""
    async with aclosing(deltas):
        async for delta in deltas:
            bare = replace(delta, text="", token_ids=[], logprobs=[], stop_reason=None)
            yield replace(bare, finish_reason="length") if delta.finish_reason == "stop" else bare


async def _collect(merged: Merged, job: Job, tally: Tally) -> list[Choice]:
    """All choices, finished. Raises ApiError for one that failed."""
    choices = [Choice(i) for i in range(job.choices)]
    while deltas := await merged.take():
        for delta in deltas:
            _check(delta)
            tally.add(delta)
            choices[delta.index].add(delta)
    return choices


async def _stream(
    request: web.Request, merged: Merged, job: Job, shape: Shape, head: Json, tally: Tally
) -> web.StreamResponse:
    """The choices as events. Whatever fails before the first delta still gets its status code."""
    deltas = await merged.take()
    stream = await EventStream.open(request)
    options = job.fields.stream_options
    continuous = options is not None and bool(options.continuous_usage_stats)

    def chunk(choice: Json) -> Json:
        usage = {"usage": tally.usage()} if continuous else {}
        return {**head, "choices": [choice], **usage}

    try:
        await stream.send(chunk(c) for i in range(job.choices) for c in shape.opening(i))
        while deltas:
            events: list[Json] = []
            try:
                for delta in deltas:
                    _check(delta)
                    tally.add(delta)
                    pieces = shape.pieces(delta, bool(job.fields.return_token_ids))
                    events += [chunk(piece) for piece in pieces]
            finally:
                # What came before a failed choice is shown before its error.
                await stream.send(events)
            deltas = await merged.take()
        if options is not None and options.include_usage:
            await stream.send([{**head, "choices": [], "usage": tally.usage()}])
    except ConnectionError:
        return stream.response  # the client is gone, and leaving aborts what runs
    except Exception as error:
        await stream.send([to_api_error(error).body()])
    await stream.done()
    return stream.response


def _check(delta: Delta) -> None:
    """Raises ApiError for a choice that failed."""
    if delta.finish_reason == "error":
        raise ApiError(500, delta.error or "generation failed", code="generation_failed")
