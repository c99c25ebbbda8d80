"""What runs next: the one place where requests, KV blocks and micro-batches are decided on.

Owns all sequences from `add` to their end, in pure Python: no clock (time is an argument), no I/O,
no tensors. The driver of a real pipeline and a simulator call the same four methods: `add`,
`abort`, `schedule`, `commit`. docs/scheduler.md says why every sequence ends.
"""

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
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
)
from gllm.scheduler.policy import SchedulingPolicy
from gllm.scheduler.policy_registry import POLICIES
from gllm.scheduler.preemption import PreemptionManager
from gllm.scheduler.queue_tally import SchedulerCounters
from gllm.scheduler.queues import SequenceQueues, rank_of
from gllm.scheduler.sequence import SchedulerRequest, Sequence
from gllm.scheduler.step_times import StepTimeCollector


class Scheduler:
    """All sequences of one pipeline. `config` is resolved (SchedulerConfig.resolve)."""

    def __init__(self, config: SchedulerConfig, policy: SchedulingPolicy | None = None) -> None:
        assert config.max_in_flight is not None
        assert config.max_num_batched_tokens is not None
        self.config = config
        self.memory = KVCacheManager(config)
        self._policy = policy or POLICIES[config.policy](config)
        self._limit = config.max_in_flight
        self._cap = config.max_num_batched_tokens
        self._sequences: dict[int, Sequence] = {}
        self._unborn: dict[int, Sequence] = {}
        """Choices that will fork, with the first choice of their request."""
        self._in_flight: dict[int, StepPlan] = {}
        self._released: list[int] = []
        self._observed = StepTimeCollector(self._policy, config.stages)
        self._decodes_last = False
        self._stalled = False
        """A decode could not get a block."""
        self._counts = SchedulerCounters()
        self._admission = AdmissionController(config, self.memory)
        self._queues = SequenceQueues(self.memory, config.lookahead)
        self._preemption = PreemptionManager(
            config, self.memory, self._admission, self._queues, self._counts
        )

    def add(self, request: SchedulerRequest, now: float) -> None:
        """Take a request in. Raises ValueError where it can never run."""
        request.check(self.config.max_model_len)
        first = self._new_sequence(request.seq, request, now)
        for seq in range(request.seq + 1, request.seq + request.n):
            self._unborn[seq] = first
        self._queues.enqueue(first)

    def abort(self, seqs: list[int]) -> None:
        """End these sequences now; ids that ended already or never were are passed over."""
        for seq in seqs:
            if self._unborn.pop(seq, None) is not None:
                self._released.append(seq)
            elif seq in self._sequences:
                self._end(self._sequences[seq])

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; what runs goes on."""
        self.memory.pool.forget()

    def schedule(self, now: float) -> StepPlan | None:
        """The next micro-batch; None where nothing can run or enough is in flight."""
        if len(self._in_flight) >= self._limit or not self._sequences:
            return None
        decodes_before = self._counts.decode_tokens
        rows = self._fill(now) or self._force(now)
        if not rows:
            return None
        plan = StepPlan(self._counts.steps, rows, self._released)
        self._released = []
        self._in_flight[plan.step] = plan
        self._counts.steps += 1
        self._decodes_last = self._counts.decode_tokens > decodes_before
        self._queues.tally.decode_plans += self._decodes_last
        self._observed.expect(plan)
        self._admission.on_scheduled(sum(row.num_tokens for row in rows))
        return plan

    def commit(self, result: StepResult) -> StepOutput:
        """Take the oldest plan's result in. Raises ValueError where it is not that plan's."""
        step = next(iter(self._in_flight), None)
        if step != result.step:
            raise ValueError(f"result of step {result.step} came, but step {step} is next")
        plan = self._in_flight.pop(result.step)
        sampled = {entry.seq: entry for entry in result.sampled}
        outcome = StepOutput([], [], [], [], sum(row.num_tokens for row in plan.rows))
        for row in plan.rows:
            sequence = self._sequences[row.seq]
            sequence.in_flight -= 1
            if result.error:
                self._fail(sequence, result.error, outcome)
            else:
                self._advance(sequence, row, sampled.get(row.seq), outcome)
            self._settle(sequence)
        return outcome

    def observe(self, stage: int, times: list[StepTime]) -> None:
        """Hear when a stage computed steps that were planned; any time after their schedule."""
        for time in times:
            self._observed.hear(time)

    def parallelism(self) -> int:
        """How many stages the work at hand could keep busy now, however it is cut: one for a
        sequence in decode, for a chunk in flight, for each #MinP tokens there is room for."""
        decoding, enough = self._queues.tally.decoding, self.config.stages
        count = len(decoding)
        if count < enough:
            rows = (row for plan in self._in_flight.values() for row in plan.rows)
            count += sum(row.seq not in decoding for row in rows)
        if count < enough and self._has_room():
            count += -(-self._queues.tally.waiting_tokens // self.config.min_prefill_tokens)
        return min(count, enough)

    def _has_room(self) -> bool:
        """Return whether the sequence that prefill is served to first could have a chunk now."""
        head = self._queues.head
        if head is None or not self.memory.has_room(head):
            return False
        return head.seq in self.memory.holders or self._admission.is_admissible(head)

    def stats(self) -> SchedulerStats:
        """Where things stand."""
        running = len(self.memory.holders)
        return SchedulerStats(
            running=running,
            waiting=len(self._sequences) - running + len(self._unborn),
            kv_usage=1 - self.memory.free_share,
            in_flight=len(self._in_flight),
            **vars(self._counts),
        )

    # Filling a micro-batch.

    def _fill(self, now: float) -> list[ScheduledRow]:
        """Rows by the policy's budgets.

        Decodes take their blocks first, unless prefill leads. It never does while a decode lacks
        a block: a victim of preemption would take back what it had to give.
        """
        self._preemption.make_way()
        prefill_leads = self._policy.prefill_leads
        pure = prefill_leads or self.config.phase_pure
        if (prefill_leads or (pure and self._decodes_last)) and not self._stalled:
            return self._prefill_rows([], 0.0, now) or self._decode_rows()[0]
        rows, cost = self._decode_rows()
        if rows and pure:
            return rows
        return rows + self._prefill_rows(rows, cost, now)

    def _decode_rows(self) -> tuple[list[ScheduledRow], float]:
        """Decodes, those of one token first, and what they cost of the policy's budget."""
        budget, cost = self._policy.decodes(self._queues.load()), 0.0
        rows: tuple[list[ScheduledRow], list[ScheduledRow]] = ([], [])
        room, self._stalled = self._cap, False
        for sequence in list(self._queues.ready.values()):
            if cost >= budget or not room:
                break
            if sequence.seq not in self._queues.ready:
                continue  # It fell victim to one before it in this loop.
            count = min(sequence.decode_tokens, room)
            if self._preemption.allocate_decode(sequence, count):
                cost += self._policy.decode_cost(sequence.scheduled)
                rows[count > 1].append(self._feed(sequence, count))
                room -= count
            else:
                self._stalled = True
        return rows[0] + rows[1], cost

    def _prefill_rows(
        self, decodes: list[ScheduledRow], decode_cost: float, now: float
    ) -> list[ScheduledRow]:
        """Chunks beside these decodes."""
        budget = self._policy.prefill(self._queues.load(len(decodes), decode_cost))
        room = self._cap - sum(row.num_tokens for row in decodes)
        rows: list[ScheduledRow] = []
        while self._queues.waiting and budget > 0 and room:
            sequence = self._queues.waiting[0]
            most = min(self._fitting_tokens(sequence, now), room)
            if not most:
                break
            count, cost = self._policy.chunk(sequence.scheduled, most, budget)
            rows.append(self._feed_prefill(sequence, count))
            budget -= cost
            room -= count
            if sequence.prefilling:
                break
        return rows

    def _force(self, now: float) -> list[ScheduledRow]:
        """With nothing in flight, run the best-ranked sequence, whoever has to make room."""
        if self._in_flight:
            return []
        best = min(self._sequences.values(), key=rank_of)
        others = sorted(self.memory.holders.values(), key=rank_of)
        while not (rows := self._run_alone(best, now)):
            victim = others.pop()
            assert victim is not best, "the whole cache holds one sequence"
            self._preemption.preempt(victim)
        return rows

    def _run_alone(self, sequence: Sequence, now: float) -> list[ScheduledRow]:
        if sequence.prefilling:
            if not (most := min(self._fitting_tokens(sequence, now, True), self._cap)):
                return []
            budget = self._policy.prefill(self._queues.load())
            count, _ = self._policy.chunk(sequence.scheduled, most, budget)
            return [self._feed_prefill(sequence, count)]
        fits = self.memory.capacity(sequence) - sequence.scheduled
        count = min(sequence.decode_tokens, fits, self._cap)
        return [self._feed(sequence, count)] if count else []

    def _feed_prefill(self, sequence: Sequence, count: int) -> ScheduledRow:
        self._queues.tally.wait(sequence, -1)
        row = self._feed(sequence, count)
        self._queues.tally.wait(sequence)
        if not sequence.prefilling:
            self._queues.dequeue(sequence)
        return row

    def _feed(self, sequence: Sequence, count: int) -> ScheduledRow:
        self.memory.grow(sequence, count)
        self._queues.ready.pop(sequence.seq, None)
        if sequence.prefilling:
            self._counts.prefill_tokens += count
        else:
            self._counts.decode_tokens += count
        row = sequence.feed(count)
        self._queues.tally.decoded(sequence, count)
        if self.config.lookahead:
            self._queues.make_ready(sequence)
        return row

    # Blocks.

    def _fitting_tokens(self, sequence: Sequence, now: float, alone: bool = False) -> int:
        """Prefill tokens for which there is room; admits a waiting sequence where there is any.
        alone: nothing else is to run, so it need not fit beside others."""
        if sequence.seq not in self.memory.holders and not self._admit(sequence, now, alone):
            return 0
        return min(sequence.target, self.memory.capacity(sequence)) - sequence.scheduled

    def _admit(self, sequence: Sequence, now: float, alone: bool) -> bool:
        """Give a waiting sequence a place in the cache, if there is one."""
        if not self.memory.has_room(sequence):
            return False
        if not (alone or self._admission.is_admissible(sequence)):
            return False
        self._queues.tally.wait(sequence, -1)
        admitted = self.memory.admit(sequence)
        self._queues.tally.wait(sequence)
        if not admitted:
            return False
        if sequence.epoch == 0:
            sequence.cached = sequence.scheduled
            sequence.queue_seconds = now - sequence.arrival
            self._counts.prefix_queries += sequence.prompt_len * sequence.reads_cache
            self._counts.prefix_hits += sequence.cached
        return True

    # The course of a sequence.

    def _new_sequence(self, seq: int, request: SchedulerRequest, now: float) -> Sequence:
        tokens = list(request.prompt)
        sequence = Sequence(seq, request, tokens, target=len(tokens), arrival=now)
        self._sequences[seq] = sequence
        return sequence

    def _fork(self, first: Sequence) -> None:
        """Bring the other choices of a request in; its prompt is computed, or never will be."""
        request = first.request
        for seq in range(request.seq + 1, request.seq + request.n):
            if self._unborn.pop(seq, None) is not None:
                choice = self._new_sequence(seq, request, first.arrival)
                choice.donor = first
                self._queues.enqueue(choice)

    def _advance(
        self,
        sequence: Sequence,
        row: ScheduledRow,
        sampled: SampledToken | None,
        outcome: StepOutput,
    ) -> None:
        """Count a row as computed and append the token that it sampled."""
        if row.start <= sequence.computed:
            # Otherwise a row before it failed, and the blocks between were never written.
            sequence.computed = row.start + row.num_tokens
            self.memory.publish(sequence)
        if sampled is not None and not sampled.is_finite:
            self.memory.withdraw(sequence)
        if sequence.ended or not row.samples:
            return
        if sampled is None or sampled.epoch != row.epoch:
            raise ValueError(f"the result lacks sequence {row.seq}, epoch {row.epoch}")
        if sampled.error:
            self._fail(sequence, sampled.error, outcome)
        elif row.start + row.num_tokens == len(sequence.tokens):
            # Otherwise a row before has told the token as forced.
            for token in (sampled.token, *sampled.forced):
                if not sequence.ended:
                    self._append(sequence, token, outcome)

    def _append(self, sequence: Sequence, token: int, outcome: StepOutput) -> None:
        sequence.tokens.append(token)
        outcome.seqs.append(sequence.seq)
        outcome.tokens.append(token)
        generated = len(sequence.tokens) - sequence.prompt_len
        if generated == 1:
            first = FirstToken(sequence.seq, sequence.cached, sequence.queue_seconds)
            outcome.firsts.append(first)
            self._fork(sequence)
        if token in sequence.request.stop_ids:
            outcome.ends.append(FinishedSequence(sequence.seq, "stop", token))
        elif generated == sequence.request.max_tokens:
            outcome.ends.append(FinishedSequence(sequence.seq, "length"))
        else:
            return
        self._admission.lengths.record(sequence.request.max_tokens, generated)
        self._end(sequence)

    def _fail(self, sequence: Sequence, error: str, outcome: StepOutput) -> None:
        if not sequence.ended:
            outcome.ends.append(FinishedSequence(sequence.seq, "error", error=error))
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Schedule it no more; `_settle` gives its blocks back after its last commit."""
        self._queues.remove(sequence)
        sequence.ended = True
        self._fork(sequence)
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """After a commit: leave for good, give way to another, or be ready for the next token."""
        if sequence.ended:
            if not sequence.in_flight and sequence.seq in self._sequences:
                del self._sequences[sequence.seq]
                self.memory.release(sequence)
                self._released.append(sequence.seq)
        elif sequence.evicting:
            if not sequence.in_flight:
                self._preemption.preempt(sequence)
        else:
            self._queues.make_ready(sequence)
