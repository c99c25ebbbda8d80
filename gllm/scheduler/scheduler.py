"""Scheduler: decides which requests, KV blocks and tokens form the next micro-batch.

It owns all sequences from `add` to their end, in pure Python: no clock (time is an argument), no
I/O, no tensors. The driver of a pipeline and the simulator call the same methods: `add`, `abort`,
`schedule`, `commit`. docs/scheduler.md proves that every sequence finishes.
"""

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.output_lengths import OutputLengths
from gllm.scheduler.parallelism import ParallelismGauge
from gllm.scheduler.plan import (
    FinishedSequence,
    FirstToken,
    SampledToken,
    ScheduledRow,
    SchedulerStats,
    StepOutput,
    StepPlan,
    StepResult,
    StepTime,
    count_tokens,
)
from gllm.scheduler.policy import SchedulingPolicy
from gllm.scheduler.policy_registry import POLICIES
from gllm.scheduler.preemption import PreemptionManager
from gllm.scheduler.queue_tally import SchedulerCounters
from gllm.scheduler.queues import SequenceQueues, rank_of
from gllm.scheduler.sequence import SchedulerRequest, Sequence
from gllm.scheduler.sequence_table import SequenceTable
from gllm.scheduler.step_times import StepTimeCollector


class Scheduler:
    """Scheduler of one pipeline.

    Args:
        config: resolved configuration (SchedulerConfig.resolve).
        policy: scheduling policy; by default the one that `config` names.
        output_lengths: output lengths of an earlier scheduler, which predictions begin with.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulingPolicy | None = None,
        output_lengths: OutputLengths | None = None,
    ) -> None:
        assert config.max_in_flight is not None
        assert config.max_num_batched_tokens is not None
        self.config = config
        self.kv_cache = KVCacheManager(config)
        self._policy = policy or POLICIES[config.policy](config)
        self._splits_prompts = self._policy.splits_prompts
        self._block_size = config.block_size
        self._max_in_flight = config.max_in_flight
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._table = SequenceTable()
        self._sequences = self._table.sequences
        self._in_flight: dict[int, StepPlan] = {}
        self.learns_step_times = self._policy.learns_step_times
        observe = self._policy.observe_step if self.learns_step_times else None
        self._step_times = StepTimeCollector(observe, config.stages)
        self._last_plan_had_decodes = False
        self._is_decode_stalled = False
        """True if a decode of the last plan did not get a block."""
        self._counters = SchedulerCounters()
        self._admission = self._policy.admission(config, self.kv_cache, output_lengths)
        self._queues = SequenceQueues(self.kv_cache, config.async_scheduling)
        self._preemption = PreemptionManager(
            config, self.kv_cache, self._admission, self._queues, self._counters
        )
        self._parallelism = ParallelismGauge(config, self.kv_cache, self._admission, self._queues)

    def add(self, request: SchedulerRequest, now: float) -> None:
        """Add a request to the prefill queue.

        Raises:
            ValueError: the request can never run.
        """
        request.check(self.config.max_model_len)
        self._queues.enqueue(self._table.add(request, now))

    def abort(self, seqs: list[int]) -> None:
        """End sequences now; ids of finished and unknown sequences are ignored."""
        for seq in seqs:
            if not self._table.cancel_fork(seq) and seq in self._sequences:
                self._finish(self._sequences[seq])

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running sequences are not affected."""
        self.kv_cache.block_pool.reset_prefix_cache()

    def schedule(self, now: float) -> StepPlan | None:
        """Return the next micro-batch; None if nothing can run or too many are in flight."""
        if len(self._in_flight) >= self._max_in_flight or not self._sequences:
            return None
        counters = self._counters
        num_decodes, num_prefills = counters.decode_tokens, counters.prefill_tokens
        rows = self._fill_plan(now) or self._force_plan(now)
        if not rows:
            return None
        plan = StepPlan(counters.steps, rows, self._table.pop_released())
        self._in_flight[plan.step] = plan
        counters.steps += 1
        num_decodes = counters.decode_tokens - num_decodes
        num_prefills = counters.prefill_tokens - num_prefills
        self._last_plan_had_decodes = num_decodes > 0
        self._queues.tally.num_decode_plans += self._last_plan_had_decodes
        self._step_times.on_scheduled(plan)
        self._admission.on_scheduled(num_decodes + num_prefills)
        return plan

    def commit(self, result: StepResult) -> StepOutput:
        """Apply the result of the oldest plan in flight.

        Raises:
            ValueError: the result belongs to another plan or lacks a row.
        """
        step = next(iter(self._in_flight), None)
        if step != result.step:
            raise ValueError(f"result of step {result.step} came, but step {step} is next")
        plan = self._in_flight.pop(result.step)
        sampled = {token.seq: token for token in result.sampled_tokens}
        output = StepOutput([], [], [], [], count_tokens(plan.rows))
        sequences, error = self._sequences, result.error
        for row in plan.rows:
            sequence = sequences[row.seq]
            sequence.num_rows_in_flight -= 1
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
        for time in times:
            self._step_times.on_stage_time(time)

    def available_parallelism(self) -> int:
        """Return the number of stages that the present work could keep busy with any plans."""
        return self._parallelism.count(self._in_flight.values())

    def unfinished_requests(self, now: float) -> list[SchedulerRequest]:
        """Return the requests that have not ended, as another scheduler continues them."""
        return self._table.unfinished_requests(now)

    def stats(self) -> SchedulerStats:
        """Return the present state and the counters."""
        running = len(self.kv_cache.running)
        return SchedulerStats(
            running=running,
            waiting=len(self._sequences) - running + len(self._table.pending_forks),
            kv_usage=1 - self.kv_cache.free_share,
            in_flight=len(self._in_flight),
            waiting_tokens=self._queues.tally.num_waiting_tokens,
            decode_context_tokens=self._queues.tally.num_decode_context_tokens,
            **vars(self._counters),
        )

    # Filling a micro-batch.

    def _fill_plan(self, now: float) -> list[ScheduledRow]:
        """Return rows by the policy's budgets.

        Decodes get their blocks first, unless the policy runs prefill first. It never does while a
        decode lacks a block: a victim of preemption would take its freed blocks back.
        """
        self._preemption.preempt_for_head()
        prefill_first = self._policy.runs_prefill_first
        phase_pure = prefill_first or self.config.phase_pure
        is_prefill_turn = prefill_first or (phase_pure and self._last_plan_had_decodes)
        if is_prefill_turn and not self._is_decode_stalled:
            return self._schedule_prefills([], 0.0, now) or self._schedule_decodes()[0]
        rows, cost = self._schedule_decodes()
        if rows and phase_pure:
            return rows
        return rows + self._schedule_prefills(rows, cost, now)

    def _schedule_decodes(self) -> tuple[list[ScheduledRow], float]:
        """Return decode rows, those of one token first, and their cost for the policy."""
        budget, cost = self._policy.decode_budget(self._queues.load()), 0.0
        single_token_rows: list[ScheduledRow] = []
        multi_token_rows: list[ScheduledRow] = []
        num_left, self._is_decode_stalled = self._max_num_batched_tokens, False
        ready, block_size = self._queues.ready, self._block_size
        for sequence in self._admission.select_decodes(ready):
            if cost >= budget or not num_left:
                break
            if sequence.seq not in ready:
                continue  # An earlier decode of this loop has preempted it.
            num_scheduled = sequence.num_scheduled_tokens
            num_tokens = len(sequence.token_ids) - num_scheduled
            if num_tokens != 1:
                num_tokens = min(sequence.num_decode_tokens, num_left)
            has_blocks = num_scheduled + num_tokens <= len(sequence.block_ids) * block_size
            if has_blocks or self._preemption.allocate_decode(sequence, num_tokens):
                cost += self._policy.decode_cost(num_scheduled)
                rows = multi_token_rows if num_tokens > 1 else single_token_rows
                rows.append(self._schedule_row(sequence, num_tokens))
                num_left -= num_tokens
            else:
                self._is_decode_stalled = True
        return single_token_rows + multi_token_rows, cost

    def _schedule_prefills(
        self, decodes: list[ScheduledRow], decode_cost: float, now: float
    ) -> list[ScheduledRow]:
        """Return prefill chunks for a micro-batch with these decodes."""
        if not (self._queues.waiting or self._policy.counts_idle_turns):
            return []
        budget = self._policy.prefill_budget(self._queues.load(len(decodes), decode_cost))
        num_left = self._max_num_batched_tokens - count_tokens(decodes)
        rows: list[ScheduledRow] = []
        while self._queues.waiting and budget > 0 and num_left:
            sequence = self._queues.waiting[0]
            if rows and not (self._splits_prompts or sequence.num_waiting_tokens <= num_left):
                break
            max_tokens = min(self._admit_prefill(sequence, now), num_left)
            if not max_tokens:
                break
            num_tokens, cost = self._policy.size_chunk(
                sequence.num_scheduled_tokens, max_tokens, budget
            )
            rows.append(self._schedule_chunk(sequence, num_tokens))
            budget -= cost
            num_left -= num_tokens
            if sequence.is_prefilling:
                break
        return rows

    def _force_plan(self, now: float) -> list[ScheduledRow]:
        """Return a row of the best-ranked sequence if nothing is in flight.

        Preempts other sequences, worst rank first, until the row fits.
        """
        if self._in_flight:
            return []
        best = min(self._sequences.values(), key=rank_of)
        others = sorted(self.kv_cache.running.values(), key=rank_of)
        while not (rows := self._schedule_alone(best, now)):
            victim = others.pop()
            assert victim is not best, "the whole cache holds one sequence"
            self._preemption.preempt(victim)
        return rows

    def _schedule_alone(self, sequence: Sequence, now: float) -> list[ScheduledRow]:
        """Return a row of one sequence without regard to the others; empty if no token fits."""
        max_batched = self._max_num_batched_tokens
        if sequence.is_prefilling:
            max_tokens = min(self._admit_prefill(sequence, now, runs_alone=True), max_batched)
            if not max_tokens:
                return []
            budget = self._policy.prefill_budget(self._queues.load())
            num_tokens, _ = self._policy.size_chunk(
                sequence.num_scheduled_tokens, max_tokens, budget
            )
            return [self._schedule_chunk(sequence, num_tokens)]
        max_tokens = self.kv_cache.max_sequence_tokens(sequence) - sequence.num_scheduled_tokens
        num_tokens = min(sequence.num_decode_tokens, max_tokens, max_batched)
        self.kv_cache.allocate(sequence, num_tokens)
        return [self._schedule_row(sequence, num_tokens)] if num_tokens else []

    def _schedule_chunk(self, sequence: Sequence, num_tokens: int) -> ScheduledRow:
        """Allocate blocks for a prefill chunk, schedule it and update the prefill queue."""
        self.kv_cache.allocate(sequence, num_tokens)
        self._queues.tally.remove_waiting(sequence)
        row = self._schedule_row(sequence, num_tokens)
        self._queues.tally.add_waiting(sequence)
        if not sequence.is_prefilling:
            self._queues.dequeue(sequence)
        return row

    def _schedule_row(self, sequence: Sequence, num_tokens: int) -> ScheduledRow:
        """Return a row of the next tokens of a sequence, whose blocks are allocated."""
        self._queues.ready.pop(sequence.seq, None)
        if sequence.num_scheduled_tokens < sequence.num_prefill_tokens:
            self._counters.prefill_tokens += num_tokens
        else:
            self._counters.decode_tokens += num_tokens
        row = sequence.schedule_row(num_tokens)
        self._queues.tally.on_decode_scheduled(sequence, num_tokens)
        if self.config.async_scheduling:
            self._queues.make_ready(sequence)
        return row

    def _admit_prefill(self, sequence: Sequence, now: float, runs_alone: bool = False) -> int:
        """Return the number of prefill tokens that fit; admits a waiting sequence if possible.

        Args:
            sequence: a sequence with unscheduled prefill.
            now: current time in seconds.
            runs_alone: nothing else runs, so the sequence need not fit next to others.
        """
        if sequence.seq not in self.kv_cache.running and not self._admit(sequence, now, runs_alone):
            return 0
        max_tokens = self.kv_cache.max_sequence_tokens(sequence)
        return min(sequence.num_prefill_tokens, max_tokens) - sequence.num_scheduled_tokens

    def _admit(self, sequence: Sequence, now: float, runs_alone: bool) -> bool:
        """Move a waiting sequence into the cache; return False if it has to wait."""
        has_space = self.kv_cache.can_extend_prefill(sequence)
        if not has_space or not (runs_alone or self._admission.is_admissible(sequence)):
            return False
        self._queues.tally.remove_waiting(sequence)
        is_admitted = self.kv_cache.admit(sequence)
        self._queues.tally.add_waiting(sequence)
        if not is_admitted:
            return False
        if not sequence.has_run:
            sequence.num_cached_tokens = sequence.num_scheduled_tokens
            sequence.queue_seconds = now - sequence.arrival_time
            self._counters.prefix_queries += sequence.prompt_len * sequence.reads_prefix_cache
            self._counters.prefix_hits += sequence.num_cached_tokens
        return True

    # Lifecycle of a sequence.

    def _fork(self, sequence: Sequence) -> None:
        """Enqueue the choices that wait for a sequence to compute the prompt or to end."""
        for choice in self._table.fork(sequence):
            self._queues.enqueue(choice)

    def _commit_row(
        self,
        sequence: Sequence,
        row: ScheduledRow,
        sampled: SampledToken | None,
        output: StepOutput,
    ) -> None:
        """Count a row as computed and append its sampled token."""
        seq, epoch, start, num_tokens, _, _, should_sample = row
        end = start + num_tokens
        if start <= sequence.num_computed_tokens:
            # Otherwise an earlier row failed, and the blocks between were never written.
            sequence.num_computed_tokens = end
            if end >= (sequence.num_published_blocks + 1) * self._block_size:
                self.kv_cache.publish(sequence)
        if sampled is not None and not sampled.is_finite:
            self.kv_cache.unpublish(sequence)
        if self._table.pending_forks and sequence.num_computed_tokens >= sequence.prompt_len:
            self._fork(sequence)
        if sequence.is_finished or not should_sample:
            return
        if sampled is None or sampled.epoch != epoch:
            raise ValueError(f"the result lacks sequence {seq}, epoch {epoch}")
        if sampled.error:
            self._fail(sequence, sampled.error, output)
        elif end == len(sequence.token_ids):
            # Otherwise an earlier row has returned the token as a forced one.
            self._append_token(sequence, sampled.token_id, output)
            for token_id in sampled.forced_token_ids:
                if not sequence.is_finished:
                    self._append_token(sequence, token_id, output)

    def _append_token(self, sequence: Sequence, token_id: int, output: StepOutput) -> None:
        """Append a generated token and finish the sequence if it is the last one."""
        request = sequence.request
        sequence.token_ids.append(token_id)
        output.seqs.append(sequence.seq)
        output.token_ids.append(token_id)
        num_generated = len(sequence.token_ids) - sequence.prompt_len
        if num_generated == 1:
            first = FirstToken(sequence.seq, sequence.num_cached_tokens, sequence.queue_seconds)
            output.first_tokens.append(first)
        if token_id in request.stop_token_ids:
            output.finished.append(FinishedSequence(sequence.seq, "stop", token_id))
        elif num_generated == request.max_tokens:
            output.finished.append(FinishedSequence(sequence.seq, "length"))
        else:
            return
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
            self._table.release(sequence)
