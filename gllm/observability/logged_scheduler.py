"""Scheduler that writes a step log, and the repetition of logged calls."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from gllm.observability.step_log import (
    AbortEvent,
    AddEvent,
    AdoptEvent,
    CommitEvent,
    DepthEvent,
    KvTransferCall,
    KvTransferEvent,
    PrefetchEvent,
    ResetPrefixCacheEvent,
    ScheduleEvent,
    StageTimesEvent,
    StepLogEvent,
)
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.eviction import EvictionOrder
from gllm.scheduler.kv_cache_manager import NO_TAILS
from gllm.scheduler.kv_holds import ReadableKv
from gllm.scheduler.kv_transfers import KvFetch, PrefetchRequest, SchedulerTransfers
from gllm.scheduler.output_lengths import OutputLengths
from gllm.scheduler.plan import StepOutput, StepPlan, StepResult, StepTime
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest


class LoggedScheduler(Scheduler):
    """Scheduler that writes each call to a step log; it decides exactly as `Scheduler` does.

    Args:
        config: The resolved configuration.
        write: Receives each event, in the order of the calls.
        clock: Returns the time in seconds.
        output_lengths: Output lengths that an earlier scheduler has observed, for length
            prediction.
        eviction: Order in which cached KV blocks are evicted; None: the configured one, which alone
            a replay repeats.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        write: Callable[[StepLogEvent], None],
        clock: Callable[[], float],
        output_lengths: OutputLengths | None = None,
        eviction: EvictionOrder | None = None,
    ) -> None:
        super().__init__(
            config,
            output_lengths=output_lengths,
            create_transfers=partial(LoggedTransfers, write, clock),
            eviction=eviction,
        )
        self._write = write
        self._clock = clock

    def add(self, request: SchedulerRequest, now: float) -> None:
        """Add a request and log it; a rejected one is not logged."""
        super().add(request, now)
        self._write(to_add_event(request, now))

    def abort(self, seqs: list[int]) -> None:
        """Log the abort of sequences and abort them."""
        self._write(AbortEvent(self._clock(), seqs))
        super().abort(seqs)

    def hand_off(self, seq: int, ticket: int) -> None:
        """Log the hand-off of a running sequence and begin it."""
        self._write(KvTransferEvent(self._clock(), "hand_off", [seq, ticket]))
        super().hand_off(seq, ticket)

    def keep_computed(self, seq: int, ticket: int, num_tokens: int, now: float) -> None:
        """Log that computed tokens of a running sequence are kept, and keep them."""
        self._write(KvTransferEvent(now, "keep_computed", [seq, ticket, num_tokens]))
        super().keep_computed(seq, ticket, num_tokens, now)

    def reset_prefix_cache(self) -> None:
        """Log the reset of the prefix cache and empty it."""
        self._write(ResetPrefixCacheEvent(self._clock()))
        super().reset_prefix_cache()

    def adopt_blocks(
        self, digests: Mapping[int, bytes], tails: Mapping[int, tuple[bytes, int]] = NO_TAILS
    ) -> None:
        """Log the blocks of an earlier scheduler and fill the prefix cache with them."""
        encoded = {block: digest.hex() for block, digest in digests.items()}
        begun = {block: (digest.hex(), number) for block, (digest, number) in tails.items()}
        self._write(AdoptEvent(self._clock(), encoded, begun))
        super().adopt_blocks(digests, tails)

    def set_depth(
        self, depth: int, max_prefill_tokens: int | None = None, is_mixed: bool = False
    ) -> None:
        """Change the number of micro-batches in flight and log it."""
        self._write(DepthEvent(self._clock(), depth, max_prefill_tokens, is_mixed))
        super().set_depth(depth, max_prefill_tokens, is_mixed)

    def schedule(self, now: float) -> StepPlan | None:
        """Schedule the next step, log its plan and return it; None if nothing can be scheduled."""
        plan = super().schedule(now)
        self._write(ScheduleEvent(now, plan, self.available_parallelism()))
        return plan

    def commit(self, result: StepResult) -> StepOutput:
        """Log the result of a step and commit it."""
        self._write(CommitEvent(self._clock(), result))
        return super().commit(result)

    def record_step_times(self, stage: int, times: list[StepTime]) -> None:
        """Log the step times that a stage has reported and record them."""
        self._write(StageTimesEvent(self._clock(), stage, times))
        super().record_step_times(stage, times)


class LoggedTransfers(SchedulerTransfers):
    """KV-transfer part of the scheduler that writes each call to a step log.

    It decides exactly as `SchedulerTransfers` does.

    Args:
        write: Receives each event, in the order of the calls.
        clock: Returns the time in seconds.
        arguments: Arguments of SchedulerTransfers.
    """

    def __init__(
        self, write: Callable[[StepLogEvent], None], clock: Callable[[], float], *arguments: Any
    ) -> None:
        super().__init__(*arguments)
        self._write = write
        self._clock = clock

    def prefetch(self, request: PrefetchRequest, now: float) -> int:
        """Start fetching the KV cache of a later request and log it, unless it is rejected."""
        seq = super().prefetch(request, now)
        self._write(PrefetchEvent(now, *request[:-1]))
        return seq

    def start_fetches(self, now: float) -> list[KvFetch]:
        """Start the pending fetches of KV blocks from other engines; logged if there are any."""
        if not self.has_pending_fetches:
            return []
        fetches = super().start_fetches(now)
        self._write(KvTransferEvent(now, "take_fetches", [fetch.seq for fetch in fetches]))
        return fetches

    def pop_readable(self) -> list[ReadableKv]:
        """Return the KV blocks that other engines may now read; logged per unfinished prompt."""
        readable = super().pop_readable()
        tickets = [
            blocks.ticket for blocks in readable if blocks.is_first and blocks.step is not None
        ]
        if tickets:
            self._write_kv_call("take_pushes", tickets)
        return readable

    def record_progress(self, seq: int) -> None:
        """Log that data of a fetch has arrived, and record it."""
        self._write_kv_call("record_fetch_progress", [seq])
        super().record_progress(seq)

    def finish_fetch(self, seq: int, is_ok: bool) -> bool:
        """Log that a fetch has succeeded or failed, and end it."""
        self._write(KvTransferEvent(self._clock(), "finish_fetch", [seq], is_ok))
        return super().finish_fetch(seq, is_ok)

    def pop_revocations(self, now: float) -> list[int]:
        """Return the ids of KV reservations to revoke (tickets); logged if there are any."""
        tickets = super().pop_revocations(now)
        if tickets:
            self._write(KvTransferEvent(now, "take_revocations", tickets))
        return tickets

    def renew(self, tickets: Iterable[int], now: float) -> None:
        """Log and extend the leases of KV blocks that are reserved for other engines."""
        tickets = list(tickets)
        self._write(KvTransferEvent(now, "renew_holds", tickets))
        super().renew(tickets, now)

    def release(self, tickets: Iterable[int]) -> None:
        """Log and request the end of reservations of KV blocks for other engines."""
        tickets = list(tickets)
        self._write_kv_call("release_holds", tickets)
        super().release(tickets)

    def confirm_revocation(self, ticket: int) -> None:
        """Log and free the KV blocks of a revoked reservation, named by its ticket."""
        self._write_kv_call("confirm_revocation", [ticket])
        super().confirm_revocation(ticket)

    def set_push_threshold(self, num_tokens: int) -> None:
        """Set the least length of prompts that can be fetched early; logged if it changes."""
        if num_tokens != self.readable.threshold_tokens:
            self._write_kv_call("set_push_threshold", [num_tokens])
        super().set_push_threshold(num_tokens)

    def _write_kv_call(self, call: KvTransferCall, ids: list[int]) -> None:
        self._write(KvTransferEvent(self._clock(), call, ids))


EVENT_FIELDS = {
    "prompt_token_ids": "prompt",
    "stop_token_ids": "stop_ids",
    "reads_prefix_cache": "reads_cache",
}
"""Fields of an AddEvent by the field of SchedulerRequest, where the names differ."""


def to_add_event(request: SchedulerRequest, now: float) -> AddEvent:
    """Convert a request that arrives at time `now` to its step-log event."""
    fields = {EVENT_FIELDS.get(name, name): value for name, value in request._asdict().items()}
    del fields["kv_source"]
    fields["prompt"], fields["outputs"] = list(request.prompt_token_ids), [*request.outputs]
    fields["stop_ids"] = sorted(request.stop_token_ids)
    return AddEvent(now, **fields)


def to_scheduler_request(event: AddEvent) -> SchedulerRequest:
    """Convert the step-log event of an arrival back to the scheduler's request."""
    fields = msgspec.structs.asdict(event)
    del fields["time"]
    fields |= {name: fields.pop(event_name) for name, event_name in EVENT_FIELDS.items()}
    fields["stop_token_ids"] = frozenset(event.stop_ids)
    return SchedulerRequest(**fields)


def replay_event(scheduler: Scheduler, event: StepLogEvent) -> StepPlan | None:
    """Repeat a logged scheduler call on another scheduler.

    Returns:
        The step plan of a ScheduleEvent, which may be None; None for other events.
    """
    match event:
        case ScheduleEvent():
            return scheduler.schedule(event.time)
        case AddEvent():
            scheduler.add(to_scheduler_request(event), event.time)
        case AbortEvent():
            scheduler.abort(event.seqs)
        case ResetPrefixCacheEvent():
            scheduler.reset_prefix_cache()
        case AdoptEvent():
            encoded, begun = event.digests.items(), event.tails.items()
            scheduler.adopt_blocks(
                {block: bytes.fromhex(digest) for block, digest in encoded},
                {block: (bytes.fromhex(digest), number) for block, (digest, number) in begun},
            )
        case DepthEvent():
            scheduler.set_depth(event.depth, event.max_prefill_tokens, event.is_mixed)
        case CommitEvent():
            scheduler.commit(event.result)
        case StageTimesEvent():
            scheduler.record_step_times(event.stage, event.steps)
        case PrefetchEvent():
            request = PrefetchRequest(*msgspec.structs.astuple(event)[1:])
            scheduler.transfers.prefetch(request, event.time)
        case KvTransferEvent(call="hand_off", ids=[seq, ticket]):
            scheduler.hand_off(seq, ticket)
        case KvTransferEvent(call="keep_computed", ids=[seq, ticket, num_tokens]):
            scheduler.keep_computed(seq, ticket, num_tokens, event.time)
        case KvTransferEvent():
            _replay_kv_call(scheduler.transfers, event)
    return None


def _replay_kv_call(transfers: SchedulerTransfers, event: KvTransferEvent) -> None:
    """Repeat the call that an event records."""
    match event.call:
        case "take_fetches":
            transfers.start_fetches(event.time)
        case "take_pushes":
            transfers.pop_readable()
        case "record_fetch_progress":
            transfers.record_progress(event.ids[0])
        case "finish_fetch":
            transfers.finish_fetch(event.ids[0], event.is_ok)
        case "take_revocations":
            transfers.pop_revocations(event.time)
        case "renew_holds":
            transfers.renew(event.ids, event.time)
        case "release_holds":
            transfers.release(event.ids)
        case "confirm_revocation":
            transfers.confirm_revocation(event.ids[0])
        case "set_push_threshold":
            transfers.set_push_threshold(event.ids[0])
