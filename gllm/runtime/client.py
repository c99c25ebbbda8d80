"""Client of the driver in the parent process: requests out, token deltas back to their readers.

It keeps a journal of the running requests. While no driver is attached their streams stay open and
they are parked; the next driver gets them again with the tokens that were delivered.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from gllm.messages.codec import encode
from gllm.messages.reports import BubbleReport, StageUtilization
from gllm.messages.requests import AbortSequences, EngineOutputs, ErrorKind, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.delivery import SubmittedChoice, deliver
from gllm.runtime.journal import JournalEntry
from gllm.runtime.report_totals import ReportTotals
from gllm.runtime.request_stream import RequestStream
from gllm.runtime.suspects import PoisonList, SuspectTracker
from gllm.scheduler.plan import FinishedSequence, SchedulerStats

log = logging.getLogger(__name__)

SendFunction = Callable[[SubmitRequest | AbortSequences], None]
"""Function that sends a message to the driver."""

_POISON_ERROR = (
    "a worker died each time that it computed this request, the last time while no other request "
    "ran; it is not tried again"
)


class EngineClient:
    """Running requests and the latest reports of the pipeline."""

    def __init__(self) -> None:
        self.step_sizes: Counter[int] = Counter()
        """Number of micro-batches by their tokens, rounded up to a power of two."""
        self.num_resumed_requests = 0
        """Requests that were submitted again, each time counted."""
        self._send: SendFunction | None = None
        """None while requests are parked."""
        self._next_seq = 0
        """Wire ids are never used again, not even by another driver."""
        self._streams: dict[RequestStream, None] = {}
        """Running requests in order of arrival."""
        self._choices: dict[int, SubmittedChoice] = {}
        """By wire id, of submitted requests."""
        self._pending: list[RequestStream] = []
        """Streams with new output whose listeners have not been notified."""
        self._num_requests = 0
        self._last_progress = time.monotonic()
        """Time of the last finished step."""
        self._totals = ReportTotals()
        self._is_reporting = False
        """False from the end of a scheduler to the start of the next one."""
        self._suspects: SuspectTracker[RequestStream] = SuspectTracker()
        self._poison = PoisonList()
        self._is_isolating = False
        """True while suspects run one after the other and other requests are parked."""
        self._retired: dict[int, RequestStream] = {}
        """Requests that were taken back from the driver for that, by wire id, until it is idle."""

    @property
    def num_requests(self) -> int:
        """Requests that were submitted and not released."""
        return self._num_requests

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the last finished step, while a driver has requests; else 0."""
        return time.monotonic() - self._last_progress if self._choices else 0.0

    @property
    def is_attached(self) -> bool:
        """True if requests go to a driver."""
        return self._send is not None

    @property
    def stats(self) -> SchedulerStats:
        """State of the scheduler, with counters over all generations; parked choices wait."""
        stats = self._totals.stats
        if self._send is not None and not self._is_isolating:
            return stats
        num_parked = sum(len(each.alive) for each in self._streams if each.entry.is_parked)
        return stats._replace(waiting=stats.waiting + num_parked)

    @property
    def stage_loads(self) -> dict[int, StageUtilization]:
        """Totals of each stage over all generations."""
        return self._totals.stage_loads

    @property
    def bubbles(self) -> BubbleReport:
        """Idle time over all generations."""
        return self._totals.bubbles

    def attach(self, send: SendFunction) -> None:
        """Submit the parked requests to a driver, in order of arrival, and from now on new ones.

        Suspects of deaths run alone before, one after the other.
        """
        self._send = send
        self._is_reporting = True
        self._is_isolating = bool(self._suspects.suspects(self._streams))
        if self._is_isolating:
            self._continue_isolation(is_idle=True)
        else:
            self._submit_parked()

    def detach(self, cause: str) -> None:
        """Park all requests, because the driver has ended; a warm-up fails with the cause."""
        self._send = None
        for stream in {choice.stream: None for choice in self._choices.values()}:
            stream.entry.seqs.clear()
            if stream not in self._streams:
                self._end(stream, stream.alive, "error", cause)
        self._choices.clear()
        self._suspects.stop_isolation()
        self._is_isolating = self._is_reporting = False
        self._retired.clear()
        self._totals.next_generation()
        self._notify()

    def on_death(self, seqs: Collection[int]) -> bool:
        """Count an unplanned death of a worker; called before `detach`.

        Args:
            seqs: wire ids with rows in uncommitted plans.

        Returns:
            True if one request is to blame. It has ended with an error.
        """
        owners = self._retired | {seq: choice.stream for seq, choice in self._choices.items()}
        poison = self._suspects.on_death(seqs, owners)
        if poison is None:
            return False
        entry = poison.entry
        self._poison.add(entry.prompt, entry.sampling, time.monotonic())
        self._end(poison, poison.alive, "error", _POISON_ERROR, "poison")
        self._notify()
        return True

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
        """Send a request to the driver, or park it.

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
            PoisonRequestError: equal requests have killed workers.
        """
        now = time.monotonic()
        entry = JournalEntry(
            prompt, sampling, max_tokens, stop_ids, n, priority, cache_salt, arrival=now
        )
        self._poison.check(prompt, sampling, now)
        stream = RequestStream(entry, request_id, self._pending)
        if self._send is not None and not self._is_isolating:
            self._submit(stream, self._send)
        else:
            encode(entry.submission(self._next_seq, now))
        entry.pack_prompt()
        self._streams[stream] = None
        self._num_requests += 1
        return stream

    def submit_warm_up(self, send: SendFunction) -> RequestStream:
        """Send a request of one token to a driver that is not attached yet.

        It is not in the journal, so it ends with an error when its driver does, and needs no
        release.
        """
        self._is_reporting = True
        greedy = SequenceSamplingParams(temperature=0)
        entry = JournalEntry([0], greedy, 1, [], 1, 0, "", arrival=time.monotonic())
        stream = RequestStream(entry, "", self._pending)
        self._submit(stream, send)
        return stream

    def abort(self, stream: RequestStream, choices: Iterable[int]) -> None:
        """Abort choices whose output nobody reads any more."""
        self._abort_seqs(self._remove(stream, sorted(stream.alive.intersection(choices))))

    def abort_request(self, request_id: str | None) -> int:
        """End the requests of an id, or all for None, with reason `abort`; return their number."""
        streams = [
            each for each in self._streams if request_id is None or each.request_id == request_id
        ]
        self.abort_streams(streams)
        return len(streams)

    def abort_streams(self, streams: list[RequestStream]) -> None:
        """End requests with reason `abort`, which their readers see."""
        for stream in streams:
            self._abort_seqs(self._end(stream, stream.alive, "abort"))
        self._notify()

    def release(self, stream: RequestStream) -> None:
        """Release a request that its reader has finished with; abort its running choices."""
        self.abort(stream, stream.alive)
        self._num_requests -= 1

    def on_report(self, message: EngineOutputs | StageUtilization | BubbleReport) -> None:
        """Handle a report of the pipeline; reports of a driver that was detached are ignored."""
        if not self._is_reporting:
            return
        if isinstance(message, EngineOutputs):
            self._on_outputs(message)
        else:
            self._totals.on_report(message)

    def reject_parked(self, cause: str) -> None:
        """End the parked requests, because no driver was attached in time; a warm-up goes on."""
        for stream in [each for each in self._streams if each.entry.is_parked]:
            self._end(stream, stream.alive, "error", cause, "unavailable")
        self._notify()

    def fail_all(self, cause: str) -> None:
        """End every request with an error, because the engine has died."""
        self.detach(cause)
        for stream in list(self._streams):
            self._end(stream, stream.alive, "error", cause)
        self._notify()

    def _submit(self, stream: RequestStream, send: SendFunction) -> None:
        """Send a request's living choices with new wire ids."""
        entry, seq, now = stream.entry, self._next_seq, time.monotonic()
        send(entry.submission(seq, now))  # First, because encoding may raise.
        if not self._choices:
            self._last_progress = now
        entry.on_submitted(seq)
        self._next_seq += len(entry.seqs)
        for choice, seq in entry.seqs.items():
            self._choices[seq] = SubmittedChoice(stream, choice, entry.outputs[choice].append)

    def _submit_parked(self) -> None:
        """Submit all parked requests."""
        assert self._send is not None
        for stream in list(self._streams):
            if stream.entry.is_parked:
                self._resume(stream, self._send)

    def _resume(self, stream: RequestStream, send: SendFunction) -> None:
        """Submit a parked request."""
        self._submit(stream, send)
        if stream.entry.num_attempts > 1:
            stream.num_resumptions += 1
            self.num_resumed_requests += 1

    def _continue_isolation(self, is_idle: bool) -> None:
        """Let the next suspect run alone, or all requests if there is none.

        Args:
            is_idle: the driver has no request, so another one would run alone.
        """
        if self._send is None or self._suspects.isolated is not None:
            return
        suspects = self._suspects.suspects(self._streams)
        if not suspects:
            self._is_isolating = False
            self._submit_parked()
            return
        for stream in {choice.stream: None for choice in self._choices.values()}:
            self._park(stream)
        if is_idle:
            self._retired.clear()
            # Who is to blame has seldom come far, and nobody waits any more once it is found.
            suspect = min(suspects, key=lambda each: sum(map(len, each.entry.outputs)))
            self._resume(suspect, self._send)
            self._suspects.isolate(suspect, suspect.entry.seqs.values())

    def _park(self, stream: RequestStream) -> None:
        """Take a running request back from the driver."""
        assert self._send is not None
        seqs = list(stream.entry.seqs.values())
        stream.entry.seqs.clear()
        for seq in seqs:
            self._retired[seq] = self._choices.pop(seq).stream
        self._send(AbortSequences(seqs))

    def _remove(self, stream: RequestStream, choices: Collection[int]) -> list[int]:
        """Remove choices that run; return their wire ids, none of a parked request."""
        entry = stream.entry
        seqs = [entry.seqs.pop(choice) for choice in choices if choice in entry.seqs]
        for seq in seqs:
            del self._choices[seq]
        entry.alive.difference_update(choices)
        if not entry.alive:
            self._streams.pop(stream, None)
            self._suspects.clear(stream)
        return seqs

    def _end(
        self,
        stream: RequestStream,
        choices: Collection[int],
        reason: str,
        error: str = "",
        kind: ErrorKind = "",
    ) -> list[int]:
        """End choices for their reader and in the journal; return their wire ids, if submitted."""
        choices = sorted(choices)
        for choice in choices:
            delta = stream.delta(choice)
            delta.end, delta.error_kind = FinishedSequence(choice, reason, error=error), kind
        return self._remove(stream, choices)

    def _abort_seqs(self, seqs: list[int]) -> None:
        """Abort sequences in the driver; a suspect that ran alone may have been among them."""
        if seqs and self._send is not None:
            self._send(AbortSequences(seqs))
        if self._is_isolating:
            self._continue_isolation(is_idle=False)

    def _on_outputs(self, message: EngineOutputs) -> None:
        """Deliver the output of a step and store the statistics."""
        tokens, stats = message.outcome.num_step_tokens, message.stats
        if tokens or message.outcome.finished:
            self._last_progress = time.monotonic()
        self._totals.on_stats(stats)
        if tokens:
            self.step_sizes[1 << (tokens - 1).bit_length()] += 1
        ended = deliver(message, self._choices)
        if self._suspects.has_deaths:
            self._clear_suspects(message.outcome.seqs)
        for stream, choice, _ in ended:
            self._remove(stream, [choice])
        if self._is_isolating:
            self._continue_isolation(is_idle=not (stats.unfinished or stats.in_flight))
        self._notify()

    def _clear_suspects(self, seqs: list[int]) -> None:
        """Forget the deaths of requests that have a new token."""
        for seq in seqs:
            if choice := self._choices.get(seq):
                self._suspects.clear(choice.stream)

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
        stream.remove_listener()
        self._abort_seqs(self._end(stream, stream.alive, "error", error))
