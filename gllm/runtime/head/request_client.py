"""Running requests of a process: submission, output to their readers, aborts and ends.

A client keeps a journal of each request. A request that no scheduler has is parked: its stream
stays open, and it is submitted again with the tokens that were delivered.
"""

import logging
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from gllm.messages.codec import encode
from gllm.messages.handoff import KvHandoff
from gllm.messages.requests import AbortSequences, ErrorKind, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.options.slo import Slo
from gllm.runtime.head.journal import JournalEntry
from gllm.runtime.head.request_stream import RequestStream, SubmittedChoice
from gllm.runtime.head.suspects import PoisonList
from gllm.scheduler.plan import FinishedSequence

log = logging.getLogger(__name__)

SendFunction = Callable[[SubmitRequest | AbortSequences], None]
"""Function that sends a message to a scheduler's process."""


class RequestClient(ABC):
    """Submits requests and tracks them to their end; subclasses choose a scheduler for each.

    Requests that no scheduler can take at present wait, and are submitted later.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """Create a client without requests.

        clock: returns the time in seconds; None for time.monotonic.
        """
        self._clock = clock or time.monotonic
        self.num_resumed_requests = 0
        """Requests that were submitted again, each time counted."""
        self.on_submitted: Callable[[JournalEntry], None] | None = None
        """Called with each new request, once."""
        self.on_ended: Callable[[JournalEntry], None] | None = None
        """Called with each request whose choices have all ended, perhaps more than once."""
        self._next_seq = 0
        """Wire ids are never used again, not even for another scheduler."""
        self._streams: dict[RequestStream, None] = {}
        """Running requests in order of arrival."""
        self._streams_by_id: dict[str, dict[RequestStream, None]] = {}
        """The same by request id, which several may have."""
        self._pending: list[RequestStream] = []
        """Streams with new output whose listeners have not been notified."""
        self.num_requests = 0
        """Requests that were submitted and not released."""
        self._busy_since = 0.0
        """Time of the last submission to a scheduler that had no request."""
        self._poison = PoisonList()

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
        session: str = "",
        slo: Slo | None = None,
        handoff: KvHandoff | None = None,
        client: str = "",
    ) -> RequestStream:
        """Send a request to a scheduler, or park it.

        Args:
            prompt: token ids.
            sampling: parameters of the first choice.
            max_tokens: most tokens to generate for each choice.
            stop_ids: token ids that end a choice.
            n: number of choices.
            priority: requests with smaller values run earlier.
            cache_salt: cached prefixes are shared within one salt.
            request_id: id by which `abort_request` finds the request.
            session: name of a conversation, whose requests have prefixes in common.
            slo: service-level objective.
            handoff: part of it in a hand-off; None without one.
            client: name of the client that sent it; empty for none.

        Raises:
            TypeError, ValueError, OverflowError: an argument cannot be encoded; nothing was sent.
            PoisonRequestError: equal requests have killed workers.
        """
        arrival = self._clock()
        entry = JournalEntry(
            prompt, sampling, max_tokens, stop_ids, n, priority, cache_salt, arrival, session, slo
        )
        entry.client = client
        if handoff is not None:
            entry.kv_ticket, entry.kv_source = handoff.ticket, handoff.source
            entry.is_ticket_foreign = handoff.is_ticket_foreign
            entry.num_cached_tokens = handoff.num_cached_tokens
        return self.submit_entry(entry, request_id)

    def submit_entry(self, entry: JournalEntry, request_id: str = "") -> RequestStream:
        """Send a request to a scheduler, or park it.

        Args:
            entry: journal entry of a new request, or of one that another process continues here.
            request_id: id by which `abort_request` finds the request.

        Raises:
            TypeError, ValueError, OverflowError: the entry cannot be encoded; nothing was sent.
            PoisonRequestError: equal requests have killed workers.
        """
        self._poison.check(entry.prompt, entry.sampling, self._clock())
        stream = RequestStream(entry, request_id, self._pending)
        self._dispatch(stream)
        if isinstance(entry.prompt, list):
            # Prompts of anything but token ids are rejected when they are submitted.
            with suppress(TypeError, OverflowError):
                entry.prompt = array("i", entry.prompt)
        self._streams[stream] = None
        self._streams_by_id.setdefault(request_id, {})[stream] = None
        self.num_requests += 1
        if self.on_submitted is not None:
            self.on_submitted(entry)
        return stream

    def abort(self, stream: RequestStream, choices: Iterable[int]) -> None:
        """Abort choices whose output is no longer read."""
        self._abort_seqs(stream, self._remove(stream, sorted(stream.alive.intersection(choices))))

    def abort_request(self, request_id: str | None) -> int:
        """End the requests of an id, or all for None, with reason `abort`; return their number.

        An abort of all is about this process and not about the requests: its kind `unavailable`
        tells a router to continue those of its clients elsewhere.
        """
        kind: ErrorKind = "unavailable" if request_id is None else ""
        found = self._streams if request_id is None else self._streams_by_id.get(request_id, {})
        streams = list(found)
        self.abort_streams(streams, kind)
        return len(streams)

    def abort_streams(self, streams: list[RequestStream], kind: ErrorKind = "") -> None:
        """End requests with the finish reason `abort`."""
        for stream in streams:
            self._abort_seqs(stream, self._end(stream, stream.alive, "abort", kind=kind))
        self._notify()

    def release(self, stream: RequestStream) -> None:
        """Release a request that its reader has finished with; abort its running choices."""
        self.abort(stream, stream.alive)
        self.num_requests -= 1

    def reject_parked(self, cause: str) -> None:
        """End the parked requests with an error, because no driver was ready in time."""
        for stream in [parked for parked in self._streams if parked.entry.is_parked]:
            self._end(stream, stream.alive, "error", cause, "unavailable")
        self._notify()

    def fail_all(self, cause: str) -> None:
        """End every request with an error, because no driver will compute it."""
        for stream in list(self._streams):
            self._abort_seqs(stream, self._end(stream, stream.alive, "error", cause))
        self._notify()

    @abstractmethod
    def _dispatch(self, stream: RequestStream) -> None:
        """Submit a new request, or check that it could be submitted later.

        Raises:
            TypeError, ValueError, OverflowError: it cannot be encoded.
        """

    @abstractmethod
    def _abort_seqs(self, stream: RequestStream, seqs: list[int]) -> None:
        """Abort sequences of a request where it was submitted."""

    @abstractmethod
    def _on_removed(self, stream: RequestStream) -> None:
        """Forget a request whose choices have all ended."""

    def _submit(
        self, stream: RequestStream, send: SendFunction, choices: dict[int, SubmittedChoice]
    ) -> None:
        """Send a request's living choices with new wire ids.

        Args:
            stream: stream of a parked or new request.
            send: sends to the scheduler.
            choices: table of the choices that this scheduler has, by wire id.
        """
        entry, seq, now = stream.entry, self._next_seq, self._clock()
        # First, because encoding may raise.
        send(entry.submission(seq, now, stream.request_id))
        if not choices:
            self._busy_since = now
        entry.on_submitted(seq)
        stream.submitted_to = choices
        self._next_seq += len(entry.seqs)
        for choice, seq in entry.seqs.items():
            choices[seq] = SubmittedChoice(stream, choice, entry.outputs[choice].append)
        if entry.num_attempts > 1:
            stream.num_resumptions += 1
            self.num_resumed_requests += 1

    def _check_encoding(self, stream: RequestStream) -> None:
        """Check that a request that is parked at once can be encoded.

        Raises:
            TypeError, ValueError, OverflowError: it cannot.
        """
        encode(stream.entry.submission(self._next_seq, self._clock()))

    def _remove(self, stream: RequestStream, choices: Collection[int]) -> list[int]:
        """Remove choices that run; return their wire ids, none of a parked request."""
        entry = stream.entry
        seqs = [entry.seqs.pop(choice) for choice in choices if choice in entry.seqs]
        for seq in seqs:
            del stream.submitted_to[seq]
        entry.alive.difference_update(choices)
        if not entry.alive:
            self._forget(stream)
            self._on_removed(stream)
            if self.on_ended is not None:
                self.on_ended(entry)
        return seqs

    def _forget(self, stream: RequestStream) -> None:
        """Remove a request from the running ones, unless it has been."""
        self._streams.pop(stream, None)
        same_id = self._streams_by_id.get(stream.request_id, {})
        same_id.pop(stream, None)
        if not same_id:
            self._streams_by_id.pop(stream.request_id, None)

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

    def _notify(self) -> None:
        """Call the listeners of streams with new output; one that raises ends its request."""
        pending = self._pending.copy()
        self._pending.clear()
        for stream in pending:
            try:
                # Another listener may have read the output already.
                if stream.deltas:
                    stream.listener()
            except Exception as error:
                log.exception("the reader of a request failed")
                self._fail(stream, f"its reader failed: {type(error).__name__}: {error}")

    def _fail(self, stream: RequestStream, error: str) -> None:
        """End a request whose listener has failed."""
        stream.remove_listener()
        self._abort_seqs(stream, self._end(stream, stream.alive, "error", error))
