"""The driver's part in transfers of KV blocks between engines.

It passes what the scheduler wants to fetch, to serve and to revoke on to the KV mover, and the
mover's reports to the scheduler, whose table of tickets and fetches is the only one here: if the
mover has gone, everything in it ends. docs/disaggregation.md has the whole path.
"""

import logging
import time
from collections.abc import Callable

from gllm.messages import handoff, kv_transfer
from gllm.messages.base import WireMessage
from gllm.messages.requests import SubmitRequest
from gllm.scheduler.kv_holds import ReadableKv
from gllm.scheduler.kv_transfers import KvFetch, PrefetchRequest
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.step_cost import StepCostCoefficients
from gllm.transport.descriptors import DescriptorError
from gllm.transport.kv.break_even import FetchDecision

log = logging.getLogger(__name__)

MIN_PREFILL_TOKENS = 1024
"""Prompt tokens that this engine has to have computed before the fitted step cost counts: steps of
decodes alone say nothing about prefills."""
ANSWER_SECONDS = 10.0
"""Time within which the KV mover has to confirm a revocation or to end a cancelled fetch."""
_MAX_TURN_SECONDS = 5.0
"""Interval between two checks of the answers after which this process itself was suspended."""
_NOTHING = kv_transfer.KvTransferTotals()
_GONE = "the KV mover has ended"


class UnansweredCommands:
    """Commands that the KV mover has not answered yet, with their deadlines.

    They are here because the mover may freeze. Pure: time is an argument.
    """

    def __init__(self) -> None:
        """Create without commands."""
        self._times: dict[tuple[str, int], float] = {}
        """Begin of the wait for each answer, by kind and number of the command, oldest first."""
        self._last_check = 0.0

    def add(self, kind: str, number: int, now: float) -> None:
        """Expect the answer to a command from now on."""
        self._times.setdefault((kind, number), now)

    def remove(self, kind: str, number: int) -> None:
        """Note an answer; one that is not expected is ignored."""
        self._times.pop((kind, number), None)

    def clear(self) -> None:
        """Expect no answer any more."""
        self._times.clear()

    def is_overdue(self, now: float) -> bool:
        """Return True if an answer is late; called once per turn of the driver."""
        if now - self._last_check > _MAX_TURN_SECONDS:
            # The answers may have arrived without being read.
            self._times = dict.fromkeys(self._times, now)
        self._last_check = now
        return any(now - begin > ANSWER_SECONDS for begin in self._times.values())


class DriverKv:
    """Connects the scheduler to the process that transfers KV blocks between engines.

    It sends that process (`gllm-link`) the scheduler's requests to fetch, serve or revoke blocks,
    and the scheduler the process's reports.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        report: Callable[[WireMessage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the object, without a KV mover.

        Args:
            scheduler: of the driver.
            report: sends to the head process.
            clock: returns the time in seconds.
        """
        self._clock = clock
        self._unanswered = UnansweredCommands()
        self.coefficients: StepCostCoefficients | None = None
        """Fitted step cost, for the decision whether a fetch is worth it."""
        self.fetch_choice = "auto"
        """`EngineConfig.kv_fetch`."""
        self._scheduler = scheduler
        self._transfers = scheduler.transfers
        self._report = report
        self._mover: Callable[[kv_transfer.KvCommand], None] | None = None
        """Sends to the KV mover; None while there is none."""
        self._totals = _NOTHING
        """Not reported yet."""
        self._decisions: dict[str, FetchDecision] = {}
        """Decisions on fetches, by the engine that has the blocks."""
        self._bytes_per_token = 0.0

    @property
    def is_active(self) -> bool:
        """True while KV blocks are fetched or reserved for other engines: a timer is needed."""
        return self._transfers.is_active

    def connect(self, mover: Callable[[kv_transfer.KvCommand], None]) -> None:
        """Send commands to a `gllm-link` process that has just started; the earlier one has ended.

        Args:
            mover: sends a command. Raises DescriptorError if the process has ended or does not
                read.
        """
        self._disconnect()
        self._mover = mover

    def _disconnect(self) -> None:
        """End all fetches and tickets, because no process reads or writes blocks any more."""
        if self._mover is None:
            return
        self._mover = None
        self._unanswered.clear()
        for seq in list(self._transfers.fetches):
            self._finish(kv_transfer.KvFetched(seq, is_ok=False, cause=_GONE))
        # Also what was not served yet has the tickets of the table.
        self._transfers.pop_readable()
        for ticket in self._transfers.tickets:
            self._transfers.confirm_revocation(ticket)

    def add_transfer_fields(
        self, request: SchedulerRequest, message: SubmitRequest
    ) -> SchedulerRequest:
        """Return a scheduler request with the fields that describe its KV transfer."""
        source, num_tokens = message.kv_source, 0
        if source is not None:
            # At least one token is computed, so that there are logits to sample from.
            num_known = len(message.prompt) + min(map(len, message.outputs), default=0)
            num_tokens = min(source.num_tokens, num_known - 1)
        return request._replace(
            kv_ticket=message.kv_ticket,
            kv_source_tokens=num_tokens,
            kv_source_ticket=0 if source is None else source.ticket,
            is_kv_foreign=source is not None and source.is_foreign,
            kv_source=source,
            reports_first_chunk=message.reports_first_chunk,
            is_ticket_foreign=message.is_ticket_foreign,
        )

    def start_fetches(self) -> None:
        """Start to fetch the KV blocks that the scheduler has requested; called before it runs."""
        now = self._clock()
        for fetch in self._transfers.start_fetches(now):
            if not fetch.num_tokens:
                continue
            source = fetch.source
            assert isinstance(source, handoff.KvSource)
            if self._mover is None:
                self._finish(kv_transfer.KvFetched(fetch.seq, is_ok=False, cause=_GONE))
            elif fetch.is_early or self._is_worth(fetch, source, now):
                command = kv_transfer.FetchKv(
                    fetch.seq,
                    source.ticket,
                    source.endpoint,
                    fetch.first_token,
                    fetch.num_tokens,
                    fetch.block_ids,
                    fetch.is_early,
                )
                self._command(command)
            else:
                # The scheduler computes the tokens.
                self._transfers.finish_fetch(fetch.seq, is_ok=False)

    def report_first_chunks(self) -> None:
        """Report prompts whose first prefill chunk is computed, if a router has requested it."""
        for ticket in self._transfers.pop_first_chunks():
            self._report(handoff.FirstChunkComputed(ticket))

    def report_transfers(self) -> None:
        """Send the `gllm-link` process the scheduler's new, revoked and cancelled transfers.

        Called after each iteration.
        """
        transfers = self._transfers
        for readable in transfers.pop_readable():
            self._serve(readable)
        now = self._clock()
        for ticket in transfers.pop_revocations(now):
            if self._mover is None:
                transfers.confirm_revocation(ticket)
            else:
                self._unanswered.add("revoke", ticket, now)
                self._command(kv_transfer.RevokeKv(ticket))
        for seq in transfers.pop_cancellations():
            if seq in transfers.fetches:
                self._unanswered.add("cancel", seq, now)
                self._command(kv_transfer.CancelKvFetch(seq))
        if self._unanswered.is_overdue(now) and self._mover is not None:
            # It may still write: nothing is freed before the process has ended.
            log.warning("gllm-link has not answered for %g seconds", ANSWER_SECONDS)
            self._unanswered.clear()
            self._mover = _drop
            self._report(kv_transfer.KvMoverStuck())
        if self._totals is not _NOTHING:
            self._report(self._totals)
            self._totals = _NOTHING

    def _serve(self, readable: ReadableKv) -> None:
        ticket = readable.ticket
        if self._mover is None:
            self._transfers.confirm_revocation(ticket)
            return
        # Numbers of steps begin with 1 there.
        step = 0 if readable.step is None else readable.step + 1
        command = kv_transfer.ServeKv(
            ticket,
            readable.num_tokens,
            readable.block_ids,
            step,
            readable.is_partial,
            readable.lane,
        )
        self._command(command)
        if readable.is_first:
            self._totals += kv_transfer.KvTransferTotals(num_served=1, num_pushed=int(step > 0))
            if step:
                self._report(handoff.KvPushStarted(ticket))

    def _command(self, command: kv_transfer.KvCommand) -> None:
        """Send a command to the KV mover, if there is one."""
        if self._mover is None:
            return
        try:
            self._mover(command)
        except DescriptorError as error:
            # The rest of this command may be missing. The end of the channel follows.
            self._mover = _drop
            if isinstance(error.__cause__, BlockingIOError):
                self._report(kv_transfer.KvMoverStuck())

    def on_message(self, message: kv_transfer.KvReport | handoff.HandoffCommand) -> None:
        """Handle a report of the `gllm-link` process, or a router's command about KV blocks."""
        match message:
            case handoff.PrefetchKv():
                self._prefetch(message)
            case handoff.ReleaseKvHolds(tickets):
                self._transfers.release(tickets)
            case handoff.RenewKvHolds(tickets):
                self._transfers.renew(tickets, self._clock())
            case kv_transfer.KvFetchStarted(seq):
                self._transfers.record_progress(seq)
            case kv_transfer.KvFetched(seq) if seq in self._transfers.fetches:
                self._finish(message)
            case kv_transfer.KvRevoked(ticket):
                self._unanswered.remove("revoke", ticket)
                self._transfers.confirm_revocation(ticket)
            case kv_transfer.KvMoverGone():
                self._disconnect()

    def _finish(self, message: kv_transfer.KvFetched) -> None:
        """End a fetch, and learn from its duration."""
        fetch, num_bytes = self._transfers.fetches[message.fetch], message.num_bytes
        self._unanswered.remove("cancel", message.fetch)
        if message.is_ok:
            self._totals += kv_transfer.KvTransferTotals(1, 0, num_bytes, message.seconds)
            if not fetch.is_early:
                assert isinstance(fetch.source, handoff.KvSource)
                decision = self._decisions.setdefault(fetch.source.engine, FetchDecision())
                decision.observe(num_bytes, message.seconds, self._clock())
            self._bytes_per_token = num_bytes / fetch.num_tokens
        else:
            self._totals += kv_transfer.KvTransferTotals(num_failed=1, num_bytes=num_bytes)
            log.info("KV of another engine was not fetched: %s", message.cause)
        self._transfers.finish_fetch(fetch.seq, message.is_ok)

    def _prefetch(self, message: handoff.PrefetchKv) -> None:
        """Fetch the KV of a request that arrives later; one that could not run is ignored."""
        if self.fetch_choice == "never":
            return
        request = PrefetchRequest(
            message.source.ticket,
            message.prompt,
            message.max_tokens,
            message.priority,
            message.cache_salt,
            message.age_seconds,
            message.predicted_output_tokens,
            message.source,
        )
        try:
            self._transfers.prefetch(request, self._clock())
        except ValueError as error:
            log.warning("the KV of a request is not prefetched: %s", error)

    def _is_worth(self, fetch: KvFetch, source: handoff.KvSource, now: float) -> bool:
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


def _drop(command: kv_transfer.KvCommand) -> None:
    """Send nothing, because the KV mover has gone or does not read."""
