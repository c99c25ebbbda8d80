"""The parent's side of the bus: requests to the driver, tokens back to whoever waits for them.

Owns sequence ids and the streams of requests in the engine. Knows nothing of text and of HTTP.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from gllm.messages.reports import BubbleReport, StageUtilization
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams, TokenLogprobs
from gllm.runtime.bus import Outbox
from gllm.scheduler.plan import FinishedSequence, FirstToken, SchedulerStats

log = logging.getLogger(__name__)


class TokenDelta(msgspec.Struct):
    """What came for one choice since it was last asked for."""

    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """Of each token, where they were asked for."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Of the prompt's tokens from the second on; with the first piece of the first choice."""
    embedding: bytes = b""
    """As of RowLogprobs, where it was asked for."""
    first: FirstToken | None = None
    end: FinishedSequence | None = None


def _nobody_listens() -> None:
    """What comes is kept."""


class RequestStream:
    """The coming tokens of one request's choices. A slow reader gets more of them at a time."""

    def __init__(self, seq: int, n: int, request_id: str, fresh: "list[RequestStream]") -> None:
        """fresh: where to note that something has come and nothing was there."""
        self.seq = seq
        self.request_id = request_id
        self.alive = set(range(seq, seq + n))
        """Sequences that the driver has not ended."""
        self._news: Callable[[], None] = _nobody_listens
        self._fresh = fresh
        self._pieces: dict[int, TokenDelta] = {}

    def piece(self, seq: int) -> TokenDelta:
        """Where to put what came for a sequence."""
        choice = seq - self.seq
        piece = self._pieces.get(choice)
        if piece is None:
            if not self._pieces:
                self._fresh.append(self)
            piece = self._pieces[choice] = TokenDelta()
        return piece

    def end(self, end: FinishedSequence) -> None:
        """A sequence has ended."""
        if end.seq in self.alive:
            self.alive.discard(end.seq)
            self.piece(end.seq).end = end

    def take(self) -> dict[int, TokenDelta]:
        """All that came since the last call, by choice."""
        pieces, self._pieces = self._pieces, {}
        return pieces

    def listen(self, news: Callable[[], None]) -> None:
        """Call this when something has come and nothing was there, after all of a step is; at once
        if something is there. It must not raise. Whoever listened before does not any more."""
        self._news = news
        if self._pieces:
            news()

    def tell(self) -> None:
        """Something has come; nothing to tell where another listener has taken it already."""
        if self._pieces:
            self._news()

    async def wait(self) -> None:
        """Until there is something to take, for one task that nobody listens beside."""
        news = asyncio.Event()
        self.listen(news.set)
        try:
            await news.wait()
        finally:
            self.listen(_nobody_listens)


class EngineClient:
    """Requests under way."""

    def __init__(self) -> None:
        self.stats = SchedulerStats()
        self.stage_loads: dict[int, StageUtilization] = {}
        self.bubbles = BubbleReport()
        self.step_sizes: Counter[int] = Counter()
        """Micro-batches by their tokens, rounded up to a power of two."""
        self._driver: Outbox | None = None
        self._next_seq = 0
        self._streams: dict[int, RequestStream] = {}
        """By sequence, while the sequence lives."""
        self._fresh: list[RequestStream] = []
        """To which something came that they have not been told of."""
        self._requests = 0
        self._progress = time.monotonic()

    @property
    def num_requests(self) -> int:
        """Requests that were submitted and not released."""
        return self._requests

    @property
    def stalled_seconds(self) -> float:
        """For how long work has been pending without a finished step."""
        return time.monotonic() - self._progress if self._streams else 0.0

    def connect(self, driver: Outbox) -> None:
        """Requests go here."""
        self._driver = driver

    def submit(
        self,
        prompt: list[int],
        sampling: SequenceSamplingParams,
        max_tokens: int,
        stop_ids: list[int],
        n: int = 1,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str = "",
    ) -> RequestStream:
        """Send a request to the driver. Its ids have never been used before.

        Raises TypeError, ValueError or OverflowError for what no message can carry; nothing has
        been sent then.
        """
        seq = self._next_seq
        # First of all: what it raises must leave no trace.
        self._send(
            SubmitRequest(seq, prompt, sampling, max_tokens, stop_ids, n, priority, cache_salt)
        )
        if not self._streams:
            self._progress = time.monotonic()
        self._next_seq += n
        stream = RequestStream(seq, n, request_id, self._fresh)
        self._streams.update(dict.fromkeys(stream.alive, stream))
        self._requests += 1
        return stream

    def abort(self, seqs: list[int]) -> None:
        """Nobody waits for these sequences any more."""
        living = [seq for seq in seqs if seq in self._streams]
        for seq in living:
            self._streams.pop(seq).alive.discard(seq)
        if living:
            self._send(AbortSequences(living))

    def end(self, request_id: str | None) -> int:
        """End the requests of this id, all for None, with reason `abort`; the number of them."""
        streams = {
            stream.seq: stream
            for stream in self._streams.values()
            if request_id is None or stream.request_id == request_id
        }
        self.cut(list(streams.values()))
        return len(streams)

    def cut(self, streams: list[RequestStream]) -> None:
        """End these requests with reason `abort`."""
        for stream in streams:
            living = sorted(stream.alive)
            for seq in living:
                stream.end(FinishedSequence(seq, "abort"))
                del self._streams[seq]
            self._send(AbortSequences(living))
        self._tell()

    def release(self, stream: RequestStream) -> None:
        """A request is over for its caller, whatever still runs of it."""
        self.abort(sorted(stream.alive))
        self._requests -= 1

    def hear(self, message: EngineOutputs | StageUtilization | BubbleReport) -> None:
        """What the pipeline says."""
        match message:
            case EngineOutputs():
                self._on_tokens(message)
            case StageUtilization(stage):
                self.stage_loads[stage] = message
            case BubbleReport():
                self.bubbles = message

    def fail_all(self, cause: str) -> None:
        """The engine is gone: every request ends with an error now, and nothing runs or waits."""
        self.stats = self.stats._replace(running=0, waiting=0, kv_usage=0.0, in_flight=0)
        for seq, stream in self._streams.items():
            stream.end(FinishedSequence(seq, "error", error=cause))
        self._streams.clear()
        self._tell()

    def _send(self, message: SubmitRequest | AbortSequences) -> None:
        assert self._driver is not None, "no request before the start"
        self._driver.send(message)

    def _on_tokens(self, message: EngineOutputs) -> None:
        """A step has finished, or the statistics have changed."""
        if message.outcome.num_step_tokens or message.outcome.finished:
            self._progress = time.monotonic()
        self.stats = message.stats
        if tokens := message.outcome.num_step_tokens:
            self.step_sizes[1 << (tokens - 1).bit_length()] += 1
        self._deliver(message)
        self._tell()

    def _tell(self) -> None:
        """Let listeners know, each once however much came. One that raises ends its request."""
        fresh = self._fresh.copy()
        self._fresh.clear()
        for stream in fresh:
            try:
                stream.tell()
            except Exception as error:
                log.exception("the reader of a request failed")
                self._fail(stream, f"its reader failed: {type(error).__name__}: {error}")

    def _fail(self, stream: RequestStream, error: str) -> None:
        """End a request whose listener cannot be told any more."""
        stream.listen(_nobody_listens)
        living = sorted(stream.alive)
        self.abort(living)
        for seq in living:
            stream.piece(seq).end = FinishedSequence(seq, "error", error=error)

    def _deliver(self, message: EngineOutputs) -> None:
        outcome = message.outcome
        for row in message.logprobs:
            if stream := self._streams.get(row.seq):
                piece = stream.piece(row.seq)
                piece.prompt_logprobs += row.prompt
                piece.embedding = row.embedding or piece.embedding
                if row.drawn is not None:
                    piece.logprobs.append(row.drawn)
        for seq, token in zip(outcome.seqs, outcome.token_ids, strict=True):
            if stream := self._streams.get(seq):
                stream.piece(seq).tokens.append(token)
        for first in outcome.first_tokens:
            if stream := self._streams.get(first.seq):
                stream.piece(first.seq).first = first
        for end in outcome.finished:
            if stream := self._streams.pop(end.seq, None):
                stream.end(end)
