"""A pipeline without arithmetic around a real scheduler, which checks every step it is given.

Each stage keeps a mirror and a KV cache whose slots hold a hash of everything up to that position;
a row that finds anything else in the slots of its context fails. The "model" is a hash as well, so
what a sequence generates depends on its own tokens and nothing else.

Two faults can be injected. A step that raises writes nothing on its last stage; rows of its
sequences that are in flight behind it compute on what is there. A row that computes NaN writes NaN
to the cache on its last stage; whatever attends to NaN is NaN, and a row that samples from NaN
fails.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gllm.scheduler.block_table_replica import BlockTableReplica
from gllm.scheduler.config import POLICY_NAMES, SchedulerConfig
from gllm.scheduler.plan import (
    ON_DEVICE,
    SampledToken,
    ScheduledRow,
    StateSegment,
    StepOutput,
    StepPlan,
    StepResult,
    StepTime,
)
from gllm.scheduler.policy_entry import BASELINE_ENTRIES
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import count_query_key_pairs
from gllm.scheduler.state_slots import NO_STATE_SLOT

VOCABULARY = 50
NAN = None
"""What a slot holds that a faulty row has written."""
EVERY_POLICY = (*POLICY_NAMES, *BASELINE_ENTRIES)
"""Names of the registered policies, `auto`, and short names of those of experiments/policies/."""
RESERVING_POLICIES = ("lightllm", "fastertransformer", "splitwise")
"""Policies that admit a sequence only if the cache holds it to its end: they preempt nothing."""
NOT_FINITE = "logits are not finite"


def next_token(tokens: list[int]) -> int:
    """What the fake model answers to a context."""
    return hash(tuple(tokens)) % VOCABULARY


def draw(tokens: list[int], forces: bool) -> list[int]:
    """What is drawn after a context: a token and, where tokens force others, up to four of them
    after every second token."""
    drawn = [next_token(tokens)]
    count = hash((0, *tokens)) % 8 if forces else 0
    for _ in range(count if count <= 4 else 0):
        drawn.append(next_token([1, *tokens, *drawn]))
    return drawn


def generate(request: SchedulerRequest, forces: bool = False) -> list[int]:
    """What a request generates when it has the pipeline for itself."""
    tokens = list(request.prompt_token_ids)
    limit = len(tokens) + request.max_tokens
    while True:
        for token in draw(tokens, forces):
            tokens.append(token)
            if token in request.stop_token_ids or len(tokens) == limit:
                return tokens[len(request.prompt_token_ids) :]


@dataclass
class Text:
    """A sequence's tokens as the device knows them, each with a digest of all up to it."""

    tokens: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)

    def append(self, token: int) -> None:
        """One more token."""
        self.tokens.append(token)
        self.digests.append(hash((self.digests[-1] if self.digests else 0, token)))


@dataclass
class Stage:
    """One follower: mirror and cache."""

    block_size: int
    keeps_blocks: bool = False
    """A sequence may have more blocks than its row needs, for guesses that were wrong."""
    mirror: BlockTableReplica = field(default_factory=BlockTableReplica)
    cache: dict[int, int | None] = field(default_factory=dict)
    states: dict[int, int | None] = field(default_factory=dict)
    """By state slot, the digest of all tokens up to the state."""

    def prepare(self, plan: StepPlan) -> list[list[int]]:
        """Take a plan's block tables over, in the order of the plans; the table of each row."""
        tables = []
        for row, followed in zip(plan.rows, self.mirror.apply(plan), strict=True):
            num_blocks = -(-(row.start + row.num_tokens) // self.block_size)
            assert len(followed.block_ids) >= num_blocks
            assert self.keeps_blocks or len(followed.block_ids) == num_blocks
            tables.append(list(followed.block_ids))
        self.mirror.release(plan.released_seqs)
        return tables

    def compute(
        self,
        plan: StepPlan,
        tables: list[list[int]],
        texts: dict[int, Text],
        broken: dict[int, int],
        faulty: Iterable[int] = (),
        guessed: dict[int, list[int] | None] | None = None,
    ) -> set[int]:
        """Compute a plan; the sequences whose rows are NaN. broken: sequences of which a step
        fails, with that step. faulty: sequences whose rows become NaN here. guessed: by sequence,
        digests of a window's positions; None for one that continues a wrong guess."""
        guessed = guessed or {}
        nan = set()
        for index, (row, table) in enumerate(zip(plan.rows, tables, strict=True)):
            segments = [segment for segment in plan.state_segments if segment.row == index]
            values = guessed.get(row.seq, texts[row.seq].digests[row.start :][: row.num_tokens])
            if broken.get(row.seq, plan.step) < plan.step or values is None:
                garbage = hash(("broken", plan.step))
                self._write(row, table, [garbage] * row.num_tokens)
                self.states.update((segment.target, garbage) for segment in segments)
                continue
            digests = texts[row.seq].digests
            is_faulty = self._run_segments(row, segments, digests, row.seq in faulty)
            if self._run_row(row, table, digests, values, is_faulty):
                self.states.update((segment.target, NAN) for segment in segments)
                nan.add(row.seq)
        return nan

    def _run_segments(
        self, row: ScheduledRow, segments: list[StateSegment], digests: list[int], faulty: bool
    ) -> bool:
        """Update the states of a row, each from the state after the tokens before it."""
        position = row.start
        for segment in segments:
            if segment.source == NO_STATE_SLOT:
                assert position == 0
            else:
                held = self.states[segment.source]
                faulty = faulty or held is NAN
                assert position > 0
                assert held in (NAN, digests[position - 1])
            position += segment.num_tokens
            self.states[segment.target] = NAN if faulty else digests[position - 1]
        assert not segments or position == row.start + row.num_tokens
        return faulty

    def _run_row(
        self,
        row: ScheduledRow,
        table: list[int],
        digests: list[int],
        values: list[int],
        faulty: bool,
    ) -> bool:
        start = row.start
        assert len(values) == row.num_tokens
        held = [self.cache[slot] for slot in self._slots(table, 0, start)]
        if held != digests[:start]:
            faulty = faulty or NAN in held
            assert all(value in (NAN, digest) for value, digest in zip(held, digests, strict=False))
        self._write(row, table, [NAN] * row.num_tokens if faulty else values)
        return faulty

    def _write(self, row: ScheduledRow, table: list[int], values: Sequence[int | None]) -> None:
        slots = self._slots(table, row.start, row.start + row.num_tokens)
        self.cache.update(zip(slots, values, strict=True))

    def _slots(self, table: list[int], start: int, end: int) -> list[int]:
        """Return the slots of the positions start .. end - 1."""
        size = self.block_size
        first, last = start // size, -(-end // size)
        slots = [
            slot for block in table[first:last] for slot in range(block * size, (block + 1) * size)
        ]
        return slots[start - first * size : end - first * size]


class Pipeline:
    """Scheduler, stages, and what the requests got."""

    def __init__(
        self,
        config: SchedulerConfig,
        forces: bool = False,
        drafter: Any = None,
        stage_drafter: Any = None,
    ) -> None:
        """`forces`: some tokens that are drawn force those that follow. `drafter`: what guesses, by
        default the configured method. `stage_drafter`: what guesses on the last stage, for methods
        that do so; None for no guesses."""
        self.stage_drafter = stage_drafter
        self.config: Any = config
        """Resolved: its limits are numbers."""
        self.forces = forces
        self.forced: dict[tuple[int, int], tuple[int, ...]] = {}
        """By step and sequence, what comes with the token drawn."""
        create_drafter = None if drafter is None else lambda config: drafter
        self.scheduler = Scheduler(config, create_drafter=create_drafter)
        speculates = config.speculative_config is not None
        self.stages = [Stage(config.block_size, speculates) for _ in range(config.stages)]
        self.chains: dict[int, int] = {}
        """By sequence, the position up to which all guesses have been right; absent after a wrong
        one."""
        self.windows: dict[tuple[int, int], list[int]] = {}
        """By step and sequence, what a window samples; nothing if it continues a wrong guess."""
        self.guessed: dict[int, dict[int, list[int] | None]] = {}
        """By step and sequence, digests of the positions of a window."""
        self.plans: deque[StepPlan] = deque()
        self.failed: set[int] = set()
        """Steps in flight that will fail."""
        self.broken: dict[int, int] = {}
        """Sequences of which a step fails, with that step."""
        self.nan: dict[int, set[int]] = {}
        """By step, the sequences whose rows are NaN."""
        self.texts: dict[int, Text] = {}
        self.generated: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.alive: set[int] = set()
        self.requests: dict[int, SchedulerRequest] = {}
        self.arrival_times: dict[int, float] = {}
        """Of each request, by its first sequence."""
        self.prefill_tokens: dict[int, int] = {}
        """Prefill tokens of each step."""
        self.scored: dict[int, set[int]] = {}
        """Tokens of each sequence that committed rows have computed."""
        self.now = 0.0

    def add(self, request: SchedulerRequest) -> None:
        """Submit a request and register its sequences everywhere."""
        self.scheduler.add(request, self.now)
        self.arrival_times[request.seq] = self.now - request.age_seconds
        prompt = [*request.prompt_token_ids]
        for seq in range(request.seq, request.seq + request.n):
            for stage in self.stages:
                stage.mirror.register(seq, len(prompt), prompt)
            self.texts[seq] = Text()
            for token in request.initial_token_ids(seq):
                self.texts[seq].append(token)
            self.generated[seq] = self.texts[seq].tokens[len(request.prompt_token_ids) :]
            self.scored[seq] = set()
            self.alive.add(seq)
            self.requests[seq] = request

    def abort(self, seqs: list[int]) -> None:
        """Nobody waits for these any more."""
        self.scheduler.abort(seqs)
        for seq in self.alive & set(seqs):
            self.ended[seq] = "abort"
        self.alive -= set(seqs)

    def schedule(self, fails: bool = False, faulty: Iterable[int] = ()) -> StepPlan | None:
        """Ask for a plan, run it on every stage, check everything.

        fails: the step raises on the last stage. faulty: sequences whose rows are NaN there.
        """
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self._check_plan(plan)
            self.prefill_tokens[plan.step] = self._count_prefill_tokens(plan)
            self._sample_ahead(plan)
            self._run(plan, fails, faulty)
            self.plans.append(plan)
        self.check()
        return plan

    def _run(self, plan: StepPlan, fails: bool, faulty: Iterable[int]) -> None:
        tables = [stage.prepare(plan) for stage in self.stages]
        self._begin(plan, fails)
        for stage in range(len(self.stages)):
            self._compute(stage, plan, tables[stage], faulty)

    def _begin(self, plan: StepPlan, fails: bool) -> None:
        self.nan[plan.step] = set()
        if fails:
            self.failed.add(plan.step)
            self.broken = {row.seq: plan.step for row in plan.rows} | self.broken

    def _compute(
        self, stage: int, plan: StepPlan, tables: list[list[int]], faulty: Iterable[int]
    ) -> None:
        """Compute a step on a stage; one that fails does nothing on the last stage."""
        is_last = stage == len(self.stages) - 1
        if not (is_last and plan.step in self.failed):
            faulty = faulty if is_last else ()
            guessed = self.guessed.get(plan.step)
            nan = self.stages[stage].compute(plan, tables, self.texts, self.broken, faulty, guessed)
            self.nan[plan.step] |= nan

    def commit(self, errors: dict[int, str] | None = None) -> StepOutput:
        """Return the oldest plan's result; sequences in `errors` fail."""
        plan = self._pop_plan()
        for row in plan.rows:
            self.scored[row.seq].update(range(row.start, row.start + row.num_tokens))
        outcome = self.scheduler.commit(self._result(plan, errors or {}))
        self._check_scores(outcome)
        for stage in range(self.scheduler.config.stages):
            # Any times will do for a policy that learns: the more they vary, the harder.
            seconds = 1 + plan.step * 7919 % 13 + stage
            self.scheduler.record_step_times(stage, [StepTime(plan.step, 0.0, seconds)])
        for seq, token in zip(outcome.seqs, outcome.token_ids, strict=True):
            self.generated[seq].append(token)
        for end in outcome.finished:
            assert end.seq in self.alive
            self.alive.discard(end.seq)
            self.ended[end.seq] = end.finish_reason
        self.check()
        return outcome

    def _pop_plan(self) -> StepPlan:
        """The plan whose result comes next."""
        return self.plans.popleft()

    def _result(self, plan: StepPlan, errors: dict[int, str]) -> StepResult:
        nan = self.nan.pop(plan.step)
        if plan.step in self.failed:
            self.failed.remove(plan.step)
            return StepResult(plan.step, [], "the step raised")
        sampled: list[SampledToken] = []
        for row in plan.rows:
            if row.should_sample:
                forced = self.forced.pop((plan.step, row.seq), ())
                if row.num_draft_tokens:
                    window = self.windows.pop((plan.step, row.seq), [0])
                    if window:
                        self._append_result(sampled, row, window, row.seq in nan, errors)
                    continue
                error = NOT_FINITE if row.seq in nan else errors.get(row.seq, "")
                token = self._token(plan.step, row)
                sampled.append(
                    SampledToken(
                        row.seq, row.num_preemptions, token, error, forced, row.seq not in nan
                    )
                )
        if plan.num_next_drafts and self.stage_drafter is not None:
            rows = {row.seq: row for row in plan.rows}
            sampled = [self._add_drafts(plan, rows[token.seq], token) for token in sampled]
        return StepResult(plan.step, sampled)

    def _add_drafts(self, plan: StepPlan, row: ScheduledRow, token: SampledToken) -> SampledToken:
        end = row.first_sampled_position + 1 + len(token.further_token_ids)
        tokens = self.texts[row.seq].tokens[:end]
        drafts = self.stage_drafter.draft(tokens, [], plan.num_next_drafts)
        return token._replace(draft_token_ids=tuple(drafts))

    def _append_result(
        self,
        sampled: list[SampledToken],
        row: ScheduledRow,
        tokens: list[int],
        is_nan: bool,
        errors: dict[int, str],
    ) -> None:
        error = NOT_FINITE if is_nan else errors.get(row.seq, "")
        further = tuple(tokens[1:])
        names = row.seq, row.num_preemptions
        sampled.append(SampledToken(*names, tokens[0], error, further, not is_nan))

    def drain(self, limit: int = 100_000) -> None:
        """Run until every sequence has ended."""
        for _ in range(limit):
            if not self.alive:
                break
            planned = self.schedule()
            if planned is None:
                assert self.plans, "requests wait, nothing is in flight, nothing is planned"
                self.commit()
        assert not self.alive, "no end in sight"
        while self.plans:
            self.commit()

    def check(self) -> None:
        """The invariants that hold after every step."""
        scheduler = self.scheduler
        held = Counter(b for s in scheduler.kv_cache.running.values() for b in s.block_ids)
        holds = scheduler.kv_cache.holds.holds
        held += Counter(b for hold in holds for b in hold.block_ids)
        references, cached, free = scheduler.kv_cache.block_pool.describe()
        assert references == held
        unreferenced = {*cached, *free}
        assert len(unreferenced) == len(cached) + len(free)
        assert unreferenced.isdisjoint(held)
        assert len(held) + len(unreferenced) == scheduler.kv_cache.block_pool.num_blocks
        assert scheduler.kv_cache.block_pool.num_free_blocks == len(unreferenced)
        for lane in range(self.config.num_lanes):
            assert sum(plan.lane == lane for plan in self.plans) <= self.config.max_in_flight
        assert len(scheduler.kv_cache.running) <= self.config.max_num_seqs
        self._check_tally()
        self._check_states()
        for sequence in scheduler.table.sequences.values():
            assert sequence.num_tokens == len(sequence.token_ids)
        for sequence in scheduler.kv_cache.running.values():
            if sequence.num_sent_blocks:
                for stage in self.stages:
                    followed = stage.mirror.sequences[sequence.seq]
                    assert followed.num_preemptions == sequence.num_preemptions
                    assert followed.block_ids == sequence.block_ids[: sequence.num_sent_blocks]

    def _check_states(self) -> None:
        """Each state slot is in use, a checkpoint or free; checkpoints belong to cached blocks."""
        kv_cache = self.scheduler.kv_cache
        states = kv_cache.states
        if states is None:
            return
        references, evictable, free, checkpoints = states.describe()
        slots = [*references, *evictable, *free]
        assert sorted(slots) == list(range(states.num_slots))
        assert set(evictable) <= set(checkpoints.values())
        assert set(free).isdisjoint(checkpoints.values())
        assert checkpoints.keys() <= set(kv_cache.block_pool.digests)
        num_others = self.config.max_num_seqs - len(kv_cache.running)
        assert len(evictable) + len(free) >= num_others
        assert len(references) >= len(kv_cache.running)
        if not kv_cache.running:
            assert not references

    def _check_scores(self, outcome: StepOutput) -> None:
        """Where the prompt is scored, each of its tokens was computed before the output."""
        for first in outcome.first_tokens:
            request = self.requests[first.seq]
            assert len(request.initial_token_ids(first.seq)) == len(request.prompt_token_ids)
            if not request.reads_prefix_cache and first.seq == request.seq:
                assert self.scored[first.seq] == set(range(len(request.prompt_token_ids)))

    def _check_tally(self) -> None:
        """The running sums are the sums."""
        queues, sequences = self.scheduler.describe(), self.scheduler.table.sequences
        load, queue = queues.load, [sequences[seq] for seq in queues.waiting_seqs]
        assert load.num_waiting_tokens == sum(s.num_waiting_tokens for s in queue)
        expected = sum(
            count_query_key_pairs(s.num_prefill_tokens - s.num_waiting_tokens, s.num_waiting_tokens)
            for s in queue
        )
        assert load.num_waiting_pairs == expected
        assert load.num_decode_context_tokens == sum(
            sequences[seq].num_scheduled_tokens for seq in queues.decoding_seqs
        )
        in_flight = sum(self.prefill_tokens[plan.step] for plan in self.plans)
        assert self.scheduler.stats().in_flight_prefill_tokens == in_flight

    def _count_prefill_tokens(self, plan: StepPlan) -> int:
        """Tokens of the rows before the end of their sequence's prefill, just after scheduling."""
        sequences = self.scheduler.table.sequences
        return sum(
            row.num_tokens for row in plan.rows if row.start < sequences[row.seq].num_prefill_tokens
        )

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.rows
        assert sum(row.num_tokens for row in plan.rows) <= self.config.max_num_batched_tokens
        seqs = [row.seq for row in plan.rows]
        assert len(set(seqs)) == len(seqs)
        assert all(seq in self.alive for seq in seqs)
        assert bool(plan.state_segments) == bool(self.config.num_state_slots)
        self._check_segments(plan)
        for row in plan.rows:
            assert ON_DEVICE not in row.token_ids or self.config.async_scheduling

    def _check_segments(self, plan: StepPlan) -> None:
        """Rows are computed at the same time: none touches a slot that another one writes."""
        writers = {segment.target: segment.row for segment in plan.state_segments}
        for segment in plan.state_segments:
            assert segment.num_tokens > 0
            assert writers[segment.target] == segment.row
            assert writers.get(segment.source, segment.row) == segment.row
        rows = [segment.row for segment in plan.state_segments]
        assert rows == sorted(rows)
        assert not rows or [*dict.fromkeys(rows)] == list(range(len(plan.rows)))

    def _sample_ahead(self, plan: StepPlan) -> None:
        """The device knows a sampled token at once; the driver hears of it at the commit."""
        for row in plan.rows:
            if row.seq in self.broken:
                continue
            text = self.texts[row.seq]
            tokens = text.tokens
            if row.num_draft_tokens:
                self._sample_window(plan.step, row, text)
                continue
            self.chains[row.seq] = row.start + row.num_tokens
            known = [t for t in row.token_ids if t != ON_DEVICE]
            start = max(row.start, len(self.requests[row.seq].prompt_token_ids))
            assert tokens[start : start + len(known)] == known
            if row.should_sample and row.start + row.num_tokens == len(tokens):
                drawn = draw(tokens, self.forces)
                self.forced[plan.step, row.seq] = tuple(drawn[1:])
                for token in drawn:
                    text.append(token)

    def _sample_window(self, step: int, row: ScheduledRow, text: Text) -> None:
        """Sample behind each token of a window, up to the first guess that is wrong."""
        start, end, tokens = row.start, row.start + row.num_tokens, text.tokens
        num_known = row.num_tokens - row.num_draft_tokens
        inputs = row.token_ids[-row.num_tokens :]
        assert len(inputs) == row.num_tokens
        assert ON_DEVICE not in inputs
        assert inputs[:num_known] == tokens[start : start + num_known]
        guessed, window = self.guessed.setdefault(step, {}), self.windows
        window[step, row.seq] = sampled = []
        if not num_known and (self.chains.get(row.seq) != start or tokens[start] != inputs[0]):
            guessed[row.seq] = None
            self.chains.pop(row.seq, None)
            return
        digests = [text.digests[start - 1]]
        for token in inputs:
            digests.append(hash((digests[-1], token)))
        guessed[row.seq] = digests[1:]
        position = row.first_sampled_position
        is_new = False
        while True:
            if position == len(tokens):
                is_new = True
                for token in draw(tokens, self.forces):
                    text.append(token)
            sampled.append(tokens[position])
            if position == end or inputs[position - start] != tokens[position]:
                break
            position += 1
        if position == end:
            self.chains[row.seq] = end
        else:
            self.chains.pop(row.seq, None)
        if is_new:
            sampled += tokens[position + 1 :]

    def _token(self, step: int, row: ScheduledRow) -> int:
        if self.broken.get(row.seq, step) < step:
            return 0
        return self.texts[row.seq].tokens[row.start + row.num_tokens]
