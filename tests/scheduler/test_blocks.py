"""The block pool by itself: reference counts, LRU order, hash chains."""

from hypothesis import given
from hypothesis import strategies as st

from gllm.scheduler.block_pool import BlockPool, chain_hash, root_hash


def chain(tokens: list[int], size: int = 2) -> list[bytes]:
    digests, parent = [], root_hash("")
    for begin in range(0, len(tokens) - size + 1, size):
        parent = chain_hash(parent, tokens[begin : begin + size])
        digests.append(parent)
    return digests


def test_published_blocks_outlive_their_holder_and_are_found_by_prefix() -> None:
    pool = BlockPool(4)
    digests = chain([1, 2, 3, 4, 5, 6])
    table = pool.allocate(3)
    for block, digest in zip(table, digests, strict=True):
        pool.publish(block, digest)
    pool.release(table)
    assert pool.num_free_blocks == 4
    assert pool.find_cached_blocks(digests) == table
    assert pool.find_cached_blocks(chain([1, 2, 3, 4, 9, 9])) == table[:2]
    assert pool.find_cached_blocks(chain([9, 9, 3, 4])) == []


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    digests = chain([1, 2, 3, 4, 5, 6])
    table = pool.allocate(3)
    for block, digest in zip(table, digests, strict=True):
        pool.publish(block, digest)
    pool.release(table)
    pool.allocate(1)
    assert pool.find_cached_blocks(digests) == table[:2]


def test_the_least_recently_released_chain_is_evicted_first() -> None:
    pool = BlockPool(2)
    one, two = chain([1, 2]), chain([3, 4])
    first, second = pool.allocate(1), pool.allocate(1)
    pool.publish(first[0], one[0])
    pool.publish(second[0], two[0])
    pool.release(first)
    pool.release(second)
    pool.add_references(pool.find_cached_blocks(one))
    pool.release(first)
    pool.allocate(1)
    assert pool.find_cached_blocks(one) == first
    assert pool.find_cached_blocks(two) == []


def test_what_is_forgotten_is_free_or_stays_with_its_holder() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(1)
    digests = chain([1, 2, 3, 4, 5, 6])
    for block, digest in zip([*first, *second], digests, strict=True):
        pool.publish(block, digest)
    pool.release(first)
    pool.reset_prefix_cache()
    assert pool.find_cached_blocks(digests) == []
    assert pool.num_free_blocks == 3
    # A held block may be offered anew, and is free once let go.
    pool.publish(second[0], digests[0])
    assert pool.find_cached_blocks(digests[:1]) == second
    pool.release(second)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_a_shared_block_is_not_given_away() -> None:
    pool = BlockPool(2)
    digest = chain([1, 2])
    table = pool.allocate(1)
    pool.publish(table[0], digest[0])
    pool.add_references(table)
    assert pool.count_exclusive(table) == 0
    pool.release(table)
    assert (pool.num_free_blocks, pool.count_unreferenced(table), pool.count_exclusive(table)) == (
        1,
        0,
        1,
    )
    pool.release(table)
    assert (pool.num_free_blocks, pool.count_unreferenced(table)) == (2, 1)


def test_a_twin_stays_private_and_is_free_at_once() -> None:
    pool = BlockPool(2)
    digest = chain([1, 2])
    first, second = pool.allocate(1), pool.allocate(1)
    pool.publish(first[0], digest[0])
    pool.publish(second[0], digest[0])
    pool.release(second)
    assert pool.count_unreferenced(second) == 0
    assert pool.find_cached_blocks(digest) == first


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=2), st.text(max_size=5))
def test_hashes_depend_on_tokens_parent_and_salt(tokens: list[int], salt: str) -> None:
    digest = chain_hash(root_hash(salt), tokens)
    assert len(digest) == 16
    assert digest != chain_hash(root_hash(salt + "x"), tokens)
    assert digest != chain_hash(digest, tokens)
    assert digest != chain_hash(root_hash(salt), [tokens[0], tokens[1] + 1])
