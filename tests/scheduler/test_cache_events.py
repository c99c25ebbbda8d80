"""Events of the prefix cache: an index that follows them equals the pool."""

from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.scheduler.block_pool import BlockPool, chain_hash, root_hash
from gllm.scheduler.cache_events import CacheEventLog, CacheEvents, StoredBlocks
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_properties import pipelines, random_request
from tests.support.examples import further_runs, num_examples
from tests.support.scheduler.pipeline import Pipeline


class Index:
    """Hashes in a cache, by its events alone; checks that the events are exact."""

    def __init__(self, block_size: int, with_token_ids: bool) -> None:
        self.digests: set[bytes] = set()
        self._block_size = block_size
        self._with_token_ids = with_token_ids
        self._num_events = 0

    def apply(self, events: CacheEvents | None) -> None:
        if events is None:
            return
        assert events.is_cleared or self._num_events, "the first one is a snapshot"
        self._num_events += 1
        stored = [digest for blocks in events.stored for digest in blocks.digests]
        assert len(set(stored)) == len(stored)
        assert not set(stored) & set(events.removed)
        if events.is_cleared:
            assert not events.removed
            self.digests.clear()
        assert self.digests.issuperset(events.removed)
        self.digests.difference_update(events.removed)
        assert self.digests.isdisjoint(stored)
        self.digests.update(stored)
        for blocks in events.stored:
            self._check_tokens(blocks)

    def _check_tokens(self, blocks: StoredBlocks) -> None:
        """The hashes are those of the tokens."""
        if not self._with_token_ids or not blocks.parent:
            assert not blocks.token_ids
            return
        digests, size = [blocks.parent], self._block_size
        for begin in range(0, len(blocks.token_ids), size):
            digests.append(chain_hash(digests[-1], blocks.token_ids[begin : begin + size]))
        assert digests[1:] == blocks.digests


def step(pipeline: Pipeline, rng: Random, seq: int) -> int:
    """One random event of a pipeline; return the next sequence id."""
    if rng.random() < 0.2 and len(pipeline.alive) < 20:
        request = random_request(rng, seq, pipeline.config.max_model_len)
        pipeline.add(request)
        seq += request.n
    if rng.random() < 0.02 and pipeline.alive:
        pipeline.abort([rng.choice(sorted(pipeline.alive))])
    if rng.random() < 0.02:
        pipeline.scheduler.reset_prefix_cache()
    if pipeline.plans and rng.random() < 0.5:
        pipeline.commit()
    else:
        faulty = rng.sample(sorted(pipeline.alive), min(len(pipeline.alive), rng.random() < 0.03))
        pipeline.schedule(faulty=faulty)
    return seq


@further_runs(1)
@settings(
    max_examples=num_examples(7, 100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(pipeline=pipelines(), seed=st.integers(0, 2**32), with_token_ids=st.booleans())
def test_an_index_that_follows_the_events_equals_the_pool(
    run: int, pipeline: Pipeline, seed: int, with_token_ids: bool
) -> None:
    rng, seq = Random(seed), 0
    cache = pipeline.scheduler.kv_cache
    for _ in range(rng.randrange(60)):
        seq = step(pipeline, rng, seq)
    assert cache.pop_events() is None
    cache.watch(with_token_ids)
    index = Index(pipeline.config.block_size, with_token_ids)
    for _ in range(200):
        seq = step(pipeline, rng, seq)
        if rng.random() < 0.3:
            index.apply(cache.pop_events())
            assert index.digests == set(cache.block_pool.digests)
            assert cache.pop_events() is None
    cache.unwatch()
    pipeline.drain()
    assert cache.pop_events() is None


def test_the_first_report_has_the_state_and_the_next_ones_its_changes() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    for block, digest in zip(table, (b"a", b"b"), strict=True):
        assert pool.publish(block, digest)
    log = CacheEventLog(False, pool.digests)
    pool.listeners.append(log)
    assert log.pop_events() == CacheEvents([StoredBlocks(b"", [b"a", b"b"])], [], True)
    assert log.pop_events() is None
    pool.unpublish(table[:1])
    assert log.pop_events() == CacheEvents([], [b"a"], False)
    pool.reset_prefix_cache()
    assert log.pop_events() == CacheEvents([], [], True)


def test_what_comes_back_before_a_report_has_not_changed() -> None:
    log = CacheEventLog(False, [b"a"])
    log.pop_events()
    log.on_removed(0, b"a")
    log.on_stored(b"a", b"p", (), "")
    assert log.pop_events() is None
    log.on_stored(b"b", b"a", (), "")
    log.on_removed(0, b"b")
    assert log.pop_events() is None
    log.on_stored(b"b", b"a", (), "")
    log.on_removed(0, b"a")
    log.on_cleared()
    log.on_stored(b"c", b"p", (), "")
    assert log.pop_events() == CacheEvents([StoredBlocks(b"p", [b"c"])], [], True)


def test_consecutive_blocks_of_a_chain_are_one_entry() -> None:
    log = CacheEventLog(True, [])
    log.pop_events()
    log.on_stored(b"a", b"r", (1, 2), "s")
    log.on_stored(b"b", b"a", (3, 4), "s")
    log.on_stored(b"x", b"a", (5, 6), "s")
    log.on_stored(b"y", b"q", (7, 8), "")
    log.on_stored(b"z", b"y", (9, 10), "")
    assert log.pop_events() == CacheEvents(
        [
            StoredBlocks(b"r", [b"a", b"b"], (1, 2, 3, 4), "s"),
            StoredBlocks(b"a", [b"x"], (5, 6), "s"),
            StoredBlocks(b"q", [b"y", b"z"], (7, 8, 9, 10), ""),
        ],
        [],
        False,
    )


def test_first_blocks_have_the_root_of_their_salt_as_parent() -> None:
    config = SchedulerConfig(block_size=2).resolve(1, 64, 32)
    pipeline = Pipeline(config)
    cache = pipeline.scheduler.kv_cache
    cache.watch(True)
    for seq, salt in enumerate(("", "salt")):
        pipeline.add(SchedulerRequest(seq, [1, 2, 3, 4, 5], 1, cache_salt=salt))
    pipeline.drain()
    events = cache.pop_events()
    assert events is not None
    assert [(each.parent, each.token_ids, each.cache_salt) for each in events.stored] == [
        (root_hash(salt), (1, 2, 3, 4), salt) for salt in ("", "salt")
    ]


def test_a_chain_is_reported_without_the_blocks_that_were_there() -> None:
    config = SchedulerConfig(block_size=2).resolve(1, 64, 32)
    pipeline = Pipeline(config)
    cache = pipeline.scheduler.kv_cache
    pipeline.add(SchedulerRequest(0, [1, 2, 3], 1))
    pipeline.drain()
    cache.watch(True)
    events = cache.pop_events()
    assert events is not None
    (snapshot,) = events.stored
    pipeline.add(SchedulerRequest(1, [1, 2, 3, 4, 5], 1))
    pipeline.drain()
    events = cache.pop_events()
    assert events is not None
    (added,) = events.stored
    assert (added.parent, added.token_ids) == (snapshot.digests[0], (3, 4))


def test_statistics_have_the_tokens_that_wait_and_those_of_decodes() -> None:
    config = SchedulerConfig(block_size=2, max_num_batched_tokens=4, policy="sarathi")
    pipeline = Pipeline(config.resolve(1, 64, 32))
    pipeline.add(SchedulerRequest(0, [1, 2, 3, 4, 5, 6], 4))
    pipeline.add(SchedulerRequest(1, [1, 2, 3], 4))
    assert pipeline.scheduler.stats().waiting_tokens == 9
    pipeline.schedule()
    assert pipeline.scheduler.stats().waiting_tokens == 5
    while not (stats := pipeline.scheduler.stats()).decode_context_tokens:
        if pipeline.schedule() is None:
            pipeline.commit()
    running = pipeline.scheduler.kv_cache.running
    decoding = pipeline.scheduler.describe().decoding_seqs
    assert stats.decode_context_tokens == sum(running[s].num_scheduled_tokens for s in decoding)
    pipeline.drain()
    stats = pipeline.scheduler.stats()
    assert (stats.waiting_tokens, stats.decode_context_tokens) == (0, 0)


def test_blocks_of_dropped_tokens_are_not_published() -> None:
    """An aborted sequence drops a token whose position the next row in flight computes."""
    for block_size in (1, 2):
        config = SchedulerConfig(block_size=block_size, async_scheduling=True, policy="sarathi")
        scheduler = Scheduler(config.resolve(1, 16, 16))
        scheduler.kv_cache.watch(with_token_ids=True)
        scheduler.add(SchedulerRequest(0, [1, 2, 3], 8), 0.0)
        plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
        scheduler.abort([0])
        for plan in plans:
            assert plan is not None
            scheduler.commit(StepResult(plan.step, [SampledToken(0, 0, 9)]))
        events = scheduler.kv_cache.pop_events()
        assert events is not None
        token_ids = [token for blocks in events.stored for token in blocks.token_ids]
        assert token_ids == [1, 2, 3][: 3 // block_size * block_size]
