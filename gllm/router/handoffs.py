"""Hand-offs of a router's requests: their states, and the commands about held KV blocks.

The client submits and parks the requests; this object says when and to which engine, and sends the
commands to the engines that hold blocks.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Protocol

import msgspec

from gllm.messages.handoff import (
    HandOffSequence,
    KvSource,
    PrefetchKv,
    ReleaseKvHolds,
    RenewKvHolds,
    make_ticket,
)
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.router.dispatch_target import DispatchTarget
from gllm.router.output_checks import (
    can_be_handed_off,
    end_all_choices,
    without_ends,
    without_tokens,
)
from gllm.routing.disaggregation.policy import EnginePair
from gllm.routing.handoff import (
    Handoff,
    HandoffAction,
    HandoffLimits,
    HandoffState,
    ReleaseHold,
)
from gllm.runtime.head.request_client import SendFunction
from gllm.runtime.head.request_stream import RequestStream
from gllm.scheduler.plan import FinishedSequence


class PairChooser(Protocol):
    """Interface that chooses the prefill and the decode engine of a request."""

    def accepting(self, names: frozenset[str]) -> frozenset[str]:
        """Return the engines that accept requests, of those named."""

    def choose(self, stream: RequestStream, names: frozenset[str]) -> EnginePair | None:
        """Return the prefill and decode engines of a request; None to use the routing policy."""

    def choose_decode(self, stream: RequestStream, names: frozenset[str]) -> str | None:
        """Return the decode engine of a prefilled request; None if there is none."""

    def on_prefilled(self, stream: RequestStream) -> None:
        """Handle the first token of a request."""

    def on_ended(self, stream: RequestStream) -> None:
        """Handle the end of a request; unknown ones are ignored."""

    def on_engine_lost(self, engine: str) -> None:
        """Handle the loss of an engine."""


class TicketDeadlines:
    """Priority queue of deadlines of KV transfers, one per transfer key (ticket)."""

    def __init__(self) -> None:
        self._deadlines: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        """Deadlines with their tickets; those that differ from `_deadlines` have been replaced."""

    def set(self, ticket: int, deadline: float) -> None:
        """Set or replace the deadline of a ticket; infinity removes it."""
        if deadline == math.inf:
            self._deadlines.pop(ticket, None)
        elif self._deadlines.get(ticket) != deadline:
            self._deadlines[ticket] = deadline
            heappush(self._heap, (deadline, ticket))

    def pop_due(self, now: float) -> list[int]:
        """Remove and return the tickets whose deadlines have passed, the earliest one first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            deadline, ticket = heappop(self._heap)
            if self._deadlines.get(ticket) == deadline:
                del self._deadlines[ticket]
                due.append(ticket)
        return due


class Handoffs:
    """Table of requests that one engine prefills and another decodes, with their KV transfers."""

    def __init__(
        self,
        engines: Mapping[str, DispatchTarget],
        pairs: PairChooser | None,
        limits: HandoffLimits | None = None,
    ) -> None:
        """Create an empty table.

        Args:
            engines: attached engines by name, kept up to date by the caller.
            pairs: chooses prefill and decode engines; None if one engine does both.
            limits: time limits of the transfers; None for the defaults.
        """
        self.num_ended: Counter[str] = Counter()
        """Number of ended hand-offs by outcome, a value of `Handoff.outcome`."""
        self.on_moved: Callable[[RequestStream, Handoff, float], None] = lambda *_: None
        """Called with a request that has moved, its hand-off, and the seconds between the last
        token of the first engine and the next one of the second."""
        self._engines = engines
        self._pairs = pairs
        self._limits = limits or HandoffLimits()
        self._by_stream: dict[RequestStream, Handoff] = {}
        self._by_ticket: dict[int, RequestStream] = {}
        self._unread: dict[RequestStream, None] = {}
        """Requests in the state READY, by the arrival of token 1."""
        self._ticks = TicketDeadlines()
        """Times of `Handoff.next_tick` or earlier ones."""

    @property
    def num_running(self) -> int:
        """Number of running hand-offs."""
        return len(self._by_stream)

    @property
    def running(self) -> Mapping[RequestStream, Handoff]:
        """Running hand-offs by request."""
        return MappingProxyType(self._by_stream)

    @property
    def tickets(self) -> Set[int]:
        """Tickets of the running hand-offs."""
        return self._by_ticket.keys()

    @property
    def has_unread(self) -> bool:
        """True if a prefilled request waits until its first token has been turned into text."""
        return bool(self._unread)

    def state_of(self, stream: RequestStream) -> HandoffState:
        """Return the state of a request's hand-off; DONE if it has none."""
        handoff = self._by_stream.get(stream)
        return HandoffState.DONE if handoff is None else handoff.state

    def is_reading(self, stream: RequestStream) -> bool:
        """Return True if a prefilled request waits until its first token is turned into text."""
        return self.state_of(stream) is HandoffState.READY

    def choose(
        self, stream: RequestStream, names: frozenset[str], excluded: Set[str] = frozenset()
    ) -> EnginePair | None:
        """Choose the engine of a request's next submission and, if another decodes, that engine.

        Args:
            stream: a request that runs on no engine, new or prefilled.
            names: engines that the request may be sent to. A prefilled request may also be sent to
                engines that can fetch its KV blocks.
            excluded: engines that the request may not be sent to.

        Returns:
            A pair whose `prefill` is the engine to submit to; None to leave the choice to the
            routing policy. If `decode` is another engine, `sender` starts a hand-off.
        """
        if self._pairs is None:
            return None
        handoff = self._by_stream.get(stream)
        if handoff is not None and handoff.state is HandoffState.TRANSFER:
            # The decode engine may drain since it was chosen.
            names = self._pairs.accepting(names | self._successors(handoff) - excluded)
        able = frozenset(name for name in names if self._engines[name].kv_endpoint)
        if not names:
            return None
        if handoff is not None:
            decode = handoff.decode if handoff.decode in names else ""
            decode = decode or self._pairs.choose_decode(stream, able) or ""
            return EnginePair(decode, decode) if decode in names else None
        if not can_be_handed_off(stream.entry):
            return None
        pair = self._pairs.choose(stream, able) if able else None
        if pair is None or pair.prefill not in able:
            return None
        if pair.decode is None or pair.decode == pair.prefill:
            return pair
        decode = pair.decode
        return pair if decode in able and self.may_exchange(pair.prefill, decode) else None

    def sender(
        self, stream: RequestStream, engine: DispatchTarget, pair: EnginePair | None
    ) -> SendFunction:
        """Return a function that submits a request to an engine, with the fields of its hand-off.

        Args:
            stream: the request.
            engine: the engine.
            pair: result of `choose`, if it named the engine.
        """
        handoff, begun = self._by_stream.get(stream), None
        changes: dict[str, object] = {}
        if handoff is not None:
            if (source := self._source(stream, handoff, engine)) is not None:
                changes = {"kv_source": source}
        elif pair is not None and pair.prefill != pair.decode:
            begun = Handoff(pair, make_ticket(), self._limits)
            # The choices of a request have one prompt, so one of them is prefilled.
            changes = {"max_tokens": 1, "kv_ticket": begun.ticket, "n": 1}
        if not changes:
            return engine.send

        def send(message: SubmitRequest | AbortSequences) -> None:
            engine.send(msgspec.structs.replace(message, **changes))
            if begun is not None:
                # Only now: encoding may raise.
                self._by_stream[stream] = begun
                self._by_ticket[begun.ticket] = stream

        return send

    def start_move(
        self, stream: RequestStream, engine: DispatchTarget, target: str, cause: str = "moved"
    ) -> bool:
        """Let an engine hand a running request off to another one, with its KV blocks.

        The engine ends the request at its next token and keeps the blocks; then the request
        continues at the target as after a prefill, or at any engine if the target is lost.

        Args:
            stream: a request that the engine computes.
            engine: the engine.
            target: engine that is to continue.
            cause: key under which the move is counted.

        Returns:
            False if one side cannot, the request has no token yet, or is handed off already; then
            nothing has changed.
        """
        entry, other = stream.entry, self._engines[target]
        earlier = self._by_stream.get(stream)
        is_free = earlier is None or earlier.state is HandoffState.DECODE
        if self._pairs is not None or other is engine or not is_free:
            # Pair policies count a request as load of its engines, and choose others themselves.
            return False
        if entry.n > 1 or len(entry.seqs) != 1 or not entry.num_output_tokens:
            return False
        if engine.kv is None or not engine.kv.accepts_moves or not engine.kv_endpoint:
            return False
        can_fetch = other.kv_endpoint and engine.numerics == other.numerics
        if not can_fetch or not self.may_exchange(engine.name, target):
            return False
        if earlier is not None:
            self._apply(stream, earlier, earlier.on_end())
        handoff = Handoff(EnginePair(engine.name, target), make_ticket(), self._limits, cause)
        self._by_stream[stream] = handoff
        self._by_ticket[handoff.ticket] = stream
        (seq,) = entry.seqs.values()
        engine.kv.send(HandOffSequence(seq, handoff.ticket))
        return True

    def move_target(self, stream: RequestStream) -> str:
        """Return the engine to which a request moves that no engine has; empty if there is none."""
        handoff = self._by_stream.get(stream)
        if handoff is None or not handoff.move_cause or handoff.state is not HandoffState.TRANSFER:
            return ""
        return handoff.decode if handoff.decode in self._engines else ""

    def move_cause(self, stream: RequestStream) -> str:
        """Return why a request moves, until it leaves its engine to be handed off; else empty."""
        handoff = self._by_stream.get(stream)
        states = HandoffState.PREFILL, HandoffState.READY
        return handoff.move_cause if handoff is not None and handoff.state in states else ""

    def on_submitted(self, stream: RequestStream, engine: DispatchTarget) -> None:
        """Update the hand-off of a request that was submitted to an engine."""
        if handoff := self._by_stream.get(stream):
            if handoff.state is HandoffState.TRANSFER and engine.name in self._successors(handoff):
                # On other numbers of ranks, too, it goes on as intended.
                stream.entry.numerics = engine.numerics
            self._apply(stream, handoff, handoff.on_submitted(engine.name))

    def split_prefilled(
        self, engine: DispatchTarget, message: EngineOutputs
    ) -> tuple[EngineOutputs, dict[RequestStream, bool]]:
        """Remove requests that continue elsewhere after their prefill from an engine's output.

        For a request with several choices only one is prefilled. Its token is dropped, because the
        other engine samples the first token of all; an error is that of all.

        Returns:
            The message, and for each of these requests True if the engine keeps its KV blocks.
        """
        prefilled: dict[RequestStream, bool] = {}
        seqs: set[int] = set()
        shared: set[int] = set()
        failed: list[tuple[FinishedSequence, list[int]]] = []
        for end in message.outcome.finished if self._by_stream else ():
            choice = engine.choices.get(end.seq)
            if choice is None or self.state_of(choice.stream) is not HandoffState.PREFILL:
                continue
            entry, is_ended = choice.stream.entry, end.finish_reason in ("length", "stop")
            num_tokens = len(entry.outputs[choice.choice]) + message.outcome.seqs.count(end.seq)
            if entry.n == 1 and num_tokens >= entry.max_tokens:
                # A move that came too late: this is the end of the request.
                continue
            if entry.n > 1 and not is_ended:
                failed.append((end, list(entry.seqs.values())))
            elif entry.n > 1 or end.finish_reason == "length":
                seqs.add(end.seq)
                prefilled[choice.stream] = end.kv_ticket != 0
                shared |= {end.seq} if entry.n > 1 else set()
        if seqs:
            message = without_ends(message, seqs)
        if shared:
            for first in message.outcome.first_tokens:
                if first.seq in shared:
                    entry = engine.choices[first.seq].stream.entry
                    entry.num_cached_tokens = first.num_cached_tokens
            message = without_tokens(message, shared)
        if failed:
            message = end_all_choices(message, failed)
        return message, prefilled

    def on_readable(self, engine: str, ticket: int, now: float) -> None:
        """Let the decode engine fetch the blocks of a prompt whose prefill has begun.

        If it is not chosen yet, it fetches them once it is.
        """
        if (stream := self._find_prefill(engine, ticket)) is not None:
            handoff = self._by_stream[stream]
            handoff.on_readable()
            self._start_prefetch(stream, handoff, now)

    def on_first_chunk(self, engine: str, ticket: int, now: float) -> None:
        """Choose the decode engine of a prompt whose first prefill chunk is computed."""
        stream = self._find_prefill(engine, ticket)
        if stream is None or self._pairs is None or self._by_stream[stream].decode:
            return
        handoff = self._by_stream[stream]
        able = {
            successor
            for successor in self._successors(handoff)
            if self._engines[successor].kv_endpoint
        }
        handoff.on_decode_chosen(self._pairs.choose_decode(stream, frozenset(able)) or "")
        self._start_prefetch(stream, handoff, now)

    def _find_prefill(self, engine: str, ticket: int) -> RequestStream | None:
        """Return the request that an engine prefills under a ticket; None if there is none."""
        stream = self._by_ticket.get(ticket)
        if stream is None or self.state_of(stream) is not HandoffState.PREFILL:
            return None
        return stream if self._by_stream[stream].pair.prefill == engine else None

    def _start_prefetch(self, stream: RequestStream, handoff: Handoff, now: float) -> None:
        """Let the decode engine fetch the blocks while they are computed, if both sides can.

        Requests of several choices do without: the last token of their prompt is computed twice.
        """
        decode, entry = self._engines.get(handoff.decode), stream.entry
        if decode is None or decode.kv is None or not decode.kv.accepts_prefetches:
            return
        if self._pairs is None or not self._pairs.accepting(frozenset({decode.name})):
            return
        source = self._source(stream, handoff, decode)
        if source is None or entry.n > 1 or not handoff.start_prefetch(now):
            return
        self._ticks.set(handoff.ticket, handoff.next_tick)
        decode.kv.send(
            PrefetchKv(
                source,
                list(entry.prompt),
                entry.max_tokens,
                entry.priority,
                entry.cache_salt,
                now - entry.arrival,
                entry.predicted_output_tokens,
            )
        )

    def on_prefilled(self, stream: RequestStream, is_held: bool, now: float) -> None:
        """Update the hand-off of a request that has its first token."""
        handoff = self._by_stream[stream]
        handoff.on_prefilled(now, is_held)
        self._unread[stream] = None
        self._ticks.set(handoff.ticket, handoff.next_tick)
        if self._pairs is not None:
            self._pairs.on_prefilled(stream)

    def on_tokens(self, engine: DispatchTarget, seqs: Iterable[int], now: float) -> None:
        """Update the hand-offs of sequences that an engine has returned tokens for."""
        if not self._by_stream:
            return
        for seq in seqs:
            choice = engine.choices.get(seq)
            handoff = self._by_stream.get(choice.stream) if choice is not None else None
            if choice is not None and handoff is not None:
                if handoff.move_cause and handoff.state is HandoffState.TRANSFER:
                    self.on_moved(choice.stream, handoff, now - handoff.prefilled_at)
                self._apply(choice.stream, handoff, handoff.on_decoded())

    def on_given_back(self, stream: RequestStream, engine: str) -> None:
        """Update the hand-off of a request that an engine has given back."""
        if handoff := self._by_stream.get(stream):
            self._apply(stream, handoff, handoff.on_given_back(engine))

    def on_end(self, stream: RequestStream) -> None:
        """End the hand-off of a request that has ended, and release its blocks."""
        if self._pairs is not None:
            self._pairs.on_ended(stream)
        if handoff := self._by_stream.get(stream):
            self._apply(stream, handoff, handoff.on_end())

    def on_lost(self, engine: str) -> None:
        """Update the hand-offs that use a lost engine, before its requests are given back."""
        if self._pairs is not None:
            self._pairs.on_engine_lost(engine)
        for handoff in self._by_stream.values():
            handoff.on_lost(engine)

    def pop_read(self, now: float) -> list[RequestStream]:
        """Renew and release kept KV blocks as due; return the prefilled requests to submit now."""
        due = [self._by_ticket[ticket] for ticket in self._ticks.pop_due(now)]
        read = {stream: None for stream in self._unread if not stream.deltas}
        for stream in read:
            self._by_stream[stream].on_read()
        for stream in due:
            handoff = self._by_stream[stream]
            if stream not in read:
                self._apply(stream, handoff, handoff.on_tick(now))
                if stream in self._unread and handoff.state is HandoffState.TRANSFER:
                    read[stream] = None
            self._ticks.set(handoff.ticket, handoff.next_tick)
        for stream in read:
            del self._unread[stream]
        return list(read)

    def _source(
        self, stream: RequestStream, handoff: Handoff, engine: DispatchTarget
    ) -> KvSource | None:
        """Return the source of a request's blocks; None if the engine has to compute them."""
        holder = self._engines.get(handoff.pair.prefill)
        if holder is None or holder is engine or holder.kv is None or not handoff.is_held:
            return None
        if not engine.kv_endpoint or not self.may_exchange(holder.name, engine.name):
            return None
        # The KV of the last token is never computed.
        entry = stream.entry
        num_outputs = min((len(entry.outputs[choice]) for choice in entry.alive), default=0)
        num_tokens = len(entry.prompt) + max(0, num_outputs - 1)
        return KvSource(
            holder.name, holder.kv.run, handoff.ticket, num_tokens, holder.kv.endpoint()
        )

    def _successors(self, handoff: Handoff) -> frozenset[str]:
        """Return the engines that may go on after token 1."""
        names = {handoff.decode} & self._engines.keys()
        if handoff.pair.prefill in self._engines:
            names |= {
                engine
                for engine in self._engines
                if self.may_exchange(handoff.pair.prefill, engine)
            }
        return frozenset(names)

    def may_exchange(self, name: str, other_name: str) -> bool:
        """Return True if the numbers in the KV caches of two engines are the same."""
        engine, other = self._engines[name], self._engines[other_name]
        digests = [one.kv.digest() if one.kv is not None else "" for one in (engine, other)]
        if all(digests):
            return digests[0] == digests[1]
        return engine.numerics == other.numerics

    def _apply(
        self, stream: RequestStream, handoff: Handoff, actions: Iterable[HandoffAction]
    ) -> None:
        """Forget a hand-off that has ended; send the commands about blocks to their engines."""
        if handoff.state is HandoffState.DONE:
            self.num_ended[handoff.outcome] += 1
            del self._by_stream[stream], self._by_ticket[handoff.ticket]
            self._unread.pop(stream, None)
            self._ticks.set(handoff.ticket, handoff.next_tick)
        for action in actions:
            holder = self._engines.get(action.engine)
            if holder is not None and holder.kv is not None:
                kind = ReleaseKvHolds if isinstance(action, ReleaseHold) else RenewKvHolds
                holder.kv.send(kind([action.ticket]))
