"""Fill a micro-batch: choose the decodes and prefill chunks that run next, and give them KV blocks.

The policy has the budgets and the order of the phases, this module the limits: ready decodes, free
blocks and max_num_batched_tokens.
"""

from collections.abc import Mapping

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.plan import ScheduledRow, SchedulerCounters, count_tokens
from gllm.scheduler.policy import SchedulerLoad, SchedulingPolicy
from gllm.scheduler.preemption import PreemptionManager
from gllm.scheduler.queues import SequenceQueues, rank_of
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.speculation import MicroBatchYield, Speculation


class MicroBatchFiller:
    """Builds a micro-batch: selects decodes and prefill chunks and allocates their KV blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulingPolicy,
        kv_cache: KVCacheManager,
        admission: AdmissionController,
        queues: SequenceQueues,
        preemption: PreemptionManager,
        counters: SchedulerCounters,
    ) -> None:
        assert config.max_num_batched_tokens is not None
        self.is_decode_stalled = False
        """True if a decode of the last plan did not get a block."""
        self.max_num_batched_tokens = config.max_num_batched_tokens
        """Limit of the tokens in a micro-batch."""
        self.max_prefill_tokens = config.max_num_batched_tokens
        """Limit of the prefill in a micro-batch, in addition to the policy's budget."""
        self._policy = policy
        self._is_phase_pure = config.phase_pure
        self._has_rows_of_guesses = (
            config.speculative_config is not None and not config.async_scheduling
        )
        self._num_stage_drafts = 0
        """Most draft tokens that the last stage computes behind a sample."""
        if config.speculative_config is not None:
            self._num_stage_drafts = config.speculative_config.num_stage_drafts
        self._runs_ahead = config.async_scheduling or config.speculative_config is not None
        """True if a decode may have several rows in flight."""
        self._block_size = config.block_size
        self._kv_cache = kv_cache
        self._admission = admission
        self._queues = queues
        self._preemption = preemption
        self._counters = counters

    def fill(self, now: float, follows_decodes: bool) -> list[ScheduledRow]:
        """Return the rows of the next micro-batch, as the policy chooses them.

        Args:
            now: current time in seconds.
            follows_decodes: the previous plan has decodes.
        """
        self._queues.form_group()
        self._preemption.preempt_for_head()
        if self._is_phase_pure:
            return self.fill_one_phase(self._policy.leads_with_prefill(follows_decodes), now)
        return self._policy.fill(self, now)

    def fill_one_phase(self, prefill_leads: bool, now: float) -> list[ScheduledRow]:
        """Return rows of one phase; of the other phase if the first one has none.

        Prefill never leads while a decode lacks a block: a victim of preemption would take its
        freed blocks back.

        Args:
            prefill_leads: prefill is tried before decodes.
            now: current time in seconds.
        """
        if prefill_leads and not self.is_decode_stalled:
            return self.schedule_prefills([], 0.0, now) or self.schedule_decodes()[0]
        return self.schedule_decodes()[0] or self.schedule_prefills([], 0.0, now)

    def fill_lane(self, now: float, decodes_fit: bool, prefill_fits: bool) -> list[ScheduledRow]:
        """Return the rows of a micro-batch of decodes only or of prefill only (`--lanes 2`).

        Decodes get their blocks first, as in `fill`. While a decode lacks a block, prefill is
        therefore scheduled only after all ready decodes have been tried.

        Args:
            now: current time in seconds.
            decodes_fit: another plan of decodes may be in flight.
            prefill_fits: another plan of prefill may be in flight.
        """
        if prefill_fits:
            self._queues.form_group()
            self._preemption.preempt_for_head()
        prefill_leads = not self.is_decode_stalled and self._policy.leads_with_prefill(
            follows_decodes=False
        )
        if prefill_leads and prefill_fits and (rows := self.schedule_prefills([], 0.0, now)):
            return rows
        if decodes_fit:
            if rows := self.schedule_decodes()[0]:
                return rows
        elif self.is_decode_stalled:
            return []
        if prefill_leads or not prefill_fits:
            return []
        return self.schedule_prefills([], 0.0, now)

    def load(self) -> SchedulerLoad:
        """Return the load record before the micro-batch is filled."""
        return self._queues.load()

    def select_decodes(self) -> list[Sequence]:
        """Return the decodes that may run, in the order of service."""
        decodes = self._admission.select_decodes(self._queues.ready)
        if self._has_rows_of_guesses:
            # Rows of guesses alone only take what the others leave.
            decodes.sort(key=lambda s: s.num_scheduled_tokens >= s.num_tokens)
        return decodes

    def schedule_decodes(self) -> tuple[list[ScheduledRow], float]:
        """Return rows of the ready decodes within the policy's budget, and their cost."""
        budget = self._policy.decode_budget(self._queues.load())
        self.is_decode_stalled = False
        return self.schedule_ready(self.select_decodes(), budget, self.max_num_batched_tokens)

    def schedule_ready(
        self, decodes: list[Sequence], budget: float, num_left: int
    ) -> tuple[list[ScheduledRow], float]:
        """Return rows of given decodes within a budget, and their cost.

        Args:
            decodes: ready decodes in the order of service.
            budget: the policy's budget for them.
            num_left: limit of their tokens.
        """
        cost, limit = 0.0, num_left
        single_token_rows: list[ScheduledRow] = []
        multi_token_rows: list[ScheduledRow] = []
        ready, block_size = self._queues.ready, self._block_size
        speculation = self._queues.speculation
        due: set[int] = set()
        micro_batch: MicroBatchYield | None = None
        if speculation is not None and (due := speculation.list_due(decodes)):
            micro_batch = self._predict_yield(speculation, decodes)
        for sequence in decodes:
            if cost >= budget or not num_left:
                break
            if sequence.seq not in ready:
                continue  # An earlier decode of this loop has preempted it.
            num_scheduled = sequence.num_scheduled_tokens
            num_tokens = sequence.num_tokens - num_scheduled
            if micro_batch is not None and sequence.seq in due:
                assert speculation is not None, "it lists what is due"
                if not speculation.choose_drafts(sequence, micro_batch):
                    continue
            if num_tokens < 1 and sequence.draft_token_ids:
                num_tokens = 0  # The row consists of guesses.
            elif num_tokens != 1:
                num_tokens = min(sequence.num_decode_tokens, num_left)
            has_blocks = num_scheduled + num_tokens <= len(sequence.block_ids) * block_size
            if not (has_blocks or self._preemption.allocate_decode(sequence, num_tokens)):
                self.is_decode_stalled = True
                continue
            draft_token_ids: list[int] = []
            if sequence.draft_token_ids and micro_batch is not None:
                draft_token_ids = self._fit_drafts(sequence, num_tokens, num_left, micro_batch)
                if not (num_tokens or draft_token_ids):
                    continue
            if self._num_stage_drafts:
                self._allocate_for_stage_drafts(sequence, num_tokens + len(draft_token_ids))
            cost += self._policy.decode_cost(num_scheduled)
            del ready[sequence.seq]
            row = sequence.schedule_row(num_tokens, draft_token_ids)
            rows = multi_token_rows if row.num_tokens > 1 else single_token_rows
            rows.append(row)
            num_left -= row.num_tokens
            if self._runs_ahead:
                self._queues.make_ready(sequence)
        self._counters.decode_tokens += limit - num_left
        self._queues.num_decode_context_tokens += limit - num_left
        return single_token_rows + multi_token_rows, cost

    def _predict_yield(self, speculation: Speculation, decodes: list[Sequence]) -> MicroBatchYield:
        """Return what a micro-batch of an even share of the decodes yields without guesses."""
        queues = self._queues
        num_known = sum(
            s.num_scheduled_tokens < s.num_tokens or speculation.may_run_ahead(s) for s in decodes
        )
        num_decoding = max(1, len(queues.decoding_seqs))
        num_rows = min(num_known, -(-num_decoding // queues.depth))
        num_context = queues.num_decode_context_tokens * num_rows / num_decoding
        sizes = num_rows, self._predict_prefill(), num_context, num_decoding
        return speculation.start_micro_batch(*sizes)

    def _predict_prefill(self) -> int:
        """Return the most prefill tokens beside the decodes; 0 if the first prompt has to wait."""
        queues = self._queues
        if not queues.waiting or not self._kv_cache.can_extend_prefill(queues.waiting[0]):
            return 0
        if self._policy.prefill_budget(queues.load()) <= 0:
            return 0
        return min(queues.num_waiting_tokens, self.max_prefill_tokens)

    def _fit_drafts(
        self, sequence: Sequence, num_known: int, num_left: int, micro_batch: MicroBatchYield
    ) -> list[int]:
        """Return the draft tokens of a decode that fit into the micro-batch and into free blocks.

        Guesses preempt nothing and leave the blocks at which prefill pauses. Blocks behind the
        right guesses stay with the sequence, whose next tokens need them.

        Args:
            sequence: a decode with draft tokens; blocks of its known tokens are allocated.
            num_known: known tokens of its row; 0 if it consists of guesses.
            num_left: limit of the row's tokens.
            micro_batch: yield of the micro-batch, to which the guesses are added.
        """
        if 0 < num_known < sequence.num_tokens - sequence.num_scheduled_tokens:
            return []  # Known tokens that do not fit come first.
        num_spare = self._kv_cache.num_spare_blocks
        num_slots = (len(sequence.block_ids) + num_spare) * self._block_size
        num_left = min(num_left, num_slots - sequence.num_scheduled_tokens)
        draft_token_ids = sequence.draft_token_ids[: max(0, num_left - num_known)]
        if draft_token_ids:
            speculation = self._queues.speculation
            assert speculation is not None, "there are draft tokens"
            num_drafts = speculation.count_useful(sequence, len(draft_token_ids), micro_batch)
            del draft_token_ids[num_drafts:]
        self._kv_cache.allocate(sequence, num_known + len(draft_token_ids))
        self._counters.drafts += len(draft_token_ids) > 0
        self._counters.draft_tokens += len(draft_token_ids)
        return draft_token_ids

    def _allocate_for_stage_drafts(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate the blocks of the drafts behind a row of `num_tokens`, if blocks are spare.

        The last stage keeps keys and values of its drafts there; it computes as many as fit.
        """
        end = sequence.prompt_len + sequence.request.max_tokens - sequence.num_scheduled_tokens
        num_tokens = min(num_tokens + self._num_stage_drafts, end)
        num_missing = self._kv_cache.num_missing_blocks(sequence, num_tokens)
        if num_missing <= self._kv_cache.num_spare_blocks:
            self._kv_cache.allocate(sequence, num_tokens)

    def count_next_drafts(self, rows: list[ScheduledRow]) -> int:
        """Return how many draft tokens the last stage computes behind each sample of a step.

        As many as are worth their time in a micro-batch of the same sequences.
        """
        speculation, queues = self._queues.speculation, self._queues
        if speculation is None or not self._num_stage_drafts:
            return 0
        running = self._kv_cache.running
        sequences = [running[row.seq] for row in rows if row.should_sample]
        # The last token of an output is never an input.
        sequences = [s for s in sequences if s.num_output_tokens + 1 < s.request.max_tokens]
        if not sequences:
            return 0
        num_rows, num_decoding = len(sequences), max(1, len(queues.decoding_seqs))
        num_context = queues.num_decode_context_tokens * num_rows / num_decoding
        sizes = num_rows, self._predict_prefill(), num_context, num_decoding
        return speculation.count_next_drafts(sequences, speculation.start_micro_batch(*sizes))

    def schedule_prefills(
        self, decodes: list[ScheduledRow], decode_cost: float, now: float
    ) -> list[ScheduledRow]:
        """Return prefill chunks that fit next to the decodes of a micro-batch."""
        if not self._queues.waiting:
            return []
        num_decode_tokens = count_tokens(decodes)
        budget = self._policy.prefill_budget(self._queues.load(num_decode_tokens, decode_cost))
        num_left = self.max_num_batched_tokens - num_decode_tokens
        num_left = min(num_left, self.max_prefill_tokens)
        rows: list[ScheduledRow] = []
        while self._queues.waiting and budget > 0 and num_left:
            self._queues.form_group()
            sequence = self._queues.waiting[0]
            if sequence.is_fetch_pending:
                break  # It waits for blocks, which prompts behind it would take.
            if rows and not self._policy.accepts_prompt(
                sequence.num_waiting_tokens, min(num_left, budget)
            ):
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

    def force(self, sequences: Mapping[int, Sequence], now: float) -> list[ScheduledRow]:
        """Return a row of the highest-priority sequence when nothing fits and nothing is in flight.

        Preempts other sequences, worst rank first, until the row fits. Returns no row if the blocks
        that are missing are reserved for other engines.

        Args:
            sequences: all sequences by id, at least one.
            now: current time in seconds.
        """
        best = min(sequences.values(), key=rank_of)
        others = sorted(self._kv_cache.running.values(), key=rank_of)
        while not (rows := self._schedule_alone(best, now)):
            if self._kv_cache.holds and (not others or others[-1] is best):
                break
            victim = others.pop()
            assert victim is not best, "the whole cache holds one sequence"
            self._preemption.preempt(victim)
            if victim.is_preempting:
                break  # Another engine reads its blocks until that is revoked.
        return rows

    def _schedule_alone(self, sequence: Sequence, now: float) -> list[ScheduledRow]:
        """Return a row of one sequence without regard to the others; empty if no token fits."""
        max_batched = self.max_num_batched_tokens
        if sequence.is_prefilling:
            max_batched = min(max_batched, self.max_prefill_tokens)
            max_tokens = min(self._admit_prefill(sequence, now, runs_alone=True), max_batched)
            if not max_tokens:
                return []
            budget = self._policy.prefill_budget(self._queues.load())
            num_tokens, _ = self._policy.size_chunk(
                sequence.num_scheduled_tokens, max_tokens, budget
            )
            return [self._schedule_chunk(sequence, num_tokens)]
        max_tokens = self._kv_cache.max_sequence_tokens(sequence) - sequence.num_scheduled_tokens
        num_tokens = min(sequence.num_decode_tokens, max_tokens, max_batched)
        self._kv_cache.allocate(sequence, num_tokens)
        return [self._schedule_row(sequence, num_tokens)] if num_tokens else []

    def _schedule_chunk(self, sequence: Sequence, num_tokens: int) -> ScheduledRow:
        """Allocate blocks for a prefill chunk, schedule it and update the prefill queue."""
        self._kv_cache.allocate(sequence, num_tokens)
        self._queues.count_waiting(sequence, -1)
        row = self._schedule_row(sequence, num_tokens)
        self._queues.count_waiting(sequence, 1)
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
        if sequence.seq in self._queues.decoding_seqs:
            self._queues.num_decode_context_tokens += num_tokens
        if self._runs_ahead:
            self._queues.make_ready(sequence)
        return row

    def _admit_prefill(self, sequence: Sequence, now: float, runs_alone: bool = False) -> int:
        """Return the number of prefill tokens that fit; admits a waiting sequence if possible.

        Args:
            sequence: a sequence with unscheduled prefill.
            now: current time in seconds.
            runs_alone: nothing else runs, so the sequence need not fit next to others.
        """
        if sequence.seq not in self._kv_cache.running and not self.admit(sequence, now, runs_alone):
            return 0
        max_tokens = self._kv_cache.max_sequence_tokens(sequence)
        return min(sequence.num_prefill_tokens, max_tokens) - sequence.num_scheduled_tokens

    def admit(self, sequence: Sequence, now: float, runs_alone: bool = False) -> bool:
        """Admit a waiting sequence to the KV cache; return False if it has to wait.

        It stays in the prefill queue.

        Args:
            sequence: a sequence without blocks.
            now: current time in seconds.
            runs_alone: nothing else runs, so the sequence need not fit next to others.
        """
        has_space = self._kv_cache.can_extend_prefill(sequence)
        if not has_space or not (runs_alone or self._admission.is_admissible(sequence)):
            return False
        self._queues.count_waiting(sequence, -1)
        is_admitted = self._kv_cache.admit(sequence)
        self._queues.count_waiting(sequence, 1)
        if not is_admitted:
            return False
        if not sequence.has_run:
            sequence.num_cached_tokens = sequence.num_scheduled_tokens
            sequence.queue_seconds = now - sequence.arrival_time
            self._counters.prefix_queries += sequence.prompt_len * sequence.reads_prefix_cache
            self._counters.prefix_hits += sequence.num_cached_tokens
        elif not sequence.num_preemptions:
            num_cached = sequence.num_scheduled_tokens
            self._counters.resumed_cached_tokens += num_cached
            self._counters.resumed_computed_tokens += sequence.num_prefill_tokens - num_cached
        return True
