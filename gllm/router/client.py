"""Client of many engines: a request continues on another one when its engine is lost.

It decides when a request moves and who may get it; which engine is best is a function of the
caller. Output counts only for requests that its engine has now: nothing is delivered twice.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from gllm.messages.requests import AbortSequences, EngineOutputs
from gllm.router.dispatch_target import ChooseEngine, DispatchTarget, KvPeer, Parked, Submitted
from gllm.router.handoffs import Handoffs, PairChooser
from gllm.router.output_checks import drop_stale, split_refused
from gllm.routing.disaggregation.policy import EnginePair
from gllm.routing.engine_losses import EngineLosses, LossKind, PoisonRequest
from gllm.routing.handoff import HandoffLimits
from gllm.routing.rounds import PlacementRounds
from gllm.runtime.head.journal import JournalEntry
from gllm.runtime.head.request_client import RequestClient, SendFunction
from gllm.runtime.head.request_stream import RequestStream, SubmittedChoice, deliver_outputs

log = logging.getLogger(__name__)

MIGRATION_LIMIT = 3
"""Proven deaths of engines in a row after which the request that they computed is ended."""
_POISON_ERROR = (
    "an engine was lost each time that it computed this request, the last time while it had no "
    "other request; it is not tried again"
)


PATIENCE_SECONDS = 5.0
"""Time for which a request with tokens waits for an engine with equal numerics."""


class NumericsIndex:
    """Finds the engines whose numerics equal those of the engines that computed a request so far.

    Numerics is all that decides which tokens follow a prompt: weights, dtypes, kernels, devices.
    Reads no clock: time is an argument.

    Args:
        patience_seconds: waiting time after which engines with other numerics may continue a
            request.
    """

    def __init__(self, patience_seconds: float) -> None:
        self.num_inexact_migrations = 0
        """Requests that an engine with other numerics continued."""
        self._patience_seconds = patience_seconds
        self._names: dict[str, frozenset[str]] = {}
        """All names under the empty string."""
        self._pairs: set[tuple[str, str]] = set()
        """Engines between which such a migration was logged."""

    def update(self, engines: Iterable[DispatchTarget]) -> None:
        """Replace the attached engines."""
        names: dict[str, set[str]] = {"": set()}
        for engine in engines:
            names[""].add(engine.name)
            names.setdefault(engine.numerics, set()).add(engine.name)
        self._names = {numerics: frozenset(alike) for numerics, alike in names.items()}

    def eligible(
        self, entry: JournalEntry, parked_seconds: float, reserved: str
    ) -> list[frozenset[str]]:
        """Return the sets of engines that may run a request, in the order of preference.

        Args:
            entry: the request with its tokens so far.
            parked_seconds: time for which it has waited for an engine.
            reserved: engine that takes no other requests at present; requests wait until it is
                free.
        """
        equal = self._names.get(entry.numerics, frozenset())
        if not entry.numerics or reserved in equal or parked_seconds < self._patience_seconds:
            return [equal]
        return [equal, self._names[""] - equal]

    def on_submission(self, entry: JournalEntry, engine: DispatchTarget) -> None:
        """Count and log a request that continues on an engine with other numerics."""
        if entry.numerics in ("", engine.numerics):
            return
        entry.numerics = engine.numerics
        self.num_inexact_migrations += 1
        if (entry.engine, engine.name) not in self._pairs:
            self._pairs.add((entry.engine, engine.name))
            log.warning(
                "no engine with the numerics of %s takes requests: %s continues what it began, so "
                "texts may differ from then on",
                entry.engine,
                engine.name,
            )


class FleetClient(RequestClient):
    """Sends a router's requests to engines, and continues them elsewhere when an engine is lost.

    Requests for which no engine is available wait in the router (they are parked).
    """

    def __init__(
        self,
        choose: ChooseEngine,
        migration_limit: int = MIGRATION_LIMIT,
        on_output_length: Callable[[JournalEntry, int], None] | None = None,
        numerics_patience: float = PATIENCE_SECONDS,
        pairs: PairChooser | None = None,
        clock: Callable[[], float] | None = None,
        handoff_limits: HandoffLimits | None = None,
        rounds: PlacementRounds | None = None,
    ) -> None:
        """Create a client without engines.

        Args:
            choose: chooses the engine of a request. It must not call the client.
            migration_limit: proven deaths of engines in a row after which a request is ended; at
                least 2. Before its last trial it has an engine for itself.
            on_output_length: called with a request and the tokens of each output that has ended.
            numerics_patience: seconds after which other numerics may continue a request's tokens.
            pairs: chooses who prefills and who decodes; None if one engine does both.
            clock: returns the time in seconds; None for time.monotonic.
            handoff_limits: times of hand-offs; None for the defaults.
            rounds: decides which new requests wait; None to place each at its arrival.
        """
        if migration_limit < 2:
            raise ValueError(f"migration_limit is {migration_limit}, but has to be at least 2")
        super().__init__()
        self.num_migrations: Counter[str] = Counter()
        """Requests that were submitted to another engine, by cause: `lost`, `drained`,
        `recovering`, `unavailable` (the engine's own answer), `isolation` (of a suspect); with
        their KV blocks `moved` (from a drained engine) and `rebalanced`."""
        self.num_dispatched: Counter[str] = Counter()
        """Submissions by engine."""
        self.num_stale_tokens = 0
        """Tokens that arrived from an engine which no longer had their request."""
        self.on_held: Callable[[float], None] | None = None
        """Called when a new request waits for a heartbeat, with the time at which
        `dispatch_parked` is to be called, in seconds."""
        self.find_copy: Callable[[RequestStream], str] = lambda stream: ""
        """Returns the engine that has the KV of a request's first tokens, besides the one that
        computes it; empty if there is none."""
        self.rounds = rounds or PlacementRounds()
        self._choose = choose
        self._clock = clock or time.monotonic
        self._on_output_length = on_output_length or (lambda entry, length: None)
        self._engines: dict[str, DispatchTarget] = {}
        self.handoffs = Handoffs(self._engines, pairs, handoff_limits)
        self.numerics = NumericsIndex(numerics_patience)
        self._parked: dict[RequestStream, Parked] = {}
        self._suspects: EngineLosses[RequestStream] = EngineLosses(migration_limit - 1)
        self._reserved = ""
        """Engine that a suspect has for itself."""

    @property
    def num_parked(self) -> int:
        """Number of requests that wait for an engine."""
        return len(self._parked)

    @property
    def parked_since(self) -> float | None:
        """Time since which a request has waited for an engine; None if none does."""
        return min((parked.since for parked in self._parked.values()), default=None)

    def num_running(self, engine: str) -> int:
        """Return the number of requests that run on an engine."""
        attached = self._engines.get(engine)
        return len(attached.streams) if attached is not None else 0

    def kv_peer(self, engine: str) -> KvPeer | None:
        """Return the KV transfer interface of an engine; None if it has none or is not attached."""
        attached = self._engines.get(engine)
        return attached.kv if attached is not None else None

    def attach(
        self,
        engine: str,
        numerics: str,
        send: SendFunction,
        kv: KvPeer | None = None,
        run: int = 0,
    ) -> None:
        """Add an engine and dispatch the waiting requests.

        Args:
            engine: name; an attached engine of this name is lost.
            numerics: digest of all that its tokens depend on besides the request.
            send: sends a message to the engine, in order; must not raise once a message could be
                encoded.
            kv: its KV transfer interface; None if it neither gives nor fetches KV blocks.
            run: random number of this start of its process.
        """
        if former := self._engines.get(engine):
            kind = LossKind.SILENT if former.run == run else LossKind.DIED
            self.detach(engine, "another session took its place", kind)
        self._engines[engine] = DispatchTarget(engine, numerics, send, kv, run, self._clock())
        self.numerics.update(self._engines.values())
        self._end_poisons(self._suspects.on_attached(engine, run))
        self.dispatch_parked()
        self._notify()

    def detach(self, engine: str, cause: str, kind: LossKind) -> None:
        """Remove an engine whose connection has ended; its requests continue on other engines.

        Args:
            engine: name; nothing happens if it is not attached.
            cause: description of the end, for the error of a request that has caused it.
            kind: kind of the end; the requests that the engine had may have caused its death.
        """
        attached = self._engines.pop(engine, None)
        if attached is None:
            return
        self.handoffs.on_lost(engine)
        self.numerics.update(self._engines.values())
        streams = list(attached.streams)
        for stream in streams:
            self._take_back(attached, stream, "drained" if kind is LossKind.PLANNED else "lost")
        self._count_loss(attached, kind, cause, streams)
        self.dispatch_parked()
        self._notify()

    def migrate(self, engine: str, is_planned: bool = True) -> int:
        """Move the requests of an engine that still runs to other engines.

        A request for which no other engine is chosen stays where it is.

        Args:
            engine: name.
            is_planned: the engine works, but is to have no requests; otherwise the requests that
                move may have caused its trouble.

        Returns:
            Number of requests that move. Of a planned migration those with tokens are handed off
            with their KV blocks after their next token, if both engines can; the others are taken
            back at once.
        """
        attached = self._engines.get(engine)
        # A suspect that has the engine for itself stays until it has a token.
        if attached is None or (is_planned and self._reserved == engine):
            return 0
        for stream in attached.streams:
            if stream.entry.num_output_tokens:
                # Only engines of equal numerics continue the tokens exactly.
                stream.entry.numerics = attached.numerics
        moved = []
        num_handed_off = 0
        for stream in attached.streams:
            target = self._find_engine(stream, avoid=engine)
            if target is None:
                continue
            if is_planned and self.handoffs.move_cause(stream):
                continue
            if is_planned and self.handoffs.start_move(stream, attached, target.name):
                num_handed_off += 1
            else:
                moved.append(stream)
        seqs = {seq: stream for stream in moved for seq in stream.entry.seqs.values()}
        for stream in moved:
            self._take_back(attached, stream, "drained" if is_planned else "recovering")
        if seqs:
            attached.send(AbortSequences(list(seqs)))
        if not is_planned:
            cause = "the engine did not recover in time"
            self._count_loss(attached, LossKind.DIED, cause, moved)
        suspects = self._suspects.suspects(moved)
        for stream in moved:
            if stream not in self._parked or stream in suspects:
                continue
            # Chosen anew, because those before it count as load now.
            if (target := self._find_engine(stream, avoid=engine)) is not None:
                self._submit_to(target, stream)
        if suspects or not is_planned:
            self.dispatch_parked()
        self._notify()
        return len(moved) + num_handed_off

    def choices_on(self, engine: str) -> Mapping[int, SubmittedChoice]:
        """Return the running choices of an engine by wire id; empty if it is not attached."""
        attached = self._engines.get(engine)
        return MappingProxyType(attached.choices if attached is not None else {})

    def move(self, stream: RequestStream, target: str, cause: str) -> bool:
        """Let a running request continue on another engine with its KV blocks.

        Args:
            stream: the request.
            target: name of the engine that continues it.
            cause: key of `num_migrations`.

        Returns:
            False if it cannot move with its blocks at present; then nothing has changed.
        """
        engine = self._engines.get(stream.entry.engine)
        if engine is None or target not in self._engines or stream not in engine.streams:
            return False
        if self._reserved in (engine.name, target):
            return False
        return self.handoffs.start_move(stream, engine, target, cause)

    def dispatch_parked(self, avoid: str = "") -> None:
        """Submit the parked requests for which an engine is chosen, suspects of crashes first.

        The caller's function may choose otherwise than before, so this is called after each change
        that it considers, and at the heartbeats of `rounds`.

        Args:
            avoid: name of an engine that is not offered.
        """
        if self._parked:
            self.rounds.begin(self._clock())
        self._isolate_next(avoid)
        self._submit_each(sorted(self._parked, key=self._rank), avoid)

    def reject_parked(self, cause: str, parked_for: float = 0.0) -> None:
        """End the requests that have waited too long for an engine, with kind `unavailable`.

        Args:
            cause: text of the error.
            parked_for: least seconds of waiting.
        """
        limit = self._clock() - parked_for
        for stream, parked in list(self._parked.items()):
            # Without any engine the proof may never come.
            is_examined = bool(self._engines) and self._suspects.awaits_proof(stream)
            if parked.since <= limit and not is_examined:
                self._end(stream, stream.alive, "error", cause, "unavailable")
        self._notify()

    def on_outputs(self, engine: str, message: EngineOutputs) -> None:
        """Deliver the tokens and ends of an engine's output to the requests' readers.

        Requests that it gives back with kind `unavailable` go on elsewhere. Output of requests
        that it should not have is dropped, and the engine has to abort them.
        """
        attached = self._engines.get(engine)
        if attached is None:
            self.num_stale_tokens += len(message.outcome.seqs)
            return
        self.num_stale_tokens += drop_stale(attached, message)
        refused: dict[RequestStream, None] = {}
        if message.error_kinds:
            message, refused = split_refused(attached, message, self._ban)
        message, prefilled = self.handoffs.split_prefilled(attached, message)
        ended = deliver_outputs(message, attached.choices)
        self.handoffs.on_tokens(attached, message.outcome.seqs, self._clock())
        if self._suspects.has_losses:
            for seq in message.outcome.seqs:
                if target := attached.choices.get(seq):
                    self._suspects.clear(target.stream)
        for stream, choice, _ in ended:
            entry, end = stream.entry, stream.delta(choice).end
            if end is not None and end.finish_reason in ("stop", "length"):
                self._on_output_length(entry, len(entry.outputs[choice]))
            self._remove(stream, [choice])
        for stream, is_held in prefilled.items():
            self.handoffs.on_prefilled(stream, is_held, self._clock())
            self._take_back(attached, stream, self.handoffs.move_cause(stream))
            # Both engines together are one attempt.
            stream.entry.num_attempts = 0
        if refused:
            self._move_refused(attached, refused)
        if self._reserved and self._suspects.isolated is None:
            # The suspect has a token or has ended: other requests may use its engine.
            self.dispatch_parked(avoid=attached.name if refused else "")
        self._notify()
        if prefilled:
            self.continue_handoffs()

    def check_losses(self) -> None:
        """Decide which lost engines have died; to be called every second.

        Requests that waited for the decision continue with the next `dispatch_parked`.
        """
        if self._suspects.has_losses:
            self._end_poisons(self._suspects.on_tick(bool(self._engines), self._clock()))
            self._notify()

    def on_refused(self, run: int) -> None:
        """Record that the address of a lost engine refuses connections: it has died.

        Args:
            run: number of the start of its process.
        """
        self._end_poisons(self._suspects.on_refused(run))
        self.dispatch_parked()
        self._notify()

    def continue_handoffs(self) -> None:
        """Submit prefilled requests to their decode engines; renew and release kept KV blocks.

        To be called soon again while `handoffs.has_unread`, otherwise every second.
        """
        for stream in self.handoffs.pop_read(self._clock()):
            self._place(stream)

    def _dispatch(self, stream: RequestStream) -> None:
        now, rounds = self._clock(), self.rounds
        is_held = bool(self._engines) and rounds.holds(bool(self._parked), now)
        if not is_held and self._place(stream):
            rounds.begin(now)
            return
        self._check_encoding(stream)
        self._parked[stream] = Parked(now, "")
        if not is_held:
            is_held = rounds.on_unplaced() and bool(self._engines)
        rounds.num_held += is_held
        if self.on_held is not None and now < rounds.next_time:
            self.on_held(rounds.next_time)

    def _rank(self, stream: RequestStream) -> tuple[float, ...]:
        """Return the place of a parked request among those that are placed together."""
        entry = stream.entry
        return self.rounds.rank(entry.priority, entry.num_prefill_tokens, entry.arrival)

    def _place(self, stream: RequestStream, avoid: str = "") -> bool:
        """Submit a new or parked request to the engine that is chosen for it, if one is."""
        excluded = {avoid, self._reserved}
        pair = self.handoffs.choose(stream, self._eligible(stream)[0] - excluded, excluded)
        target = self._find_engine(stream, avoid) if pair is None else self._engines[pair.prefill]
        if target is not None:
            self._submit_to(target, stream, pair)
        return target is not None

    def _find_engine(self, stream: RequestStream, avoid: str = "") -> DispatchTarget | None:
        """Return the engine that is chosen for a request, other than `avoid`, if one is."""
        eligible = self._eligible(stream)
        moves_to = frozenset({self.handoffs.move_target(stream)} - {""})
        copy = eligible[0] & {self.find_copy(stream)}
        for names in (moves_to, copy, *eligible):
            if target := self._choose_among(stream, names - {avoid, self._reserved}):
                return target
        return None

    def _eligible(self, stream: RequestStream) -> list[frozenset[str]]:
        """Return the engines that may get a request, in the order of preference."""
        parked = self._parked.get(stream)
        waited = self._clock() - parked.since if parked is not None else 0.0
        return self.numerics.eligible(stream.entry, waited, self._reserved)

    def _choose_among(self, stream: RequestStream, names: frozenset[str]) -> DispatchTarget | None:
        name = self._choose(stream, names) if names else None
        return self._engines[name] if name is not None and name in names else None

    def _submit_each(self, streams: Iterable[RequestStream], avoid: str = "") -> None:
        """Submit parked requests, except suspects, if engines are chosen for them.

        While a new request waits for an engine with room, those behind it are not offered.
        """
        suspects = set(self._suspects.suspects(self._parked))
        for stream in streams:
            if stream in suspects or self._suspects.awaits_proof(stream):
                continue
            if self.handoffs.is_reading(stream) or self._place(stream, avoid):
                continue
            if not stream.entry.is_moved and self.rounds.on_unplaced():
                return

    def _submit_to(
        self, engine: DispatchTarget, stream: RequestStream, pair: EnginePair | None = None
    ) -> None:
        """Submit a new or parked request to an engine, the first one of a pair if there is one."""
        self._submit(stream, self.handoffs.sender(stream, engine, pair), engine.choices)
        self.handoffs.on_submitted(stream, engine)
        self.numerics.on_submission(stream.entry, engine)
        stream.entry.engine = engine.name
        self.num_dispatched[engine.name] += 1
        parked = self._parked.pop(stream, None) or Parked(self._clock(), "")
        engine.streams[stream] = Submitted(parked.since, stream.entry.num_output_tokens)
        if parked.cause:
            self.num_migrations[parked.cause] += 1

    def _take_back(self, engine: DispatchTarget, stream: RequestStream, cause: str) -> None:
        """Park a running request; the engine is not notified."""
        entry = stream.entry
        for seq in entry.seqs.values():
            del engine.choices[seq]
        entry.seqs.clear()
        self.handoffs.on_given_back(stream, engine.name)
        submitted, num_tokens = engine.streams.pop(stream), entry.num_output_tokens
        if num_tokens:
            entry.numerics = engine.numerics
        since = self._clock()
        if num_tokens > submitted.num_output_tokens:
            entry.num_refusals = 0
        elif cause == "unavailable":
            since = submitted.waits_since
        self._parked[stream] = Parked(since, cause)

    def _count_loss(
        self, engine: DispatchTarget, kind: LossKind, cause: str, streams: Iterable[RequestStream]
    ) -> None:
        """Record the loss of an engine for the requests that it had, which are parked."""
        others = [other for other in self._engines.values() if other is not engine]
        oldest = min((other.attached_at for other in others), default=None)
        self._end_poisons(
            self._suspects.on_lost(
                engine.name, engine.run, kind, cause, streams, oldest, self._clock()
            )
        )

    def _end_poisons(self, poisons: Iterable[PoisonRequest[RequestStream]]) -> None:
        """End requests that kill engines, and refuse equal ones."""
        for stream, cause in poisons:
            self._ban(stream.entry)
            text = f"{_POISON_ERROR}: {cause}"
            seqs = self._end(stream, stream.alive, "error", text, "poison")
            self._abort_seqs(stream, seqs)

    def _ban(self, entry: JournalEntry) -> None:
        """Refuse requests equal to one that has killed workers."""
        self._poison.add(entry.prompt, entry.sampling, self._clock())

    def _isolate_next(self, avoid: str = "") -> None:
        """Give an engine to the next suspect alone, if none runs alone."""
        if self._suspects.isolated is not None:
            return
        self._reserved = ""
        suspects = self._suspects.suspects(self._parked)
        now = self._clock()
        # The request that kills engines has seldom generated many tokens.
        for suspect in sorted(suspects, key=lambda suspect: suspect.entry.num_output_tokens):
            if not self._suspects.may_isolate(suspect, now):
                continue
            if engine := self._find_engine_alone(suspect, avoid):
                self._isolate(suspect, engine)
                return

    def _find_engine_alone(self, suspect: RequestStream, avoid: str) -> DispatchTarget | None:
        """Return an engine for a suspect: one of those with the fewest requests, if possible."""
        for eligible in self._eligible(suspect):
            names = eligible - {avoid}
            fewest = min((len(self._engines[name].streams) for name in names), default=0)
            least = frozenset(name for name in names if len(self._engines[name].streams) == fewest)
            target = self._choose_among(suspect, least)
            if target := target or self._choose_among(suspect, names - least):
                return target
        return None

    def _isolate(self, suspect: RequestStream, engine: DispatchTarget) -> None:
        """Run a suspect on an engine whose other requests go elsewhere."""
        self._reserved = engine.name
        seqs = list(engine.choices)
        for stream in list(engine.streams):
            self._take_back(engine, stream, "isolation")
        if seqs:
            engine.send(AbortSequences(seqs))
        self._submit_to(engine, suspect)
        self._suspects.isolate(suspect, self._clock())

    def _move_refused(self, engine: DispatchTarget, streams: Iterable[RequestStream]) -> None:
        """Continue requests that an engine has returned unfinished on other engines."""
        for stream in streams:
            seqs = list(stream.entry.seqs.values())
            self._take_back(engine, stream, "unavailable")
            # Choices that it did not give back; it does not mind the others.
            engine.send(AbortSequences(seqs))
            if self._suspects.isolated is stream:
                self._suspects.isolated = None
            stream.entry.num_refusals += 1
        # Others wait for the next `dispatch_parked`, so that engines do not pass them around.
        first = [stream for stream in streams if stream.entry.num_refusals == 1]
        self._submit_each(first, avoid=engine.name)

    def _on_removed(self, stream: RequestStream) -> None:
        self._parked.pop(stream, None)
        self.handoffs.on_end(stream)
        self._suspects.clear(stream)
        if engine := self._engines.get(stream.entry.engine):
            engine.streams.pop(stream, None)

    def _abort_seqs(self, stream: RequestStream, seqs: list[int]) -> None:
        engine = self._engines.get(stream.entry.engine)
        if seqs and engine is not None:
            engine.send(AbortSequences(seqs))
        if self._reserved and self._suspects.isolated is None:
            self.dispatch_parked()
