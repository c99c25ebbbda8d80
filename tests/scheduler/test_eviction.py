"""Orders of eviction of the prefix cache: safety of all, and what the learned one keeps."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.scheduler.block_pool import BlockListener, BlockPool, chain_hashes, root_hash
from gllm.scheduler.eviction import (
    EVICTION_NAMES,
    ReturnEviction,
    create_eviction,
)
from tests.support.examples import num_examples

BLOCK_SIZE = 2


class Cache(BlockListener):
    """A pool with conversations, which are computed in one step each."""

    def __init__(self, num_blocks: int, eviction: str) -> None:
        self.eviction = create_eviction(eviction)
        self.pool = BlockPool(num_blocks, eviction=self.eviction)
        self.pool.listeners.append(self)
        self.num_blocks = num_blocks
        self.tables: dict[int, list[int]] = {}
        """Block table of each running sequence."""
        self.cached: dict[bytes, int] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.has_unpublished = False
        """Chains may lack their middle."""
        self.num_seqs = 0
        self.now = 0.0

    def on_added(self, block: int, digest: bytes) -> None:
        self.cached[digest] = block

    def on_removed(self, block: int, digest: bytes) -> None:
        assert self.cached.pop(digest) == block
        assert all(block not in table for table in self.tables.values()), "it is used"
        if isinstance(self.eviction, ReturnEviction) and not self.has_unpublished:
            with_children = {self.parents[child] for child in self.cached}
            leaves = {
                other
                for other, cached in self.cached.items()
                if cached in self.eviction and other not in with_children
            }
            assert digest not in with_children or not leaves, "a chain loses its beginning first"

    def on_cleared(self) -> None:
        self.cached.clear()

    def hashes(self, token_ids: list[int]) -> list[bytes]:
        num_tokens = len(token_ids) // BLOCK_SIZE * BLOCK_SIZE
        return chain_hashes(root_hash(""), token_ids[:num_tokens], BLOCK_SIZE)

    def arrive(self, token_ids: list[int], session: str = "", client: str = "") -> int:
        """Let a request arrive; return its id."""
        seq, self.num_seqs = self.num_seqs, self.num_seqs + 1
        self.pool.now = self.now
        hashes = self.hashes(token_ids)
        cached = self.pool.find_cached_blocks(hashes)
        self.eviction.on_arrival(seq, client, session, hashes, cached, self.now)
        return seq

    def start(self, seq: int, token_ids: list[int]) -> int | None:
        """Compute all tokens; return the number of cached blocks, None if they do not fit."""
        self.pool.now = self.now
        hashes = self.hashes(token_ids)
        cached = self.pool.find_cached_blocks(hashes)
        num_missing = len(hashes) - len(cached)
        if num_missing > self.pool.num_free_blocks - self.pool.count_unreferenced(cached):
            return None
        self.pool.add_references(cached)
        self.tables[seq] = list(cached)
        self.tables[seq] += self.pool.allocate(num_missing)
        for index in range(len(cached), len(hashes)):
            parent = hashes[index - 1] if index else None
            self.parents[hashes[index]] = parent
            block = self.tables[seq][index]
            self.pool.publish(block, hashes[index], parent, index * BLOCK_SIZE)
        return len(cached)

    def end(self, seq: int, is_preempted: bool = False) -> None:
        self.pool.now = self.now
        self.pool.release(self.tables.pop(seq, []), seq)
        if not is_preempted:
            self.eviction.on_end(seq, self.now)

    def serve(self, token_ids: list[int], session: str = "") -> int:
        """Serve a request at once; return its cached blocks."""
        seq = self.arrive(token_ids, session)
        num_cached = self.start(seq, token_ids)
        assert num_cached is not None
        self.end(seq)
        return num_cached

    def check(self) -> None:
        referenced = {block for table in self.tables.values() for block in table}
        snapshot = self.pool.describe()
        assert set(snapshot.references) == referenced
        assert set(snapshot.evictable) == set(self.cached.values()) - referenced
        assert len(snapshot.evictable) == len(self.eviction)
        assert len(snapshot.evictable) + len(snapshot.free) == self.pool.num_free_blocks
        assert len(referenced) + self.pool.num_free_blocks == self.num_blocks


@settings(max_examples=num_examples(60, 1500), deadline=None)
@given(
    eviction=st.sampled_from(EVICTION_NAMES),
    num_blocks=st.integers(1, 24),
    seed=st.integers(0, 2**32),
)
def test_no_used_block_is_evicted_and_none_is_lost(
    eviction: str, num_blocks: int, seed: int
) -> None:
    rng = Random(seed)
    cache = Cache(num_blocks, eviction)
    waiting: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    for _ in range(150):
        cache.now += rng.choice([0.0, 0.1, 3.0, 40.0, 1e4])
        choice = rng.random()
        if choice < 0.35:
            # Prompts of few tokens share many prefixes.
            token_ids = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
            client = rng.choice(["", "key 1"])
            seq = cache.arrive(token_ids, rng.choice(["", "a", "b"]), client)
            waiting[seq] = prompts[seq] = token_ids
        elif choice < 0.65 and waiting:
            seq = rng.choice(list(waiting))
            if cache.start(seq, waiting[seq]) is not None:
                del waiting[seq]
        elif choice < 0.7 and waiting:
            seq = rng.choice(list(waiting))
            del waiting[seq]
            cache.end(seq)
        elif choice < 0.93 and cache.tables:
            seq = rng.choice(list(cache.tables))
            if rng.random() < 0.2:
                waiting[seq] = prompts[seq]
                cache.end(seq, is_preempted=True)
            else:
                cache.end(seq)
        elif choice < 0.95:
            cache.pool.reset_prefix_cache()
        elif cache.tables:
            seq = rng.choice(list(cache.tables))
            if not any(
                set(cache.tables[seq]) & set(table)
                for other, table in cache.tables.items()
                if other != seq
            ):
                table, cache.tables[seq] = cache.tables[seq], []
                cache.has_unpublished = True
                cache.pool.unpublish(table)
                cache.tables[seq] = table
        cache.check()
    for seq in [*cache.tables, *waiting]:
        cache.end(seq)
    cache.check()
    assert cache.pool.num_free_blocks == num_blocks
    # All blocks can be had, whatever was parked behind others.
    cache.pool.allocate(num_blocks)
    assert not cache.cached
    if isinstance(cache.eviction, ReturnEviction):
        order = cache.eviction
        for state in (order._visit_of, order._visits, order._waiting, order._idle, order._parked):
            assert not state
        assert not order._links
        assert not order._num_children


def context(agent: int, num_blocks: int) -> list[int]:
    return [1000 * agent + token for token in range(num_blocks * BLOCK_SIZE)]


def serve_agents(eviction: str, num_agents: int, pause: float, num_turns: int = 12) -> int:
    """Serve agents in turn, each after the same pause; return the blocks computed again."""
    cache = Cache(8 * num_agents // 2, eviction)
    recomputed = 0
    for turn in range(num_turns):
        for agent in range(num_agents):
            cache.now += pause / num_agents
            num_cached = cache.serve(context(agent, 8), f"agent {agent}")
            recomputed += (8 - num_cached) * (turn > num_turns // 2)
    return recomputed


def test_agents_in_turn_lose_all_with_lru_and_half_with_learned_times() -> None:
    """Half of the contexts fit. LRU evicts each one just before it returns."""
    assert serve_agents("lru", 8, 30.0) == 5 * 8 * 8
    assert serve_agents("return", 8, 30.0) <= 0.65 * 5 * 8 * 8


def test_without_observations_the_least_recently_used_conversation_goes_first() -> None:
    cache = Cache(12, "return")
    for agent in range(3):
        cache.now += 10.0
        cache.serve(context(agent, 4))
    cache.now += 10.0
    cache.pool.now = cache.now
    cache.pool.allocate(4)
    cached = [len(cache.pool.find_cached_blocks(cache.hashes(context(a, 4)))) for a in range(3)]
    assert cached == [0, 4, 4]


def test_what_a_waiting_request_needs_is_evicted_last() -> None:
    cache = Cache(12, "return")
    for agent in range(3):
        cache.serve(context(agent, 4))
        cache.now += 10.0
    seq = cache.arrive(context(0, 4))
    cache.pool.now = cache.now
    cache.pool.allocate(8)
    assert cache.start(seq, context(0, 4)) == 4


def test_of_equal_rates_the_conversation_idle_for_longest_goes_first() -> None:
    cache = Cache(6010, "return")
    long, short = context(0, 6000), context(1000, 10)
    cache.serve(short)
    cache.now += 0.01
    cache.serve(long)
    cache.pool.now = cache.now
    cache.pool.allocate(10)
    assert len(cache.pool.find_cached_blocks(cache.hashes(long))) == 6000


def serve_at_random(eviction: str, seed: int, num_turns: int = 200) -> list[int]:
    """Serve conversations that return without memory; return the cached blocks of each request."""
    rng, cache = Random(seed), Cache(24, eviction)
    returns = [(rng.expovariate(1 / 30), agent) for agent in range(10)]
    num_cached = []
    for _ in range(num_turns):
        cache.now, agent = min(returns)
        num_cached.append(cache.serve(context(agent, 4), f"agent {agent}"))
        returns.remove((cache.now, agent))
        returns.append((cache.now + rng.expovariate(1 / 30), agent))
    return num_cached


@settings(max_examples=num_examples(8, 200), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_pauses_without_memory_cost_no_more_than_with_lru(seed: int) -> None:
    """Nothing can be learned from them, so any departure from LRU would follow noise."""
    assert sum(serve_at_random("return", seed)) >= 0.95 * sum(serve_at_random("lru", seed))
