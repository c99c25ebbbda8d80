"""Client of the driver in the parent process: requests out, token deltas back to their readers.

It assigns sequence ids and has the stream of each running request.
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
from gllm.runtime.bus import Peer
from gllm.scheduler.plan import FinishedSequence, FirstToken, SchedulerStats

log = logging.getLogger(__name__)


class TokenDelta(msgspec.Struct):
    """New output of one choice since its stream was last read."""

    tokens: list[int] = []
    """Token ids."""
    logprobs: list[TokenLogprobs] = []
    """Log-probability of each token, if requested."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Log-probabilities of the prompt from its second token on; in the first delta."""
    embedding: bytes = b""
    """As in SampleDetails, if requested."""
    first: FirstToken | None = None
    """Set in the first delta of the choice."""
    end: FinishedSequence | None = None
    """Set in the last delta of the choice."""


def _no_listener() -> None:
    """Do nothing: deltas are kept until they are read."""


class RequestStream:
    """Output of one request's choices; a slow reader gets larger deltas."""

    def __init__(self, seq: int, n: int, request_id: str, pending: "list[RequestStream]") -> None:
        """Create the stream.

        Args:
            seq: sequence of the first choice.
            n: number of choices.
            request_id: id of the request, not unique.
            pending: streams whose listeners have to be notified; this stream adds itself when it
                gets its first delta.
        """
        self.seq = seq
        self.request_id = request_id
        self.alive = set(range(seq, seq + n))
        """Sequences that the driver has not ended."""
        self.num_resumptions = 0
        """Number of recoveries after which the request was submitted again."""
        self._listener: Callable[[], None] = _no_listener
        self._pending = pending
        self._deltas: dict[int, TokenDelta] = {}
        """By choice."""

    def delta(self, seq: int) -> TokenDelta:
        """Return the delta to which new output of a sequence is added."""
        choice = seq - self.seq
        delta = self._deltas.get(choice)
        if delta is None:
            if not self._deltas:
                self._pending.append(self)
            delta = self._deltas[choice] = TokenDelta()
        return delta

    def end(self, end: FinishedSequence) -> None:
        """End a sequence, unless it has ended."""
        if end.seq in self.alive:
            self.alive.discard(end.seq)
            self.delta(end.seq).end = end

    def pop_deltas(self) -> dict[int, TokenDelta]:
        """Return the output since the last call, by choice."""
        deltas, self._deltas = self._deltas, {}
        return deltas

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Replace the listener.

        It is called after a step that added output to an empty stream, and at once if the stream
        has output. It must not raise.
        """
        self._listener = listener
        if self._deltas:
            listener()

    def notify(self) -> None:
        """Call the listener, unless another listener has read the output already."""
        if self._deltas:
            self._listener()

    async def wait(self) -> None:
        """Wait until the stream has output; for one task, instead of a listener."""
        has_output = asyncio.Event()
        self.set_listener(has_output.set)
        try:
            await has_output.wait()
        finally:
            self.set_listener(_no_listener)


class EngineClient:
    """Running requests and the latest reports of the pipeline."""

    def __init__(self) -> None:
        self.stats = SchedulerStats()
        self.stage_loads: dict[int, StageUtilization] = {}
        """Latest report by stage."""
        self.bubbles = BubbleReport()
        self.step_sizes: Counter[int] = Counter()
        """Number of micro-batches by their tokens, rounded up to a power of two."""
        self._driver: Peer | None = None
        self._next_seq = 0
        self._streams: dict[int, RequestStream] = {}
        """By running sequence."""
        self._pending: list[RequestStream] = []
        """Streams with new output whose listeners have not been notified."""
        self._num_requests = 0
        self._last_progress = time.monotonic()
        """Time of the last finished step."""

    @property
    def num_requests(self) -> int:
        """Requests that were submitted and not released."""
        return self._num_requests

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the last finished step, while requests run; else 0."""
        return time.monotonic() - self._last_progress if self._streams else 0.0

    def connect(self, driver: Peer) -> None:
        """Set the driver."""
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
        """Send a request to the driver, with sequence ids that have never been used.

        Args:
            prompt: token ids.
            sampling: parameters of the first choice.
            max_tokens: most tokens to generate for each choice.
            stop_ids: token ids that end a choice.
            n: number of choices.
            priority: requests with smaller values run earlier.
            cache_salt: cached prefixes are shared within one salt.
            request_id: for `abort_request`.

        Raises:
            TypeError, ValueError, OverflowError: an argument cannot be encoded; nothing was sent.
        """
        seq = self._next_seq
        # First, because encoding may raise.
        self._send(
            SubmitRequest(seq, prompt, sampling, max_tokens, stop_ids, n, priority, cache_salt)
        )
        if not self._streams:
            self._last_progress = time.monotonic()
        self._next_seq += n
        stream = RequestStream(seq, n, request_id, self._pending)
        self._streams.update(dict.fromkeys(stream.alive, stream))
        self._num_requests += 1
        return stream

    def abort(self, seqs: list[int]) -> None:
        """Abort sequences whose output nobody reads any more."""
        running = [seq for seq in seqs if seq in self._streams]
        for seq in running:
            self._streams.pop(seq).alive.discard(seq)
        if running:
            self._send(AbortSequences(running))

    def abort_request(self, request_id: str | None) -> int:
        """End the requests of an id, or all for None, with reason `abort`; return their number."""
        streams = {
            stream.seq: stream
            for stream in self._streams.values()
            if request_id is None or stream.request_id == request_id
        }
        self.abort_streams(list(streams.values()))
        return len(streams)

    def abort_streams(self, streams: list[RequestStream]) -> None:
        """End requests with reason `abort`, which their readers see."""
        for stream in streams:
            running = sorted(stream.alive)
            for seq in running:
                stream.end(FinishedSequence(seq, "abort"))
                del self._streams[seq]
            self._send(AbortSequences(running))
        self._notify()

    def release(self, stream: RequestStream) -> None:
        """Release a request that its reader has finished with; abort its running sequences."""
        self.abort(sorted(stream.alive))
        self._num_requests -= 1

    def on_report(self, message: EngineOutputs | StageUtilization | BubbleReport) -> None:
        """Handle a report of the pipeline."""
        match message:
            case EngineOutputs():
                self._on_outputs(message)
            case StageUtilization(stage):
                self.stage_loads[stage] = message
            case BubbleReport():
                self.bubbles = message

    def fail_all(self, cause: str) -> None:
        """End every request with an error, because the engine has died."""
        self.stats = self.stats._replace(running=0, waiting=0, kv_usage=0.0, in_flight=0)
        for seq, stream in self._streams.items():
            stream.end(FinishedSequence(seq, "error", error=cause))
        self._streams.clear()
        self._notify()

    def _send(self, message: SubmitRequest | AbortSequences) -> None:
        assert self._driver is not None, "no request before the start"
        self._driver.send(message)

    def _on_outputs(self, message: EngineOutputs) -> None:
        """Deliver the output of a step and store the statistics."""
        if message.outcome.num_step_tokens or message.outcome.finished:
            self._last_progress = time.monotonic()
        self.stats = message.stats
        if tokens := message.outcome.num_step_tokens:
            self.step_sizes[1 << (tokens - 1).bit_length()] += 1
        self._deliver(message)
        self._notify()

    def _notify(self) -> None:
        """Call the listeners of streams with new output; one that raises ends its request."""
        pending = self._pending.copy()
        self._pending.clear()
        for stream in pending:
            try:
                stream.notify()
            except Exception as error:
                log.exception("the reader of a request failed")
                self._fail(stream, f"its reader failed: {type(error).__name__}: {error}")

    def _fail(self, stream: RequestStream, error: str) -> None:
        """End a request whose listener has failed."""
        stream.set_listener(_no_listener)
        running = sorted(stream.alive)
        self.abort(running)
        for seq in running:
            stream.delta(seq).end = FinishedSequence(seq, "error", error=error)

    def _deliver(self, message: EngineOutputs) -> None:
        """Add the output of a step to the streams."""
        outcome = message.outcome
        for details in message.details:
            if stream := self._streams.get(details.seq):
                delta = stream.delta(details.seq)
                delta.prompt_logprobs += details.prompt_logprobs
                delta.embedding = details.embedding or delta.embedding
                if details.sampled is not None:
                    delta.logprobs.append(details.sampled)
        for seq, token in zip(outcome.seqs, outcome.token_ids, strict=True):
            if stream := self._streams.get(seq):
                stream.delta(seq).tokens.append(token)
        for first in outcome.first_tokens:
            if stream := self._streams.get(first.seq):
                stream.delta(first.seq).first = first
        for end in outcome.finished:
            if stream := self._streams.pop(end.seq, None):
                stream.end(end)
