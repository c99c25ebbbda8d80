"""Clients of an engine: endless streams, and prompts that arrive meanwhile."""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec

from benchmarks.fleet_processes import open_session
from benchmarks.weak_model import CONTEXT, PRINTABLE
from gllm.commands.bench.client import StreamChunk
from gllm.deploy.server_client import DONE, EventReader, error_message

STREAM_PROMPT_TOKENS = 32
PROMPT_TOKENS, PROMPT_INTERVAL = 500, 2.0
"""Prompts that arrive meanwhile, and the seconds between two."""
WARM_UP_SECONDS = 3.0
"""Time from the first tokens of all streams to the beginning of the measurement."""
START_SECONDS, DRAIN_SECONDS = 60.0, 1.5
"""Limit until all streams have begun; time for the end of the aborted requests."""


@dataclass
class StreamedRequest:
    """A request and the times of its tokens, of time.monotonic."""

    prompt: list[int]
    max_tokens: int
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    """One per token."""

    @property
    def body(self) -> bytes:
        """JSON of the request."""
        return msgspec.json.encode(
            {
                "prompt": self.prompt,
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        )

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None if there is none yet."""
        return self.times[0] - self.sent if self.times else None


class PromptMaker:
    """Random prompts that have nothing in common."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self, num_tokens: int) -> list[int]:
        """Return token ids."""
        return self._random.choices(PRINTABLE, k=num_tokens)


async def send_request(session: aiohttp.ClientSession, url: str, request: StreamedRequest) -> None:
    """Send a request and note the time of each of its tokens.

    Raises:
        RuntimeError: the request has failed.
    """
    request.sent = time.monotonic()
    reader, decode = EventReader(), msgspec.json.Decoder(StreamChunk).decode
    async with session.post(f"{url}/v1/completions", data=request.body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
        while data := await response.content.readany():
            now = time.monotonic()
            for event in reader.feed(data):
                if event == DONE:
                    return
                chunk = decode(event)
                if chunk.error:
                    raise RuntimeError(error_message(chunk.error))
                # Each token of the model is one character.
                num_tokens = sum(len(choice.output_text) for choice in chunk.choices)
                request.times.extend([now] * num_tokens)


@dataclass
class LoadFigures:
    """Tokens of the streams and prompts within the time that was measured."""

    seconds: float
    num_tokens: int
    """Output tokens of the streams."""
    gaps: list[float]
    """Seconds between two tokens of a stream."""
    prompt_ttfts: list[float]
    """Seconds to the first token, of the prompts whose first token came."""
    num_prompts: int
    """Prompts that were sent."""


async def run_load(url: str, num_streams: int, seconds: float, seed: int) -> LoadFigures:
    """Run streams and prompts side by side; return the figures after a warm-up.

    Raises:
        RuntimeError: a request has failed.
        TimeoutError: not all streams have begun after START_SECONDS.
    """
    maker = PromptMaker(seed)
    streams = [
        StreamedRequest(maker.make(STREAM_PROMPT_TOKENS), CONTEXT // 2) for _ in range(num_streams)
    ]
    prompts: list[StreamedRequest] = []
    async with open_session() as session:
        tasks = [asyncio.create_task(send_request(session, url, each)) for each in streams]
        try:
            await _wait_for_first_tokens(streams, tasks)
            arrivals = asyncio.create_task(_send_prompts(session, url, maker, prompts))
            tasks.append(arrivals)
            await asyncio.sleep(WARM_UP_SECONDS)
            begin = time.monotonic()
            await asyncio.sleep(seconds)
            figures = collect_figures(streams, prompts, begin, time.monotonic())
            _raise_failures(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(DRAIN_SECONDS)
    return figures


def collect_figures(
    streams: Sequence[StreamedRequest],
    prompts: Sequence[StreamedRequest],
    begin: float,
    end: float,
) -> LoadFigures:
    """Return the figures of the time from `begin` to `end`."""
    within = [[each for each in stream.times if begin <= each < end] for stream in streams]
    arrived = [prompt for prompt in prompts if begin <= prompt.sent < end]
    return LoadFigures(
        end - begin,
        sum(map(len, within)),
        [after - before for times in within for before, after in pairwise(times)],
        [prompt.ttft for prompt in arrived if prompt.ttft is not None],
        len(arrived),
    )


async def send_schedule(
    url: str, requests: Sequence[tuple[float, StreamedRequest]]
) -> list[StreamedRequest]:
    """Send each request at its time in seconds; return all once they have ended."""
    async with open_session() as session:
        begin = time.monotonic()

        async def send_later(seconds: float, request: StreamedRequest) -> StreamedRequest:
            await asyncio.sleep(begin + seconds - time.monotonic())
            await send_request(session, url, request)
            return request

        return await asyncio.gather(*(send_later(*each) for each in requests))


async def _wait_for_first_tokens(
    streams: Sequence[StreamedRequest], tasks: Sequence["asyncio.Task[None]"]
) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not all(stream.times for stream in streams):
            _raise_failures(tasks)
            await asyncio.sleep(0.05)


async def _send_prompts(
    session: aiohttp.ClientSession, url: str, maker: PromptMaker, prompts: list[StreamedRequest]
) -> None:
    """Send a prompt at each interval, whether or not earlier ones have been answered."""
    async with asyncio.TaskGroup() as group:
        while True:
            prompts.append(StreamedRequest(maker.make(PROMPT_TOKENS), 1))
            group.create_task(send_request(session, url, prompts[-1]))
            await asyncio.sleep(PROMPT_INTERVAL)


def _raise_failures(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Raise the error of a task that has failed."""
    for task in tasks:
        if task.done():
            with suppress(asyncio.CancelledError):
                task.result()
