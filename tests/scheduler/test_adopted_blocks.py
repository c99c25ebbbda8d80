"""A scheduler that begins with the KV blocks of the one before: none is ever wrong."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.scheduler.block_pool import BlockListener, chain_hash, chain_hashes, root_hash
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepOutput, StepPlan
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_properties import configs
from tests.scheduler.test_resume import Epochs, drive
from tests.scheduler.test_speculation import speculating
from tests.scheduler.test_traps import prompt
from tests.support.examples import further_runs, num_examples
from tests.support.scheduler.pipeline import Pipeline, generate

GARBAGE = -1
"""Content of slots that nobody may read."""


class HashStore(BlockListener):
    """Copy of the prefix cache's hashes, which outlives the scheduler."""

    def __init__(self) -> None:
        self.digests: dict[int, bytes] = {}
        self.tails: dict[int, bytes] = {}
        """Hash of the first slots of other blocks."""
        self.usable: dict[int, int] = {}
        """Slots of adopted ones that can be used, which may be fewer than the hash covers."""

    def on_added(self, block: int, digest: bytes) -> None:
        assert block not in self.digests, "a block has one hash until it is removed"
        self.digests[block] = digest
        self.tails.pop(block, None)
        self.usable.pop(block, None)

    def on_tail(self, block: int, digest: bytes) -> None:
        assert block not in self.digests, "a full block has the hash of all of its slots"
        self.tails[block] = digest
        self.usable.pop(block, None)

    def on_tail_removed(self, block: int) -> None:
        del self.tails[block]
        self.usable.pop(block, None)

    def on_removed(self, block: int, digest: bytes) -> None:
        del self.digests[block]

    def on_cleared(self) -> None:
        self.digests.clear()
        self.tails.clear()
        self.usable.clear()


class LaggingPipeline(Pipeline):
    """A pipeline whose stages compute a step at any time between its plan and its commit."""

    def __init__(self, config: SchedulerConfig, forces: bool, rng: Random, **drafters: Any) -> None:
        super().__init__(config, forces, **drafters)
        self.hashes = HashStore()
        self.scheduler.kv_cache.block_pool.listeners.append(self.hashes)
        self.scheduler.kv_cache.names_tails = True
        self.earlier_tails: dict[bytes, int] = {}
        """Slots that hashes of earlier pipelines name."""
        self._rng = rng
        self._queued: list[deque[tuple[StepPlan, Any]]] = [deque() for _ in self.stages]
        """By stage, plans that it has not computed."""

    def _run(self, plan: StepPlan, fails: bool, faulty: Iterable[int]) -> None:
        self._begin(plan, fails)
        for stage, queue in zip(self.stages, self._queued, strict=True):
            queue.append((plan, stage.prepare(plan)))
        before = 0
        for index, queue in enumerate(self._queued):
            # A stage is never ahead of the one before.
            self._advance(index, self._rng.randint(0, len(queue) - before))
            before = len(queue)

    def _advance(self, stage: int, num_plans: int) -> None:
        for _ in range(num_plans):
            plan, tables = self._queued[stage].popleft()
            self._compute(stage, plan, tables, ())

    def _pop_plan(self) -> StepPlan:
        plan = super()._pop_plan()
        for stage, queue in enumerate(self._queued):
            while queue and queue[0][0].step <= plan.step:
                self._advance(stage, 1)
        return plan

    def commit(self, errors: dict[int, str] | None = None) -> StepOutput:
        output = super().commit(errors)
        if self._rng.random() < 0.2:
            self.check_hashes()
        return output

    def check_hashes(self) -> None:
        """Check that every stage has computed all tokens of each block that a death would keep."""
        size = self.config.block_size
        contents: dict[bytes, list[int]] = {}
        for seq, text in self.texts.items():
            num_full = len(text.tokens) // size * size
            root = root_hash(self.requests[seq].cache_salt)
            for index, digest in enumerate(chain_hashes(root, text.tokens[:num_full], size)):
                contents[digest] = text.digests[index * size : (index + 1) * size]
        contents |= self.read_tails()
        usable = self.hashes.usable
        for block, digest in (*self.hashes.digests.items(), *self.hashes.tails.items()):
            if digest not in contents:
                # It was computed by an earlier pipeline.
                assert block in self.hashes.digests or digest in self.earlier_tails
                continue
            begin, content = block * size, contents[digest][: usable.get(block, size)]
            for stage in self.stages:
                held = [stage.cache[slot] for slot in range(begin, begin + len(content))]
                assert held == content

    def read_tails(self) -> dict[bytes, list[int]]:
        """Return the content of the first slots of a block, by the hash of each number of them."""
        size = self.config.block_size
        contents: dict[bytes, list[int]] = {}
        for seq, text in self.texts.items():
            parent = root_hash(self.requests[seq].cache_salt)
            for begin in range(0, len(text.tokens), size):
                tokens = text.tokens[begin : begin + size]
                for count in range(1, min(size, len(tokens) + 1)):
                    digest = chain_hash(parent, tokens[:count])
                    contents[digest] = text.digests[begin : begin + count]
                parent = chain_hash(parent, tokens)
        return contents

    def follow(self, old: "LaggingPipeline", num_damaged: int) -> None:
        """Begin with the caches of a pipeline that has ended, without some damaged blocks."""
        kept = dict(old.hashes.digests)
        for block in self._rng.sample(sorted(kept), min(num_damaged, len(kept))):
            del kept[block]
        numbers = {digest: len(content) for digest, content in old.read_tails().items()}
        self.earlier_tails = old.earlier_tails | numbers
        tails: dict[int, tuple[bytes, int]] = {}
        for block, digest in old.hashes.tails.items():
            number = old.hashes.usable.get(block, self.earlier_tails[digest])
            if num_damaged and self._rng.random() < 0.3:
                number = self._rng.randrange(number)
            if number and digest not in {known for known, _ in tails.values()}:
                tails[block] = digest, number
        size = self.config.block_size
        usable = dict.fromkeys(kept, size) | {block: number for block, (_, number) in tails.items()}
        for stage, before in zip(self.stages, old.stages, strict=True):
            stage.cache = {
                slot: value if slot % size < usable.get(slot // size, 0) else GARBAGE
                for slot, value in before.cache.items()
            }
        self.scheduler.adopt_blocks(kept, tails)
        assert self.hashes.digests == kept
        assert self.hashes.tails == {block: digest for block, (digest, _) in tails.items()}
        self.hashes.usable = {block: number for block, (_, number) in tails.items()}


@st.composite
def settings_of_engines(draw: st.DrawFn) -> tuple[SchedulerConfig, dict[str, Any]]:
    """Any configuration without recurrent layers, and what guesses tokens, if anything does."""
    if draw(st.booleans()):
        return speculating(draw, "1")
    return draw(configs(has_states=False)), {}


@further_runs(2)
@settings(
    max_examples=num_examples(12, 300),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(setting=settings_of_engines(), forces=st.booleans(), seed=st.integers(0, 2**32))
def test_kept_blocks_have_the_tokens_of_their_hashes(
    run: int, setting: tuple[SchedulerConfig, dict[str, Any]], forces: bool, seed: int
) -> None:
    """Deaths at random moments, under preemption, aborts, forks, chunks and guesses.

    The pipeline checks the context of every row on every stage.
    """
    rng = Random(seed)
    config, drafters = replace(setting[0], prefix_cache=True), setting[1]
    pipeline = LaggingPipeline(config, forces, rng, **drafters)
    life = Epochs(pipeline)
    drive(life, rng, rng.randint(1, 150))
    for _ in range(3):
        successor = LaggingPipeline(config, forces, rng, **drafters)
        successor.follow(pipeline, num_damaged=rng.choice([0, 0, 3]))
        life.cut(successor)
        pipeline = successor
        drive(life, rng, rng.randint(1, 80))
    pipeline.drain()
    for request, output, reason in life.results():
        alone = generate(request, forces)
        assert output == (alone[: len(output)] if reason == "abort" else alone)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_only_the_last_token_and_steps_in_flight_are_computed_again(num_stages: int) -> None:
    config = SchedulerConfig(block_size=4).resolve(num_stages, 400, 200)
    old = LaggingPipeline(config, False, Random(1))
    requests = [SchedulerRequest(seq, prompt(20 + seq, mark=seq), 60) for seq in range(9)]
    life = Epochs(old)
    for request in requests:
        old.add(request)
        life.requests.append((request, request.seq))
    life._next_seq = len(requests)
    while min(map(len, old.generated.values())) < 20:
        while old.schedule() is not None:
            pass
        old.commit()
    new = LaggingPipeline(config, False, Random(2))
    new.follow(old, num_damaged=0)
    life.cut(new)
    new.drain()
    stats = new.scheduler.stats()
    # The client has all tokens that were committed, and the last one has not been computed.
    assert stats.resumed_computed_tokens == len(requests)
    total = sum(20 + seq + len(old.generated[seq]) for seq in range(9))
    assert stats.resumed_cached_tokens + stats.resumed_computed_tokens == total
    assert [output for _, output, _ in life.results()] == [generate(r) for r in requests]


def test_blocks_of_resumed_sequences_are_evicted_last() -> None:
    config = SchedulerConfig(block_size=4).resolve(1, 60, 200)
    scheduler = Scheduler(config)
    tokens = prompt(41)
    hashes = scheduler.table.add(SchedulerRequest(0, tokens, 5), 0.0).get_block_hashes(10, 4)
    others = {block: bytes([block]) * 16 for block in range(10, 60)}
    own = dict(zip(range(10), hashes, strict=True))
    scheduler = Scheduler(config)
    scheduler.adopt_blocks(own | others)
    scheduler.add(SchedulerRequest(0, tokens, 5), 0.0)
    pool = scheduler.kv_cache.block_pool
    assert pool.describe().evictable == [*range(10, 60), *range(9, -1, -1)]


def test_watchers_get_the_tokens_of_kept_blocks_once_a_request_has_them() -> None:
    """Those that a prompt is found in, and those whose tokens are computed again."""
    config = SchedulerConfig(block_size=4).resolve(1, 60, 200)
    tokens = prompt(9)
    request = SchedulerRequest(0, tokens, 12)
    text = tokens + generate(request)
    hashes = chain_hashes(root_hash(""), text[:20], 4)
    pipeline = Pipeline(config)
    # The third block is missing, so the fourth is not found, but computed again.
    kept = {block: hashes[block] for block in (0, 1, 3)}
    pipeline.scheduler.adopt_blocks(kept | {7: b"a" * 16})
    cache = pipeline.scheduler.kv_cache
    cache.watch(with_token_ids=True)
    cache.pop_events()
    sequence = pipeline.scheduler.table.add(request, 0.0)
    assert cache.admit(sequence)
    first = cache.pop_events()
    assert first is not None
    (stored,) = first.stored
    assert (stored.digests, stored.token_ids) == (hashes[:2], tuple(text[:8]))
    sequence.token_ids.extend(text[9:18])
    sequence.num_tokens = 18
    cache.allocate(sequence, 10)
    sequence.num_computed_tokens = 18
    cache.publish(sequence)
    second = cache.pop_events()
    assert second is not None
    (stored,) = second.stored
    assert (stored.digests, stored.token_ids) == (hashes[2:4], tuple(text[8:16]))


@pytest.mark.parametrize(
    ("digests", "message"),
    [
        ({60: b"a" * 16}, "not one of"),
        ({-1: b"a" * 16}, "not one of"),
        ({1: b"a" * 16, 2: b"a" * 16}, "same hash"),
        ({7: b"a" * 16}, "listed twice"),
    ],
)
def test_impossible_blocks_are_refused(digests: dict[int, bytes], message: str) -> None:
    scheduler = Scheduler(SchedulerConfig().resolve(1, 60, 200))
    with pytest.raises(ValueError, match=message):
        scheduler.adopt_blocks(digests, {7: (b"b" * 16, 3)})


def test_a_tail_is_used_by_one_sequence_and_as_far_as_it_is_intact() -> None:
    config = SchedulerConfig(block_size=4).resolve(1, 60, 200)
    tokens = prompt(11)
    hashes = chain_hashes(root_hash(""), tokens[:8], 4)
    tail = chain_hash(hashes[1], tokens[8:10])
    for num_slots, expected in ((1, 8), (2, 10), (4, 10)):
        cache = Scheduler(config).kv_cache
        cache.adopt({5: hashes[0], 6: hashes[1]}, {9: (tail, num_slots), 12: (b"other" * 3, 1)})
        assert cache.block_pool.num_free_blocks == 60
        scheduled = []
        table = Scheduler(config).table
        for seq in range(2):
            sequence = table.add(SchedulerRequest(seq, tokens, 5), 0.0)
            assert cache.admit(sequence)
            scheduled.append(sequence.num_computed_tokens)
        assert scheduled == [expected, 8]
        assert cache.block_pool.num_free_blocks == 60 - 2 - (expected > 8)
        # Those that nobody needs are allocated like any others.
        assert len(cache.block_pool.allocate(cache.block_pool.num_free_blocks)) > 50
        assert cache.block_pool.num_free_blocks == 0


def test_a_cache_in_use_adopts_nothing() -> None:
    pipeline = Pipeline(SchedulerConfig().resolve(1, 60, 200))
    pipeline.add(SchedulerRequest(0, prompt(40), 5))
    pipeline.schedule()
    with pytest.raises(ValueError, match="in use"):
        pipeline.scheduler.adopt_blocks({1: b"a" * 16})
    without_cache = Scheduler(SchedulerConfig(prefix_cache=False).resolve(1, 60, 200))
    with pytest.raises(ValueError, match="prefix caches"):
        without_cache.adopt_blocks({1: b"a" * 16})
