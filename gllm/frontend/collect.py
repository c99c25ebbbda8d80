"""Deltas of several prompts as one stream, and what they add up to.

Owns merging, coalescing and counting. Knows nothing of JSON and of sockets.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec.structs import replace

from gllm.engine_api import Delta
from gllm.frontend.metrics import RequestRecord
from gllm.messages import TokenLogprobs
from gllm.text.output.reasoning import ReasoningCounter

Source = tuple[AsyncGenerator[Delta, None], RequestRecord]


class Deltas(Protocol):
    """What comes of a request. A context: leaving it closes what still runs, which aborts it."""

    async def take(self) -> list[Delta]:
        """What came since the last call, waiting for something; empty at the end.

        Raises what a prompt's generator raised.
        """

    async def __aenter__(self) -> "Deltas": ...

    async def __aexit__(self, *_: object) -> None: ...


def merged(sources: Sequence[Source], n: int) -> Deltas:
    """The deltas of all prompts; the choices of prompt i are i * n .. i * n + n - 1."""
    return Single(*sources[0]) if len(sources) == 1 and n == 1 else Merged(sources, n)


class Single:
    """The deltas of one choice, as they come: the engine coalesces what nobody takes."""

    def __init__(self, deltas: AsyncGenerator[Delta, None], record: RequestRecord) -> None:
        self._deltas = deltas
        self._record = record

    async def __aenter__(self) -> "Single":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._deltas.aclose()
        self._record.close()

    async def take(self) -> list[Delta]:
        """As of Deltas."""
        try:
            delta = await self._deltas.__anext__()
        except StopAsyncIteration:
            return []
        self._record.delta(delta)
        return [delta]


class Merged:
    """The deltas of several choices. Deltas that nobody takes are coalesced, one for each."""

    def __init__(self, sources: Sequence[Source], n: int) -> None:
        self._sources = sources
        self._n = n
        self._pending: dict[int, list[Delta]] = {}
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._running = len(sources)
        self._error: Exception | None = None

    async def __aenter__(self) -> "Merged":
        for i, (deltas, record) in enumerate(self._sources):
            self._tasks.append(asyncio.create_task(self._pump(i * self._n, deltas, record)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def take(self) -> list[Delta]:
        """As of Deltas."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._running:
                return []
            self._wake.clear()
            await self._wake.wait()
        pending, self._pending = self._pending, {}
        return [delta for deltas in pending.values() for delta in _coalesced(deltas)]

    async def _pump(
        self, base: int, deltas: AsyncGenerator[Delta, None], record: RequestRecord
    ) -> None:
        """Move one prompt's deltas to where `take` finds them."""
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    record.delta(delta)
                    index = base + delta.index
                    moved = delta if not base else replace(delta, index=index)
                    self._pending.setdefault(index, []).append(moved)
                    self._wake.set()
        except Exception as error:  # told to whoever takes
            self._error = self._error or error
        finally:
            record.close()
            self._running -= 1
            self._wake.set()


@dataclass
class Tally:
    """Token counts of a request."""

    prompt_tokens: int
    n: int
    new_counter: Callable[[], ReasoningCounter] | None = None
    """Makes what counts a choice's tokens of reasoning; None where they are not told."""
    completion_tokens: int = 0
    cached_tokens: int = 0
    counters: dict[int, ReasoningCounter] = field(default_factory=dict)
    """By choice."""

    def add(self, delta: Delta) -> None:
        """Count a delta. The choices of a prompt share it: the first one speaks for all."""
        self.completion_tokens += len(delta.token_ids)
        if delta.cached_tokens and delta.index % self.n == 0:
            self.cached_tokens += delta.cached_tokens
        if self.new_counter is not None:
            if delta.index not in self.counters:
                self.counters[delta.index] = self.new_counter()
            self.counters[delta.index].add(delta.token_ids)

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning among those of completions, None where that is not known."""
        if self.new_counter is None:
            return None
        return sum(counter.count for counter in self.counters.values())

    def usage(self) -> dict[str, Any]:
        """The `usage` object."""
        reasoning = self.reasoning_tokens
        details = {"completion_tokens_details": {"reasoning_tokens": reasoning}}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({} if reasoning is None else details),
        }


@dataclass
class Choice:
    """All of one choice."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def as_delta(self) -> Delta:
        """The choice as the only delta of its own."""
        ending = (self.finish_reason, self.stop_reason)
        return Delta(self.index, self.text, self.token_ids, *ending, logprobs=self.logprobs)


def _coalesced(deltas: list[Delta]) -> list[Delta]:
    """Consecutive deltas of one choice as one; a failure stays apart from what came before it."""
    if len(deltas) > 1 and deltas[-1].finish_reason == "error":
        return [_joined(deltas[:-1]), deltas[-1]]
    return [_joined(deltas)]


def _joined(deltas: list[Delta]) -> Delta:
    """Consecutive deltas of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        cached_tokens=deltas[0].cached_tokens,
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        prompt_logprobs=deltas[0].prompt_logprobs,
    )
