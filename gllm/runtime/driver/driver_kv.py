"""The driver's part in transfers of KV blocks between engines.

It passes the scheduler's fetches, holds and revocations to the KV mover, by way of the head
process, and the mover's answers to the scheduler. docs/disaggregation.md has the whole path.
"""

import logging
import time
from collections.abc import Callable
from itertools import count

from gllm.messages.base import WireMessage
from gllm.messages.handoff import (
    FirstChunkComputed,
    HandoffCommand,
    KvSource,
    PrefetchKv,
    ReleaseKvHolds,
    RenewKvHolds,
)
from gllm.messages.kv_transfer import (
    CancelKvFetch,
    FetchKv,
    KvFetched,
    KvFetchStarted,
    KvReport,
    KvRevoked,
    RevokeKv,
    ServeKv,
)
from gllm.messages.requests import SubmitRequest
from gllm.scheduler.kv_fetches import KvFetch
from gllm.scheduler.kv_prefetches import PrefetchRequest
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.step_cost import StepCostCoefficients
from gllm.transport.kv.break_even import FetchDecision

log = logging.getLogger(__name__)

MIN_PREFILL_TOKENS = 1024
"""Prompt tokens that this engine has to have computed before the fitted step cost counts: steps of
decodes alone say nothing about prefills."""


class DriverKv:
    """Transfers of one driver."""

    def __init__(self, scheduler: Scheduler, send: Callable[[WireMessage], None]) -> None:
        """Create the object.

        Args:
            scheduler: of the driver.
            send: sends to the head process, which has the KV mover.
        """
        self.coefficients: StepCostCoefficients | None = None
        """Fitted step cost, for the decision whether a fetch is worth it."""
        self.fetch_choice = "auto"
        """`EngineConfig.kv_fetch`."""
        self._scheduler = scheduler
        self._send = send
        self._sources: dict[int, KvSource] = {}
        """Sources of sequences whose fetch has not begun."""
        self._numbers = count()
        self._fetches: dict[int, tuple[KvFetch, KvSource, float]] = {}
        """Fetches that run and their begins, by number."""
        self._served: set[int] = set()
        """Tickets that the mover may serve."""
        self._decisions: dict[str, FetchDecision] = {}
        """Decisions on fetches, by the engine that has the blocks."""
        self._bytes_per_token = 0.0

    @property
    def is_active(self) -> bool:
        """True while leases and fetches need a turn of the driver from time to time."""
        return bool(self._fetches or self._served or self._scheduler.has_pending_fetches)

    def add_to(self, request: SchedulerRequest, message: SubmitRequest) -> SchedulerRequest:
        """Return a request with its ticket, and with the number of tokens that can be fetched."""
        source, num_tokens = message.kv_source, 0
        if source is not None:
            # At least one token is computed, so that there are logits to sample from.
            num_known = len(message.prompt) + min(map(len, message.outputs), default=0)
            num_tokens = min(source.num_tokens, num_known - 1)
        if source is not None and num_tokens:
            self._sources[message.seq] = source
        return request._replace(
            kv_ticket=message.kv_ticket,
            kv_source_tokens=num_tokens,
            kv_source_ticket=0 if source is None else source.ticket,
            is_kv_foreign=source is not None and source.is_foreign,
            reports_first_chunk=message.reports_first_chunk,
        )

    def forget(self, seq: int) -> None:
        """Forget a sequence that cannot run."""
        self._sources.pop(seq, None)

    def start_fetches(self) -> None:
        """Start the fetches of the scheduler; to be called before it schedules."""
        now = time.monotonic()
        for fetch in self._scheduler.take_fetches(now):
            source = self._sources.pop(fetch.seq, None)
            if not fetch.num_tokens:
                continue
            if source is None or not (fetch.is_early or self._is_worth(fetch, source, now)):
                self._scheduler.finish_fetch(fetch.seq, False, now)
                continue
            number = next(self._numbers)
            self._fetches[number] = fetch, source, now
            self._send(
                FetchKv(
                    number,
                    source.ticket,
                    source.endpoint,
                    fetch.first_token,
                    fetch.num_tokens,
                    fetch.block_ids,
                    fetch.is_early,
                )
            )

    def report_first_chunks(self) -> None:
        """Report prompts whose first chunk is computed, if their router has to know."""
        for ticket in self._scheduler.take_first_chunks():
            self._send(FirstChunkComputed(ticket))

    def report_transfers(self) -> None:
        """Pass new pushes, holds, revocations and cancellations on; called after each turn."""
        scheduler, now = self._scheduler, time.monotonic()
        for push in scheduler.take_pushes():
            self._served.add(push.ticket)
            # Numbers of steps begin with 1 there.
            step = push.step + 1
            self._send(ServeKv(push.ticket, push.num_tokens, push.block_ids, step, push.is_partial))
        for hold in scheduler.take_holds():
            self._served.add(hold.ticket)
            self._send(ServeKv(hold.ticket, hold.num_tokens, hold.block_ids))
        for ticket in scheduler.take_revocations(now):
            self._send(RevokeKv(ticket))
        for seq in scheduler.take_fetch_cancellations():
            self._sources.pop(seq, None)
            numbers = [number for number, (fetch, *_) in self._fetches.items() if fetch.seq == seq]
            for number in numbers:
                self._send(CancelKvFetch(number))

    def on_message(self, message: KvReport | HandoffCommand) -> None:
        """Handle an answer of the mover, or a command of a router."""
        match message:
            case PrefetchKv():
                self._prefetch(message)
            case ReleaseKvHolds(tickets):
                self._scheduler.release_holds(tickets)
            case RenewKvHolds(tickets):
                self._scheduler.renew_holds(tickets, time.monotonic())
            case KvFetchStarted(number) if number in self._fetches:
                self._scheduler.record_fetch_progress(self._fetches[number][0].seq)
            case KvFetched() if message.fetch in self._fetches:
                self._on_fetched(message, *self._fetches.pop(message.fetch))
            case KvRevoked(ticket):
                self._served.discard(ticket)
                self._scheduler.confirm_revocation(ticket)

    def _on_fetched(
        self, message: KvFetched, fetch: KvFetch, source: KvSource, begin: float
    ) -> None:
        now = time.monotonic()
        if message.is_ok:
            if not fetch.is_early:
                decision = self._decisions.setdefault(source.engine, FetchDecision())
                # With the ways to the mover and back, for which the request waits too.
                decision.observe(message.num_bytes, now - begin, now)
            self._bytes_per_token = message.num_bytes / fetch.num_tokens
        if self._scheduler.finish_fetch(fetch.seq, message.is_ok, now):
            # It has not read all, so another fetch may use the ticket.
            self._sources[fetch.seq] = source

    def _prefetch(self, message: PrefetchKv) -> None:
        """Fetch the KV of a request that arrives later; one that could not run is ignored."""
        if self.fetch_choice == "never":
            return
        source = message.source
        request = PrefetchRequest(
            source.ticket,
            message.prompt,
            message.max_tokens,
            message.priority,
            message.cache_salt,
            message.age_seconds,
            message.predicted_output_tokens,
        )
        try:
            seq = self._scheduler.prefetch(request, time.monotonic())
        except ValueError as error:
            log.warning("the KV of a request is not prefetched: %s", error)
            return
        self._sources[seq] = source

    def _is_worth(self, fetch: KvFetch, source: KvSource, now: float) -> bool:
        """Return True if a fetch is predicted to take less time than the prefill of its tokens."""
        if self.fetch_choice != "auto":
            return self.fetch_choice == "always"
        decision = self._decisions.get(source.engine)
        if decision is None or self.coefficients is None:
            # The first transfer measures the rate.
            return True
        if self._scheduler.stats().prefill_tokens < MIN_PREFILL_TOKENS:
            return True
        num_bytes = int(fetch.num_tokens * self._bytes_per_token)
        compute = self.coefficients.predict_chunk_seconds(fetch.first_token, fetch.num_tokens)
        return decision.is_worth(num_bytes, compute, now)
