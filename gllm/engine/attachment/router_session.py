"""Requests of one router on the engine that computes them."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

import msgspec

from gllm.config.sampling import MAX_N
from gllm.messages.codec import AnyMessage
from gllm.messages.fleet import GreetEngine
from gllm.messages.handoff import (
    MAX_TICKETS,
    FirstChunkComputed,
    HandoffCommand,
    HandOffSequence,
    KeepComputedKv,
    KvPushStarted,
    PrefetchKv,
    ReleaseKvHolds,
    RenewKvHolds,
)
from gllm.messages.kv_cache import WatchKvCache
from gllm.messages.lifecycle import CommandDone, ResetPrefixCache
from gllm.messages.requests import (
    AbortSequences,
    EngineOutputs,
    ErrorKind,
    PoisonRequestError,
    RejectedRequest,
    SubmitRequest,
)
from gllm.messages.sampling import SampleDetails, TokenLogprobs
from gllm.recovery.admission_state import AdmissionState
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.journal import JournalEntry
from gllm.runtime.head.kv_events import KvEventSource
from gllm.runtime.head.request_stream import RequestStream, TokenDelta
from gllm.runtime.messaging.connection_pool import PeerConnection
from gllm.scheduler.plan import FinishedSequence, StepOutput


class AttachedEngine(Protocol):
    """Interface of an engine for its connections to routers; `Supervisor` implements it."""

    @property
    def client(self) -> EngineClient:
        """Client of the driver, with the running requests and counters."""

    @property
    def kv_events(self) -> KvEventSource:
        """Changes of the prefix cache."""

    @property
    def state(self) -> str:
        """State: loading, ready, recovering, sleeping, draining or dead."""

    @property
    def state_cause(self) -> str:
        """Cause of the death or of the running recovery; otherwise empty."""

    @property
    def admission(self) -> AdmissionState:
        """Facts that decide whether requests are taken."""

    async def reset_prefix_cache(self) -> str:
        """Empty the prefix cache; return the error, empty on success."""

    def send_kv_command(self, message: HandoffCommand) -> None:
        """Send a command about KV blocks to the driver; dropped while there is no driver."""

    def add_change_listener(self, listener: Callable[[], None]) -> None:
        """Register a function to call after each event that may change the state."""


_ABORTED = "the engine has aborted all its requests"
"""Error of a router's request that goes on elsewhere."""


@dataclass(slots=True, eq=False)
class _Running:
    """One request of the router."""

    stream: RequestStream
    seqs: dict[int, int]
    """The router's wire ids of the choices that run, by choice."""


class RouterSession:
    """Connection of an engine to one router: runs the router's requests and returns their output.

    The outputs of all requests in one iteration of the event loop become one message.
    """

    def __init__(
        self, connection: PeerConnection, greeting: GreetEngine, engine: AttachedEngine
    ) -> None:
        self.connection = connection
        self.greeting = greeting
        self.is_attached = not greeting.confirms_attachment
        """True if the router sends requests, as far as it tells."""
        self._engine = engine
        self._choices: dict[int, tuple[_Running, int]] = {}
        """Requests and choices by the router's wire ids."""
        self._running: dict[_Running, None] = {}
        self._ready: list[_Running] = []
        """Requests with output that was not sent."""
        self._is_flush_scheduled = False
        self._unwatch: Callable[[], None] | None = None
        """Ends the subscription of KV events, if there is one."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._tickets: set[int] = set()
        """Tickets of the router under which KV blocks may be held or prefetched."""

    @property
    def num_requests(self) -> int:
        """Number of running requests."""
        return len(self._running)

    def on_message(self, message: AnyMessage, refusal: str) -> None:
        """Handle a message of the router.

        Args:
            message: message of an accepted router.
            refusal: reason why new requests go elsewhere; empty if they are taken.

        Raises:
            ValueError: the router uses a wire id twice.
        """
        match message:
            case SubmitRequest():
                self._submit(message, refusal)
            case AbortSequences(seqs):
                self._abort(seqs)
            case RejectedRequest(seq, n, error):
                self._reject(range(seq, seq + min(n, MAX_N)), error)
            case WatchKvCache():
                self._watch(message)
            case ReleaseKvHolds(tickets):
                self._tickets.difference_update(tickets)
                self._engine.send_kv_command(message)
            case RenewKvHolds():
                self._engine.send_kv_command(message)
            case HandOffSequence(seq, ticket) | KeepComputedKv(seq, ticket):
                self._reserve(message, seq, ticket)
            case PrefetchKv(source) if not refusal:
                self._tickets.add(source.ticket)
                self._engine.send_kv_command(message)
            case ResetPrefixCache(command_id):
                task = asyncio.create_task(self._reset_prefix_cache(command_id))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def on_prefill(self, report: KvPushStarted | FirstChunkComputed) -> None:
        """Forward a report about a prefill of this router, if the router supports it."""
        is_known = isinstance(report, FirstChunkComputed) or self.greeting.accepts_pushes
        if report.ticket in self._tickets and is_known:
            self.connection.send(report)

    def end(self) -> None:
        """Abort all requests, because the router no longer reads their output."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        for running in self._running:
            running.stream.remove_listener()
            self._engine.client.release(running.stream)
        self._running.clear()
        self._choices.clear()
        self._ready.clear()
        tickets, self._tickets = sorted(self._tickets), set()
        for start in range(0, len(tickets), MAX_TICKETS):
            self._engine.send_kv_command(ReleaseKvHolds(tickets[start : start + MAX_TICKETS]))

    def _submit(self, message: SubmitRequest, refusal: str) -> None:
        """Start a request, or answer why it is not started."""
        # One id more than is possible, so that `from_submission` rejects the request.
        seqs = range(message.seq, message.seq + min(message.n, MAX_N + 1))
        if any(seq in self._choices for seq in seqs):
            raise ValueError(f"wire id {message.seq} is in use")
        if refusal:
            self._reject(seqs, refusal, "unavailable")
            return
        try:
            arrival = time.monotonic() - message.age_seconds
            entry = JournalEntry.from_submission(message, arrival)
            entry.reports_first_chunk = self.greeting.needs_first_chunks
            stream = self._engine.client.submit_entry(entry, message.request_id)
        except PoisonRequestError as error:
            self._reject(seqs, str(error), "poison")
        except (TypeError, ValueError, OverflowError) as error:
            self._reject(seqs, f"the request cannot be sent: {error}")
        else:
            if message.kv_ticket:
                self._tickets.add(message.kv_ticket)
            if message.kv_source is not None:
                # The request has the blocks of its prefetch from now on.
                self._tickets.discard(message.kv_source.ticket)
            running = _Running(stream, dict(zip(sorted(stream.alive), count(message.seq))))
            self._running[running] = None
            for choice, seq in running.seqs.items():
                self._choices[seq] = running, choice
            stream.set_listener(partial(self._on_output, running))

    def _abort(self, seqs: Iterable[int]) -> None:
        """Abort choices; those that have ended meanwhile are ignored."""
        for seq in seqs:
            if found := self._choices.pop(seq, None):
                running, choice = found
                del running.seqs[choice]
                self._engine.client.abort(running.stream, [choice])
                self._release_if_ended(running)

    def _reserve(self, message: HandOffSequence | KeepComputedKv, seq: int, ticket: int) -> None:
        """Pass a command to keep KV blocks of a choice on; one that has ended is ignored."""
        if (found := self._choices.get(seq)) is None:
            return
        running, choice = found
        wire_id = running.stream.entry.seqs.get(choice)
        if wire_id is not None:
            self._tickets.add(ticket)
            self._engine.send_kv_command(msgspec.structs.replace(message, seq=wire_id))

    def _watch(self, message: WatchKvCache) -> None:
        """Begin to forward KV events with a snapshot, or end it."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if message.is_on:
            subscribe = self._engine.kv_events.subscribe
            self._unwatch = subscribe(self.connection.send, message.with_tokens)

    async def _reset_prefix_cache(self, command_id: int) -> None:
        error = await self._engine.reset_prefix_cache()
        self.connection.send(CommandDone(command_id, 0, error))

    def _reject(self, seqs: Iterable[int], error: str, kind: ErrorKind = "") -> None:
        """Answer a request that is not started."""
        ends = [FinishedSequence(seq, "error", error=error) for seq in seqs]
        kinds: list[tuple[int, ErrorKind]] = [(end.seq, kind) for end in ends] if kind else []
        outcome = StepOutput([], [], [], ends)
        self.connection.send(
            EngineOutputs(outcome, self._engine.client.stats, error_kinds=kinds),
        )

    def _on_output(self, running: _Running) -> None:
        """Note that a request has output; called once until it is read."""
        self._ready.append(running)
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send the output of all requests."""
        self._is_flush_scheduled = False
        outcome = StepOutput([], [], [], [])
        details: list[SampleDetails] = []
        kinds: list[tuple[int, ErrorKind]] = []
        ready = self._ready.copy()
        self._ready.clear()
        is_dead = self._engine.state == "dead"
        for running in ready:
            for choice, delta in running.stream.pop_deltas().items():
                seq = running.seqs.get(choice)
                if seq is None:
                    continue
                if delta.end is not None:
                    if is_dead and delta.end.error and not delta.error_kind:
                        # The engine ends the request, but another one can continue it.
                        delta.error_kind = "unavailable"
                    if delta.end.finish_reason == "abort" and delta.error_kind == "unavailable":
                        delta.end = delta.end._replace(finish_reason="error", error=_ABORTED)
                    del running.seqs[choice], self._choices[seq]
                outcome.token_ids.extend(delta.tokens)
                outcome.seqs.extend([seq] * len(delta.tokens))
                if delta.first is not None:
                    outcome.first_tokens.append(delta.first._replace(seq=seq))
                if delta.logprobs or delta.prompt_logprobs or delta.embedding:
                    details += _sample_details(seq, delta)
                if delta.end is not None:
                    outcome.finished.append(delta.end._replace(seq=seq))
                    if delta.error_kind:
                        kinds.append((seq, delta.error_kind))
            self._release_if_ended(running)
        if outcome.seqs or outcome.finished or details or outcome.first_tokens:
            self.connection.send(EngineOutputs(outcome, self._engine.client.stats, details, kinds))

    def _release_if_ended(self, running: _Running) -> None:
        """Release a request without choices that run."""
        if not running.seqs and running in self._running:
            del self._running[running]
            running.stream.remove_listener()
            self._engine.client.release(running.stream)


def _sample_details(seq: int, delta: TokenDelta) -> Iterator[SampleDetails]:
    """Yield log-probabilities in the order of the tokens, with the first those of the prompt."""
    prompt_logprobs, embedding = delta.prompt_logprobs or [], delta.embedding
    logprobs: Sequence[TokenLogprobs | None] = delta.logprobs or [None]
    for sampled in logprobs:
        yield SampleDetails(seq, sampled, prompt_logprobs, embedding)
        prompt_logprobs, embedding = [], b""
