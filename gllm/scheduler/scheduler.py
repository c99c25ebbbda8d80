"""Scheduler: decides which requests, KV blocks and tokens form the next micro-batch.

It owns all sequences from `add` to their end, in pure Python: no clock (time is an argument), no
I/O, no tensors. The driver of a pipeline and the simulator call the same methods: `add`, `abort`,
`schedule`, `commit`, and those of `transfers` for KV that moves between engines.
docs/scheduler.md proves that every sequence finishes.
"""

from collections.abc import Callable, Mapping

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.eviction import EvictionOrder
from gllm.scheduler.in_flight import InFlightPlans
from gllm.scheduler.kv_admission import ADMISSION_RULES
from gllm.scheduler.kv_cache_manager import NO_TAILS, KVCacheManager
from gllm.scheduler.kv_transfers import SchedulerTransfers
from gllm.scheduler.lanes import DECODE_LANE, PREFILL_LANE
from gllm.scheduler.micro_batch import MicroBatchFiller
from gllm.scheduler.output_lengths import OutputLengths
from gllm.scheduler.plan import (
    FinishedSequence,
    FirstToken,
    SampledToken,
    ScheduledRow,
    SchedulerCounters,
    SchedulerStats,
    StepOutput,
    StepPlan,
    StepResult,
    StepTime,
    count_accepted,
    count_tokens,
)
from gllm.scheduler.policy import SchedulingPolicy
from gllm.scheduler.policy_registry import create_policy
from gllm.scheduler.preemption import PreemptionManager
from gllm.scheduler.queues import QueueSnapshot, SequenceQueues
from gllm.scheduler.sequence import SchedulerRequest, Sequence, SequenceTable
from gllm.scheduler.speculation import CreateDrafter, Speculation
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import DEFAULT_RIDGE_TOKENS, OnlineStepCurveFit, observe_both
from gllm.scheduler.step_intervals import StepIntervalCollector


class Scheduler:
    """Scheduler of one pipeline: forms micro-batches and applies the sampled tokens that return.

    Does no I/O and reads no clock: the caller passes the time.

    Args:
        config: resolved configuration (SchedulerConfig.resolve).
        policy: scheduling policy; by default the one that `config` names.
        output_lengths: output lengths of finished sequences from an earlier scheduler, for
            predictions.
        create_transfers: constructor of `transfers`, with the arguments of SchedulerTransfers.
        create_drafter: creates what guesses the tokens of a sequence, if speculation is on; None
            for the configured method.
        eviction: order in which cached blocks are evicted; by default the one that `config` names.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulingPolicy | None = None,
        output_lengths: OutputLengths | None = None,
        create_transfers: Callable[..., SchedulerTransfers] = SchedulerTransfers,
        create_drafter: CreateDrafter | None = None,
        eviction: EvictionOrder | None = None,
    ) -> None:
        assert config.max_in_flight is not None
        self.config = config
        self.kv_cache = KVCacheManager(config, eviction)
        policy = self._policy = policy or create_policy(config)
        self._has_lanes = config.num_lanes > 1
        self._is_mixed = not self._has_lanes
        """Micro-batches have decodes and prefill."""
        self.table = SequenceTable()
        self._sequences = self.table.sequences
        self._in_flight = InFlightPlans(config.num_lanes, config.max_in_flight)
        observe: Callable[[StageWork, float], None] | None = None
        if policy.learns_step_times:
            observe = policy.observe_step
        self._speculation: Speculation | None = None
        if config.speculative_config is not None:
            curve_fit = policy.curve_fit
            if curve_fit is None:
                curve_fit = OnlineStepCurveFit(config.ridge_tokens or DEFAULT_RIDGE_TOKENS)
                observe = observe_both(observe, curve_fit.observe_step)
            self._speculation = Speculation(config, curve_fit, create_drafter)
            observe = observe_both(observe, self._speculation.observe_step)
        self.learns_step_times = observe is not None
        observe_idle = None if self._speculation is None else self._speculation.observe_idle
        self._step_intervals = StepIntervalCollector(observe, config.stages, observe_idle)
        self._last_plan_had_decodes = False
        self._lane_change_step = -1
        """Last step before decodes have changed the lane."""
        self._counters = SchedulerCounters()
        if config.speculative_config is not None:
            # A window of guesses alone, behind another one, has one guess more.
            guesses = config.speculative_config
            has_one_window = (
                config.async_scheduling
                or config.max_in_flight == 1
                or guesses.max_windows_in_flight == 1
            )
            num_positions = guesses.num_speculative_tokens + (not has_one_window)
            self._counters.accepted_per_position = [0] * num_positions
        rule = ADMISSION_RULES.get(config.kv_admission, policy.admission)
        self._admission = rule(config, self.kv_cache, output_lengths)
        self.output_lengths = self._admission.output_lengths
        """Lengths of finished outputs, with which another scheduler can begin."""
        self._queues = SequenceQueues(self.kv_cache, config, self._speculation)
        parts = self.kv_cache, self._admission, self._queues
        self._preemption = PreemptionManager(config, *parts, self._counters)
        self._filler = MicroBatchFiller(config, policy, *parts, self._preemption, self._counters)
        self.transfers = create_transfers(
            config, self.kv_cache, self._queues, self._filler, self._counters, self._finalize
        )
        """KV that moves between engines."""
        self._now = 0.0
        """Latest time of a call, at which leases of holds start."""

    def add(self, request: SchedulerRequest, now: float) -> None:
        """Add a request to the prefill queue.

        Raises:
            ValueError: the request can never run.
        """
        request.check(self.config.max_model_len)
        sequence = self.table.add(request, now)
        self.kv_cache.on_arrival(sequence, now)
        self.transfers.add(sequence)

    def adopt_blocks(
        self, digests: Mapping[int, bytes], tails: Mapping[int, tuple[bytes, int]] = NO_TAILS
    ) -> None:
        """Fill the prefix cache with blocks of an earlier scheduler; called before any request.

        The sequences that are resumed then find their tokens there.

        Args:
            digests: prefix-cache hash by block.
            tails: of other blocks the hash of their first slots, and the number of slots that can
                be used.

        Raises:
            ValueError: the cache cannot adopt these blocks; see KVCacheManager.adopt.
        """
        self.kv_cache.adopt(digests, tails)

    def abort(self, seqs: list[int]) -> None:
        """End sequences now; ids of finished and unknown sequences are ignored."""
        for seq in seqs:
            if not self.table.cancel_fork(seq) and seq in self._sequences:
                self._finish(self._sequences[seq])

    def hand_off(self, seq: int, ticket: int) -> None:
        """End a running sequence at its next token and keep its KV blocks for another engine.

        Nothing happens if the sequence is unknown, has no token yet, is one of several choices, has
        a ticket, or ends at its next token anyway.

        Args:
            seq: id of the sequence.
            ticket: key under which the blocks are kept; the end of the sequence has it.
        """
        sequence = self._sequences.get(seq)
        if sequence is None or sequence.is_finished or not sequence.num_output_tokens:
            return
        request, num_tokens = sequence.request, sequence.num_output_tokens + 1
        if request.n == 1 and not request.kv_ticket and num_tokens < request.max_tokens:
            sequence.request = request._replace(max_tokens=num_tokens, kv_ticket=ticket)

    def keep_computed(self, seq: int, ticket: int, num_tokens: int, now: float) -> None:
        """Keep the first tokens of a running sequence for another engine, while it goes on.

        Nothing happens if the sequence is unknown or has ended, not all of them are computed, or
        the ticket is in use or was released.

        Args:
            seq: id of the sequence.
            ticket: key under which the blocks can be read.
            num_tokens: leading tokens to keep.
            now: time in seconds.
        """
        sequence = self._sequences.get(seq)
        if sequence is not None and not sequence.is_finished:
            self.transfers.keep_computed(sequence, ticket, num_tokens, now)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running sequences are not affected."""
        self.kv_cache.block_pool.reset_prefix_cache()

    def set_depth(
        self, depth: int, max_prefill_tokens: int | None = None, is_mixed: bool = False
    ) -> None:
        """Change the number of micro-batches in flight.

        Before the first call `max_in_flight` limits the micro-batches in flight, and the policy
        spreads the decodes over the stages.

        Args:
            depth: limit of the micro-batches in flight of each lane, over which the policy spreads
                the decodes: #PP_depth. At most `max_in_flight` counts.
            max_prefill_tokens: limit of the prefill in a micro-batch; None for no other than the
                policy's.
            is_mixed: with two lanes, put decodes and prefill into the same micro-batches, as with
                one lane. All of them are in the prefill lane, as chunks of a prompt may not
                overtake each other.

        Raises:
            ValueError: a value is below 1.
        """
        config = self.config
        assert config.max_in_flight is not None
        assert config.max_num_batched_tokens is not None
        if max_prefill_tokens is None:
            max_prefill_tokens = config.max_num_batched_tokens
        if depth < 1 or max_prefill_tokens < 1:
            raise ValueError(
                f"depth {depth}, max_prefill_tokens {max_prefill_tokens}: both are at least 1"
            )
        self._in_flight.limit = self._queues.depth = min(depth, config.max_in_flight)
        self._filler.max_prefill_tokens = max_prefill_tokens
        was_mixed, self._is_mixed = self._is_mixed, is_mixed or not self._has_lanes
        if was_mixed != self._is_mixed and self._speculation is not None:
            # Decodes are in another lane now: no sequence may have rows in both.
            self._lane_change_step = max(self._in_flight.plans, default=-1)
            self._speculation.is_paused = self._lane_change_step >= 0
            self._queues.remove_ahead()

    def schedule(self, now: float) -> StepPlan | None:
        """Return the next micro-batch; None if nothing can run or too many are in flight.

        Sequences whose KV can be fetched are left to `transfers.start_fetches`, called first.
        """
        self._now = self.kv_cache.block_pool.now = now
        self._step_intervals.on_time(now)
        has_room = self._in_flight.has_room
        if True not in has_room or not self._sequences:
            return None
        counters = self._counters
        num_decodes, num_prefills = counters.decode_tokens, counters.prefill_tokens
        rows = self._fill(now, has_room)
        is_stuck = not rows and not self._in_flight.plans
        if is_stuck and not self.transfers.returns_blocks(self._sequences.values()):
            # Nothing fits, and no blocks return without a step.
            rows = self._filler.force(self._sequences, now)
        if not rows:
            return None
        num_decodes = counters.decode_tokens - num_decodes
        num_prefills = counters.prefill_tokens - num_prefills
        has_prefill_lane = self._has_lanes and (num_prefills or self._is_mixed)
        lane = PREFILL_LANE if has_prefill_lane else DECODE_LANE
        states = self.kv_cache.states
        segments = () if states is None else states.schedule_rows(rows)
        released_seqs = self.table.pop_released()
        num_next_drafts = self._filler.count_next_drafts(rows)
        plan = self._in_flight.add(
            rows, released_seqs, lane, num_prefills, segments, num_next_drafts
        )
        if self.transfers.readable.is_enabled:
            self.transfers.readable.on_scheduled(plan, self._sequences)
        counters.steps += 1
        self._last_plan_had_decodes = num_decodes > 0
        self._queues.num_decode_plans += self._last_plan_had_decodes
        self._step_intervals.on_scheduled(plan, now, self._in_flight.max_plans)
        self._admission.on_scheduled(num_decodes + num_prefills)
        return plan

    def _fill(self, now: float, has_room: list[bool]) -> list[ScheduledRow]:
        """Return the rows of the next micro-batch, within the room of each lane."""
        if not self._is_mixed:
            return self._filler.fill_lane(now, *has_room)
        if not has_room[-1]:
            return []
        return self._filler.fill(now, self._last_plan_had_decodes)

    def commit(self, result: StepResult) -> StepOutput:
        """Apply the result of the oldest micro-batch in flight (of its lane, if there are two).

        Raises:
            ValueError: the result belongs to another plan or lacks a row.
        """
        plan = self._in_flight.pop(result.step)
        if self._speculation is not None and self._speculation.is_paused:
            oldest = min(self._in_flight.plans, default=result.step + 1)
            self._speculation.is_paused = oldest <= self._lane_change_step
        self._step_intervals.on_committed(result.step)
        sampled = {token.seq: token for token in result.sampled_tokens}
        output = StepOutput([], [], [], [], count_tokens(plan.rows))
        sequences, error, states = self._sequences, result.error, self.kv_cache.states
        for row in plan.rows:
            sequence = sequences[row.seq]
            sequence.num_rows_in_flight -= 1
            if states is not None:
                states.on_row_committed(row)
            if error:
                self._fail(sequence, error, output)
            else:
                self._commit_row(sequence, row, sampled.get(row.seq), output)
            if sequence.is_finished or sequence.is_preempting:
                self._finalize(sequence)
            else:
                self._queues.make_ready(sequence)
        return output

    def record_step_times(self, stage: int, times: list[StepTime]) -> None:
        """Record when a stage computed scheduled steps; permitted at any time after `schedule`."""
        self._step_intervals.on_stage_times(stage, times)

    def available_parallelism(self) -> int:
        """Return the number of stages that the available work could keep busy.

        It is one stage per sequence in decode, per prefill chunk in flight, and per #MinP waiting
        tokens if these fit in the cache. A bubble is the time in which a stage is idle although
        there is work for it.
        """
        queues, num_stages = self._queues, self.config.stages
        count = len(queues.decoding_seqs)
        if count < num_stages:
            rows = (row for plan in self._in_flight.plans.values() for row in plan.rows)
            count += sum(row.seq not in queues.decoding_seqs for row in rows)
        head = queues.head
        if count < num_stages and head is not None and not head.is_fetch_pending:
            is_running = head.seq in self.kv_cache.running
            if self.kv_cache.can_extend_prefill(head) and (
                is_running or self._admission.is_admissible(head)
            ):
                count += -(-queues.num_waiting_tokens // self.config.min_prefill_tokens)
        return min(count, num_stages)

    def unfinished_requests(self, now: float) -> list[SchedulerRequest]:
        """Return the unfinished requests in the form in which another scheduler continues them."""
        return self.table.unfinished_requests(now)

    def stats(self) -> SchedulerStats:
        """Return the present state and the counters."""
        running = len(self.kv_cache.running) - len(self.transfers.started_prefetches)
        states = self.kv_cache.states
        return SchedulerStats(
            running=running,
            waiting=len(self._sequences) - running + len(self.table.pending_forks),
            kv_usage=1 - self.kv_cache.free_share,
            in_flight=len(self._in_flight.plans),
            waiting_tokens=self._queues.num_waiting_tokens,
            decode_context_tokens=self._queues.num_decode_context_tokens,
            decoding=len(self._queues.decoding_seqs),
            depth=self._queues.depth,
            fetching=len(self.transfers.fetches),
            held_blocks=self.kv_cache.holds.num_blocks,
            in_flight_prefill_tokens=self._in_flight.num_prefill_tokens,
            state_slots=0 if states is None else states.num_slots,
            used_state_slots=0 if states is None else states.num_used_slots,
            prefill_batch_tokens=self._policy.prefill_batch_tokens,
            kv_push_threshold=self.transfers.readable.threshold_tokens or 0,
            **vars(self._counters)
            | {"accepted_per_position": tuple(self._counters.accepted_per_position)},
        )

    def describe(self) -> QueueSnapshot:
        """Return the sequences in the queues, for diagnosis."""
        return self._queues.describe()

    def _fork(self, sequence: Sequence) -> None:
        """Enqueue the choices that wait for a sequence to compute the prompt or to end."""
        for choice in self.table.fork(sequence):
            self._queues.enqueue(choice)

    def _commit_row(
        self,
        sequence: Sequence,
        row: ScheduledRow,
        sampled: SampledToken | None,
        output: StepOutput,
    ) -> None:
        """Count a row as computed and append its sampled token."""
        seq, num_preemptions, start, num_tokens, _, _, should_sample, num_drafts = row
        end = start + num_tokens
        if num_drafts:
            if not self._continues(sequence, row):
                if self._speculation is not None and not sequence.is_finished:
                    self._speculation.on_void(seq, num_drafts)
                return
            end += self._count_accepted(row, sampled) - num_drafts
        if start <= sequence.num_computed_tokens:
            # Otherwise an earlier row failed, and the blocks between were never written.
            sequence.num_computed_tokens = end
            if end >= (sequence.num_published_blocks + 1) * self.config.block_size:
                self.kv_cache.publish(sequence)
            if self.kv_cache.names_tails:
                self.kv_cache.name_tail(sequence)
        if sampled is not None and not sampled.is_finite:
            self.kv_cache.unpublish(sequence)
        if self.table.pending_forks and sequence.num_computed_tokens >= sequence.prompt_len:
            self._fork(sequence)
        if not should_sample:
            self.transfers.on_chunk_computed(sequence, start)
        if sequence.is_finished or not should_sample:
            return
        if sampled is None or sampled.num_preemptions != num_preemptions:
            raise ValueError(f"the result lacks sequence {seq} after {num_preemptions} preemptions")
        if sampled.error:
            self._fail(sequence, sampled.error, output)
            return
        index = row.first_sampled_position if num_drafts else end
        for token_id in (sampled.token_id, *sampled.further_token_ids):
            # Otherwise an earlier row has returned the token as a forced one.
            if index == sequence.num_tokens and not sequence.is_finished:
                self._append_token(sequence, token_id, output)
            index += 1
        is_behind = index == sequence.num_tokens and not sequence.is_finished
        if sampled.draft_token_ids and is_behind and self._speculation is not None:
            self._speculation.on_drafted(sequence, sampled.draft_token_ids)

    def _count_accepted(self, row: ScheduledRow, sampled: SampledToken | None) -> int:
        """Return how many draft tokens of a window are right, and count them."""
        num_accepted = count_accepted(row, sampled)
        counters = self._counters
        counters.accepted_tokens += num_accepted
        for position in range(num_accepted):
            counters.accepted_per_position[position] += 1
        if self._speculation is not None and sampled is not None:
            self._speculation.on_verified(row.seq, row.num_draft_tokens, num_accepted)
        return num_accepted

    def _continues(self, sequence: Sequence, row: ScheduledRow) -> bool:
        """Return True if a window begins with a known token or a guess that was right.

        A window of guesses alone is void if a token before it, or its first one, was guessed wrong.
        """
        start = row.start
        if row.num_draft_tokens < row.num_tokens:
            return True
        return (
            start <= sequence.num_computed_tokens
            and start < sequence.num_tokens
            and sequence.token_ids[start] == row.token_ids[0]
        )

    def _publish(self, sequence: Sequence) -> None:
        """Add the full blocks of a sequence to the prefix cache whose tokens are known by now."""
        num_next = (sequence.num_published_blocks + 1) * self.config.block_size
        if sequence.num_computed_tokens >= num_next:
            self.kv_cache.publish(sequence)

    def _append_token(self, sequence: Sequence, token_id: int, output: StepOutput) -> None:
        """Append a generated token and finish the sequence if it is the last one."""
        request = sequence.request
        if self._speculation is None:
            sequence.token_ids.append(token_id)
            sequence.num_tokens += 1
        else:
            self._queues.append(sequence, token_id)
            self._publish(sequence)
        output.seqs.append(sequence.seq)
        output.token_ids.append(token_id)
        num_generated = sequence.num_tokens - sequence.prompt_len
        if num_generated == 1:
            first = FirstToken(sequence.seq, sequence.num_cached_tokens, sequence.queue_seconds)
            output.first_tokens.append(first)
        if token_id in request.stop_token_ids:
            end = FinishedSequence(sequence.seq, "stop", token_id)
        elif num_generated == request.max_tokens:
            end = FinishedSequence(sequence.seq, "length")
            if (hold := self.transfers.hold(sequence, self._now)) is not None:
                end = end._replace(kv_ticket=hold.ticket, num_kv_tokens=hold.num_tokens)
        else:
            return
        if self._speculation is not None:
            accepted, rejected = self._speculation.count_verified(sequence.seq)
            end = end._replace(num_accepted_guesses=accepted, num_rejected_guesses=rejected)
        output.finished.append(end)
        if not request.kv_ticket:
            # With a ticket the output goes on at another engine.
            self._admission.output_lengths.record(request.max_tokens, num_generated)
        self._finish(sequence)

    def _fail(self, sequence: Sequence, error: str, output: StepOutput) -> None:
        if not sequence.is_finished:
            output.finished.append(FinishedSequence(sequence.seq, "error", error=error))
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """Remove a sequence from the queues; its last commit frees its blocks."""
        self._queues.remove(sequence)
        sequence.is_finished = True
        self._fork(sequence)
        self._finalize(sequence)

    def _finalize(self, sequence: Sequence) -> None:
        """Release a finished sequence, or preempt a victim, once no row of it is in flight."""
        if sequence.num_rows_in_flight:
            return
        if not sequence.is_finished:
            self._preemption.preempt(sequence)
        elif sequence.seq in self._sequences:
            self.kv_cache.free(sequence)
            self.table.release(sequence)
            if self._speculation is not None:
                self._speculation.release(sequence.seq)
