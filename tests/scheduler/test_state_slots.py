"""State slots of recurrent layers: where prompts may start, which states are kept and evicted."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.scheduler.block_pool import chain_hashes, root_hash
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import ScheduledRow
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.state_slots import NO_STATE_SLOT, StateCache, list_prefill_boundaries
from tests.scheduler.test_properties import check_outputs, configs, drive
from tests.support.examples import num_examples
from tests.support.scheduler.pipeline import Pipeline

BLOCK = 4


def create_pipeline(
    num_slots: int = 40, num_blocks: int = 400, stages: int = 1, **options: Any
) -> Pipeline:
    """Pipeline of a model with recurrent layers."""
    config = SchedulerConfig(block_size=BLOCK, **{"min_prefill_tokens": 1, **options})
    return Pipeline(config.resolve(stages, num_blocks, 800, num_state_slots=num_slots))


def run(pipeline: Pipeline, prompt: list[int], max_tokens: int = 1, n: int = 1) -> int:
    """Compute a request; the prompt tokens of its first choice that the prefix cache had."""
    seq = max(pipeline.requests, default=-1) + 1
    pipeline.add(SchedulerRequest(seq, prompt, max_tokens, n=n))
    cached = 0
    while pipeline.alive or pipeline.plans:
        if pipeline.schedule() is None or len(pipeline.plans) > 1:
            for first in pipeline.commit().first_tokens:
                cached = first.num_cached_tokens if first.seq == seq else cached
    return cached


def num_checkpoints(pipeline: Pipeline) -> int:
    """Number of states in the prefix cache."""
    states = pipeline.scheduler.kv_cache.states
    assert states is not None
    return len(states.describe().checkpoints)


@settings(
    max_examples=num_examples(8, 100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(config=configs(has_states=True), forces=st.booleans(), seed=st.integers(0, 2**32))
def test_each_segment_starts_from_the_state_after_the_tokens_before_it(
    config: SchedulerConfig, forces: bool, seed: int
) -> None:
    pipeline = Pipeline(config, forces)
    drive(pipeline, Random(seed), 400)
    pipeline.drain()
    check_outputs(pipeline)


def test_no_slot_is_lost_over_many_operations() -> None:
    """20,000 operations on random sequences of few tokens, beside a dictionary of states."""
    rng = Random(5)
    num_hits = 0
    for num_slots, max_num_seqs in ((2, 1), (7, 3), (30, 10), (11, 10)):
        world = StateWorld(rng, num_slots, max_num_seqs)
        for step in range(5000):
            world.step()
            world.check(with_content=step % 50 == 0)
        num_hits += world.num_hits
        while world.running:
            world.end(next(iter(world.running)))
        assert world.states.num_used_slots == 0
        world.states.clear()
        assert len(world.states.describe().free) == num_slots
    assert num_hits > 500


class StateWorld:
    """State cache beside a model of it: slots hold the tokens up to their states."""

    def __init__(self, rng: Random, num_slots: int, max_num_seqs: int) -> None:
        self.rng, self.max_num_seqs = rng, max_num_seqs
        self.states = StateCache(num_slots, max_num_seqs, BLOCK)
        self.content: dict[int, tuple[int, ...]] = {}
        self.cached: set[bytes] = set()
        self.running: dict[int, tuple[list[int], list[int]]] = {}
        """By sequence: its tokens, and [tokens scheduled, tokens computed]."""
        self.rows: list[ScheduledRow] = []
        """In flight, the oldest first."""
        self.next_seq = self.num_hits = 0

    def step(self) -> None:
        """Do one random operation."""
        choice = self.rng.random()
        if choice < 0.2 and len(self.running) < self.max_num_seqs:
            self.begin()
        elif choice < 0.5:
            self.schedule()
        elif choice < 0.8:
            self.commit()
        elif choice < 0.99:
            if self.running:
                self.end(self.rng.choice(sorted(self.running)))
        elif self.cached:
            digest = self.rng.choice(sorted(self.cached))
            self.cached.remove(digest)
            self.states.remove(digest)

    def begin(self) -> None:
        """Admit a sequence of one of few beginnings."""
        tokens = [self.rng.randrange(2)] * self.rng.randint(1, 24)
        tokens += [self.rng.randrange(2) for _ in range(self.rng.randint(0, 6))]
        digests = self.hashes(tokens[:-1])
        shared = next(
            (i for i, digest in enumerate(digests) if digest not in self.cached), len(digests)
        )
        count = self.states.count_restorable_blocks(digests[:shared])
        self.num_hits += count > 0
        sizes = count * BLOCK, shared * BLOCK, len(tokens), len(tokens), BLOCK
        boundaries = list_prefill_boundaries(*sizes)
        self.states.admit(self.next_seq, digests[count - 1] if count else None, boundaries)
        self.running[self.next_seq] = tokens, [count * BLOCK] * 2
        self.next_seq += 1

    def schedule(self) -> None:
        """Compute some tokens of some sequences, each from the state in the slot that it reads."""
        rows = []
        for seq, (tokens, progress) in self.running.items():
            start = progress[0]
            if start == len(tokens) and self.rng.random() < 0.7:
                tokens.append(self.rng.randrange(2))
            if start < len(tokens) and self.rng.random() < 0.6:
                end = self.rng.randint(start + 1, len(tokens))
                rows.append(ScheduledRow(seq, 0, start, end - start, [], [], end == len(tokens)))
                progress[0] = end
        read: dict[int, int] = {}
        for segment in self.states.schedule_rows(rows):
            row = rows[segment.row]
            start = read.get(segment.row, row.start)
            tokens = self.running[row.seq][0]
            held = () if segment.source == NO_STATE_SLOT else self.content[segment.source]
            assert held == tuple(tokens[:start])
            read[segment.row] = start + segment.num_tokens
            self.content[segment.target] = tuple(tokens[: start + segment.num_tokens])
        assert read == {i: row.start + row.num_tokens for i, row in enumerate(rows)}
        self.rows += rows

    def commit(self) -> None:
        """Commit the oldest row in flight."""
        if not self.rows:
            return
        row = self.rows.pop(0)
        tokens, progress = self.running[row.seq]
        progress[1] = row.start + row.num_tokens
        self.states.on_row_committed(row)
        digests = self.hashes(tokens[: progress[1]])
        self.cached.update(digests)
        self.states.publish(row.seq, progress[1], digests, self.cached)

    def end(self, seq: int) -> None:
        """End a sequence; its rows in flight are committed first."""
        while any(row.seq == seq for row in self.rows):
            self.commit()
        del self.running[seq]
        self.states.free(seq)

    def hashes(self, tokens: list[int]) -> list[bytes]:
        """Hash chain of the full blocks of tokens."""
        return chain_hashes(root_hash(""), tokens[: len(tokens) // BLOCK * BLOCK], BLOCK)

    def check(self, with_content: bool) -> None:
        """No slot is lost, or free and in use; each checkpoint has the state of its block."""
        references, evictable, free, checkpoints = self.states.describe()
        assert Counter([*references, *evictable, *free]) == Counter(range(self.states.num_slots))
        assert set(free).isdisjoint(checkpoints.values())
        assert set(evictable) <= set(checkpoints.values())
        assert len(evictable) + len(free) >= self.max_num_seqs - len(self.running)
        assert checkpoints.keys() <= self.cached
        for digest, slot in checkpoints.items() if with_content else ():
            assert self.hashes(list(self.content[slot]))[-1] == digest


def test_no_step_overwrites_a_checkpoint_that_a_row_in_flight_reads() -> None:
    """With two lanes, a later step could overtake the row."""
    states = StateCache(6, 2, BLOCK)
    digests = chain_hashes(root_hash(""), [1, 2, 3, 4], BLOCK)
    states.admit(0, None, [4])
    first = ScheduledRow(0, 0, 0, 5, [], [], False)
    own, rest = states.schedule_rows([first])
    assert (own.num_tokens, rest.num_tokens) == (4, 1)
    assert (own.source, rest.source) == (NO_STATE_SLOT, own.target)
    states.on_row_committed(first)
    states.publish(0, 5, digests, digests)
    states.free(0)
    assert states.describe().checkpoints == {digests[0]: own.target}
    states.admit(1, digests[0], [])
    second = ScheduledRow(1, 0, 4, 2, [], [], False)
    (segment,) = states.schedule_rows([second])
    assert segment.source == own.target
    states.remove(digests[0])
    assert own.target in states.describe().references
    states.on_row_committed(second)
    assert own.target in states.describe().free


def test_a_prompt_starts_only_where_a_state_was_kept() -> None:
    """Trap: all KV blocks of the common prefix are cached, but the state after it is not."""
    pipeline = create_pipeline()
    common = list(range(20))
    assert run(pipeline, common + [30] * 20) == 0
    # The state at the branch point is kept by the prompt that finds it.
    assert run(pipeline, common + [31] * 20) == 0
    assert run(pipeline, common + [32] * 20) == 20
    # The same prompt starts before its last token.
    assert run(pipeline, common + [32] * 20) == 36


@pytest.mark.parametrize("stages", [1, 4])
def test_states_do_not_depend_on_chunks(stages: int) -> None:
    """Trap: with states at the ends of chunks, only prompts with the same chunks would hit."""
    pipeline = create_pipeline(stages=stages, max_prefill_tokens=7, max_num_batched_tokens=7)
    prompt = [token % 50 for token in range(101)]
    assert run(pipeline, prompt) == 0
    assert run(pipeline, prompt) == 100
    assert run(pipeline, [*prompt[:100], 1, 2]) == 100


def test_a_long_prompt_keeps_one_state() -> None:
    """Trap: states at every block would fill the memory."""
    pipeline = create_pipeline()
    run(pipeline, [token % 50 for token in range(402)])
    assert num_checkpoints(pipeline) == 1


def test_the_newest_boundary_of_an_output_replaces_the_one_before() -> None:
    pipeline = create_pipeline()
    prompt = [token % 50 for token in range(18)]
    run(pipeline, prompt, max_tokens=100)
    assert num_checkpoints(pipeline) == 2
    # All 117 computed tokens but those of the last partial block.
    assert run(pipeline, prompt + pipeline.generated[0]) == 116


@pytest.mark.parametrize("num_dropped", [0, 13])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_chat_reuses_its_earlier_turns(stages: int, num_dropped: int) -> None:
    """Also if the history leaves out the beginning of each answer, which is its reasoning."""
    pipeline = create_pipeline(stages=stages)
    history = [token % 50 for token in range(300)]
    num_reused = num_earlier = 0
    for turn in range(10):
        history += [turn] * 11
        num_cached = run(pipeline, history, max_tokens=21)
        if turn:
            num_reused += num_cached
            num_earlier += len(history) - 11
        history += pipeline.generated[max(pipeline.generated)][num_dropped:]
    assert num_reused >= 0.95 * num_earlier


def test_choices_start_from_the_state_of_the_prompt() -> None:
    pipeline = create_pipeline()
    run(pipeline, [token % 50 for token in range(43)], max_tokens=3, n=4)
    # The prompt once, and of each other choice its last three tokens.
    assert pipeline.scheduler.stats().prefill_tokens == 43 + 3 * 3


def test_a_preempted_sequence_continues_from_its_newest_state() -> None:
    """Two sequences that do not fit together: the one of worse rank gives way and returns."""
    pipeline = create_pipeline(num_blocks=200, expected_output_tokens=0)
    for seq in range(2):
        pipeline.add(SchedulerRequest(seq, [seq] * 300, 200))
    pipeline.drain()
    stats = pipeline.scheduler.stats()
    assert stats.preemptions
    assert stats.prefill_tokens < 600 + stats.preemptions * 300
    check_outputs(pipeline)


def test_a_state_goes_with_its_block() -> None:
    pipeline = create_pipeline(num_blocks=200)
    prompt = [1] * 41
    run(pipeline, prompt)
    assert run(pipeline, prompt) == 40
    run(pipeline, [2] * 780)
    # The last blocks of the prompt are evicted first.
    assert run(pipeline, prompt) < 40
    pipeline.scheduler.reset_prefix_cache()
    assert num_checkpoints(pipeline) == 0


def test_the_least_recently_used_state_goes_first() -> None:
    pipeline = create_pipeline(num_slots=4, max_num_seqs=1)
    for token in (1, 2, 1, 3, 1, 4):
        run(pipeline, [token] * 9)
    assert run(pipeline, [1] * 9) == 8
    assert run(pipeline, [2] * 9) == 0


def test_few_slots_limit_the_running_sequences() -> None:
    config = SchedulerConfig().resolve(1, 100, 100, num_state_slots=9)
    assert config.max_num_seqs == 4
    with pytest.raises(ValueError, match=r"state slots.*raise --kv-cache-memory"):
        SchedulerConfig().resolve(1, 100, 100, num_state_slots=1)


def test_without_recurrent_layers_plans_have_no_segments() -> None:
    pipeline = Pipeline(SchedulerConfig().resolve(1, 100, 100))
    pipeline.add(SchedulerRequest(0, [1, 2, 3], 1))
    plan = pipeline.schedule()
    assert plan is not None
    assert plan.state_segments == ()
    assert pipeline.scheduler.stats().state_slots == 0
