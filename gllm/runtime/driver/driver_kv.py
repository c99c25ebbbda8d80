"""The driver's part in transfers of KV blocks between engines.

It passes what the scheduler wants to fetch, to serve and to revoke on to the KV mover, and the
mover's reports to the scheduler, whose table of tickets and fetches is the only one here: if the
mover has gone, everything in it ends. docs/disaggregation.md has the whole path.
"""

import logging
import time
from collections.abc import Callable, Sequence

from gllm.messages import handoff, kv_disk, kv_transfer
from gllm.messages.base import WireMessage
from gllm.messages.kv_disk import LoadKvFromDisk
from gllm.messages.requests import SubmitRequest
from gllm.runtime.driver.driver_kv_disk import DiskSource, DriverKvDisk
from gllm.runtime.driver.kv_movers import GONE, MoverGroup, SendCommand
from gllm.runtime.driver.staged_movers import StagedMovers
from gllm.scheduler.block_pool import chain_hashes, root_hash
from gllm.scheduler.kv_holds import ReadableKv
from gllm.scheduler.kv_transfers import KvFetch, PrefetchRequest
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.step_cost import StepCostCoefficients
from gllm.transport.kv.break_even import FetchDecision
from gllm.transport.kv.push_threshold import PushThreshold

log = logging.getLogger(__name__)

MIN_PREFILL_TOKENS = 1024
"""Prompt tokens that this engine has to have computed before the fitted step cost counts: steps of
decodes alone say nothing about prefills."""
MAX_PROMPTS = 4096
"""Prompts whose transfers are measured at the same time; some may end without one."""
SendMachineCommand = Callable[[kv_transfer.KvMachineCommand], None]
"""Sends to the first worker of another machine."""
_NOTHING = kv_transfer.KvTransferTotals()


class DriverKv:
    """Connects the scheduler to the processes that transfer KV blocks between engines.

    It sends those processes (`gllm-link`, one per machine of the engine) the scheduler's requests
    to fetch, serve or revoke blocks, and the scheduler their reports.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        report: Callable[[WireMessage], None],
        clock: Callable[[], float] = time.monotonic,
        machines: Sequence[SendMachineCommand] = (),
        staging: Callable[[MoverGroup], StagedMovers] | None = None,
        has_disk: bool = False,
    ) -> None:
        """Create the object, without a KV mover.

        Args:
            scheduler: scheduler of the driver.
            report: sends to the head process.
            clock: returns the time in seconds.
            machines: send a command to the mover of each other machine of the engine.
            staging: puts staging blocks between the movers and the KV caches of devices; None for
                caches that the movers map.
            has_disk: True if blocks of the prefix cache are kept on disk; not with staging blocks.
        """
        self._clock = clock
        self._machines = machines
        movers = MoverGroup(
            1 + len(machines), lambda machine: report(kv_transfer.KvMoverStuck(machine))
        )
        self._staged = None if staging is None else staging(movers)
        self._movers = self._staged or movers
        self._group = movers
        self.disk: DriverKvDisk | None = None
        """Disk tier of the prefix cache; None without one."""
        if has_disk:
            size = scheduler.config.block_size
            sizes = size, 1 + len(machines)
            self.disk = DriverKvDisk(scheduler.kv_cache, *sizes, movers.send_to_all)
        self.coefficients: StepCostCoefficients | None = None
        """Fitted step cost, for the decision whether a fetch is worth it."""
        self.fetch_choice = "auto"
        """`EngineConfig.kv_fetch`."""
        self._scheduler = scheduler
        self._transfers = scheduler.transfers
        self._report = report
        self._totals = _NOTHING
        """Not reported yet."""
        self._decisions: dict[str, FetchDecision] = {}
        """Decisions on fetches, by the engine that has the blocks."""
        self._bytes_per_token = 0.0
        config = scheduler.config
        self._threshold: PushThreshold | None = None
        """Measures from which length on prompts are transferred early; None if that is configured,
        or none is."""
        if config.push_threshold is not None and config.kv_push_threshold is None:
            self._threshold = PushThreshold(config.push_threshold)
        self._prompts: dict[int, None] = {}
        """Tickets of the latest prompts for other engines whose prefill has not ended."""
        self._held: dict[int, tuple[int, bool, float]] = {}
        """Tokens of each prompt that is computed and not read to the end, by ticket, True if it
        could be read before, and the time in seconds. For `_threshold`."""
        self._num_tokens_read_ahead = 0
        """Tokens of `SchedulerTransfers` that are reported as hits."""

    @property
    def is_active(self) -> bool:
        """True while KV blocks are fetched or reserved for other engines: a timer is needed."""
        return self._transfers.is_active or (self.disk is not None and self.disk.is_active)

    def set_step_cost(self, coefficients: StepCostCoefficients) -> None:
        """Set the fitted step cost, by which fetches are decided."""
        self.coefficients = coefficients
        if self.disk is not None:
            self.disk.set_step_cost(coefficients)

    def connect(self, mover: SendCommand, machine: int = 0) -> None:
        """Send commands to a `gllm-link` process that has just started; the earlier one has ended.

        Args:
            mover: sends a command. Raises DescriptorError if the process has ended or does not
                read.
            machine: index of its machine in the engine; 0 is this one.
        """
        if self._movers.has_mover(machine):
            self._on_report(machine, kv_transfer.KvMoverGone())
        self._movers.connect(machine, mover)

    def add_transfer_fields(
        self, request: SchedulerRequest, message: SubmitRequest
    ) -> SchedulerRequest:
        """Return a scheduler request with the fields that describe its KV transfer."""
        source, num_tokens = message.kv_source, 0
        if message.kv_ticket and self._threshold is not None:
            self._transfers.set_push_threshold(self._threshold.next_threshold())
            self._prompts[message.kv_ticket] = None
            if len(self._prompts) > MAX_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
        if source is None and not message.kv_ticket and self.disk is not None:
            return self._add_disk_fields(request, self.disk)
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

    def _add_disk_fields(self, request: SchedulerRequest, disk: DriverKvDisk) -> SchedulerRequest:
        """Return a scheduler request whose first blocks are read from disk if that is faster."""
        if not (disk.has_blocks and request.reads_prefix_cache) or self.fetch_choice == "never":
            return request
        size = self._scheduler.config.block_size
        # At least one token is computed, so that there are logits to sample from.
        choice = request if request.n == 1 else request._replace(outputs=())
        tokens = choice.initial_token_ids(request.seq)
        tokens = tokens[: (len(tokens) - 1) // size * size]
        hashes = chain_hashes(root_hash(request.cache_salt), tokens, size)
        if (found := disk.find_source(tokens, request.cache_salt, hashes)) is None:
            return request
        num_memory, source = found
        num_tokens = len(source.keys) * size
        first_token = num_memory * size
        fetch = KvFetch(request.seq, first_token, num_tokens - first_token, [], source)
        if not self._is_worth(fetch, source.engine, self._clock()):
            return request
        disk.prefetch(source.keys[num_memory:])
        return request._replace(kv_source_tokens=num_tokens, kv_source=source, is_kv_on_disk=True)

    def start_fetches(self) -> None:
        """Start to fetch the KV blocks that the scheduler has requested; called before it runs."""
        now = self._clock()
        for fetch in self._transfers.start_fetches(now):
            if not fetch.num_tokens:
                continue
            source = fetch.source
            if isinstance(source, DiskSource):
                self._start_load(fetch, source, now)
                continue
            assert isinstance(source, handoff.KvSource)
            if not self._movers.is_complete:
                self._finish(kv_transfer.KvFetched(fetch.seq, is_ok=False, cause=GONE))
            elif fetch.is_early or self._is_worth(fetch, source.engine, now):
                command = kv_transfer.FetchKv(
                    fetch.seq,
                    source.ticket,
                    source.endpoint,
                    fetch.first_token,
                    fetch.num_tokens,
                    fetch.block_ids,
                    fetch.is_early,
                )
                if cause := self._movers.fetch(command):
                    self._finish(kv_transfer.KvFetched(fetch.seq, is_ok=False, cause=cause))
            else:
                # The scheduler computes the tokens.
                self._transfers.finish_fetch(fetch.seq, is_ok=False)

    def _start_load(self, fetch: KvFetch, source: DiskSource, now: float) -> None:
        """Let all machines read blocks from disk, or let the scheduler compute their tokens."""
        assert self.disk is not None
        first_block = fetch.first_token // self._scheduler.config.block_size
        keys = source.keys[first_block : first_block + len(fetch.block_ids)]
        cause = "some blocks are not on disk any more"
        if self.disk.has_all(keys):
            if not self._is_worth(fetch, source.engine, now):
                # The scheduler computes the tokens.
                self._transfers.finish_fetch(fetch.seq, is_ok=False)
                return
            cause = self._group.fetch(LoadKvFromDisk(fetch.seq, keys, fetch.block_ids))
        if cause:
            self._finish(kv_transfer.KvFetched(fetch.seq, is_ok=False, cause=cause))

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
            # What is revoked was not read to the end.
            self._held.pop(ticket, None)
            if not self._movers.revoke(ticket, now):
                transfers.confirm_revocation(ticket)
        for seq in transfers.pop_cancellations():
            if seq in transfers.fetches:
                self._movers.cancel(seq, now)
        self._movers.check_answers(now)
        if self._totals is not _NOTHING:
            self._report(self._totals)
            self._totals = _NOTHING
        if self.disk is not None:
            self.disk.count_hits(transfers.num_tokens_read_ahead - self._num_tokens_read_ahead)
            self._num_tokens_read_ahead = transfers.num_tokens_read_ahead
            self.disk.update(now)
            if (totals := self.disk.pop_totals()) is not None:
                self._report(totals)

    def _serve(self, readable: ReadableKv) -> None:
        ticket = readable.ticket
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
        if not self._movers.serve(command):
            self._transfers.confirm_revocation(ticket)
            return
        if readable.step is None and ticket in self._prompts:
            # What is kept of running sequences says nothing about prompts.
            del self._prompts[ticket]
            self._held[ticket] = readable.num_tokens, not readable.is_first, self._clock()
        if readable.is_first:
            self._totals += kv_transfer.KvTransferTotals(num_served=1, num_pushed=int(step > 0))
            if step:
                self._report(handoff.KvPushStarted(ticket))

    def on_message(
        self,
        message: kv_transfer.KvReport
        | kv_transfer.KvMachineReport
        | kv_transfer.KvBlocksCopied
        | handoff.HandoffCommand,
    ) -> None:
        """Handle a report of a `gllm-link` process, or a router's command about KV blocks."""
        match message:
            case handoff.PrefetchKv():
                self._prefetch(message)
            case handoff.ReleaseKvHolds(tickets):
                self._transfers.release(tickets)
            case handoff.RenewKvHolds(tickets):
                self._transfers.renew(tickets, self._clock())
            case handoff.HandOffSequence(seq, ticket):
                self._scheduler.hand_off(seq, ticket)
            case handoff.KeepComputedKv(seq, ticket, num_tokens):
                self._scheduler.keep_computed(seq, ticket, num_tokens, self._clock())
            case kv_transfer.KvBlocksCopied(number):
                assert self._staged is not None, "only copies are reported"
                self._pass_on(self._staged.on_copied(number))
            case kv_transfer.KvMachineReport(machine, kv_transfer.KvMoverConnected(connection)):
                send = self._machines[machine - 1]
                self.connect(
                    lambda command: send(kv_transfer.KvMachineCommand(connection, command)), machine
                )
            case kv_transfer.KvMachineReport(machine, report):
                assert not isinstance(report, kv_transfer.KvMoverConnected)
                self._on_report(machine, report)
            case _:
                self._on_report(0, message)

    def _on_report(self, machine: int, message: kv_transfer.KvReport) -> None:
        """Handle a report of one machine's mover."""
        if isinstance(message, kv_disk.KvDiskReport):
            if self.disk is not None:
                self.disk.on_report(machine, message)
            return
        if isinstance(message, kv_transfer.KvMoverGone) and self.disk is not None:
            # First: fetches that fail now must not begin again.
            self.disk.on_gone(machine)
        self._pass_on(self._movers.on_report(machine, message, self._clock()))
        if isinstance(message, kv_transfer.KvMoverGone):
            # What was not served yet cannot be served; it has the tickets of the table.
            self._transfers.pop_readable()
            for ticket in self._transfers.tickets:
                if not self._movers.has_ticket(ticket):
                    self._transfers.confirm_revocation(ticket)

    def _pass_on(self, reports: list[kv_transfer.KvReport]) -> None:
        """Report to the scheduler what holds for the whole engine."""
        for report in reports:
            match report:
                case kv_transfer.KvFetchStarted(seq):
                    self._transfers.record_progress(seq)
                case kv_transfer.KvFetched(seq) if seq in self._transfers.fetches:
                    self._finish(report)
                case kv_transfer.KvRevoked(ticket):
                    self._observe_read(ticket)
                    self._transfers.confirm_revocation(ticket)

    def _observe_read(self, ticket: int) -> None:
        """Learn from a ticket whose blocks are not read any more, if all of them were."""
        held = self._held.pop(ticket, None)
        if held is not None and self._threshold is not None:
            num_tokens, is_pushed, since = held
            now = self._clock()
            self._threshold.observe(num_tokens, is_pushed, now - since, now)

    def _finish(self, message: kv_transfer.KvFetched) -> None:
        """End a fetch, and learn from its duration."""
        fetch, num_bytes = self._transfers.fetches[message.fetch], message.num_bytes
        disk = self.disk if isinstance(fetch.source, DiskSource) else None
        if message.is_ok:
            if disk is not None:
                # What is read ahead is a hit when its request is admitted.
                num_hit_tokens = 0 if fetch.is_early else fetch.num_tokens
                disk.on_loaded(num_hit_tokens, num_bytes, message.seconds)
            else:
                self._totals += kv_transfer.KvTransferTotals(1, 0, num_bytes, message.seconds)
            # An engine may have had to compute what was fetched early.
            if disk is not None or not fetch.is_early:
                assert isinstance(fetch.source, handoff.KvSource | DiskSource)
                decision = self._decisions.setdefault(fetch.source.engine, FetchDecision())
                decision.observe(num_bytes, message.seconds, self._clock())
            self._bytes_per_token = num_bytes / fetch.num_tokens
        elif disk is not None:
            disk.on_load_failed()
            log.info("KV blocks were not read from disk: %s", message.cause)
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
            message.is_checkpoint,
            message.source,
        )
        try:
            self._transfers.prefetch(request, self._clock())
        except ValueError as error:
            log.warning("the KV of a request is not prefetched: %s", error)

    def _is_worth(self, fetch: KvFetch, engine: str, now: float) -> bool:
        """Return True if a fetch is predicted to take less time than the prefill of its tokens.

        engine: name of the engine that has the blocks, or DISK.
        """
        if self.fetch_choice != "auto":
            return self.fetch_choice == "always"
        decision = self._decisions.get(engine)
        if decision is None or self.coefficients is None:
            # The first transfer measures the rate.
            return True
        if self._scheduler.stats().prefill_tokens < MIN_PREFILL_TOKENS:
            return True
        num_bytes = int(fetch.num_tokens * self._bytes_per_token)
        compute = self.coefficients.predict_chunk_seconds(fetch.first_token, fetch.num_tokens)
        return decision.is_worth(num_bytes, compute, now)
