"""Index of the disk tier: which blocks are evicted, and that no chain loses its middle."""

from hypothesis import given
from hypothesis import strategies as st

from gllm.scheduler.block_pool import chain_hashes, root_hash
from gllm.scheduler.disk_index import DiskBlock, DiskPrefixIndex

ROOT = b"root"


def make_chain(name: str, length: int, index: DiskPrefixIndex) -> list[bytes]:
    """Add a chain of blocks to an index; return their keys."""
    keys = [f"{name}{number}".encode() for number in range(length)]
    for number, key in enumerate(keys):
        position = 16 * number
        parent = keys[number - 1] if number else ROOT
        index.add(DiskBlock(key, parent, position, index.priority_of(position)))
    return keys


def test_of_equal_age_the_deepest_block_stays_longest() -> None:
    """It costs most to compute: its tokens attend to all before."""
    index = DiskPrefixIndex()
    index.attention_share = 0.01
    long, short = make_chain("a", 8, index), make_chain("b", 3, index)
    assert index.evict(3) == list(reversed(short))
    assert index.evict(2) == [long[-1], long[-2]]


def test_blocks_that_are_not_used_are_evicted_in_the_end_however_deep_they_are() -> None:
    index = DiskPrefixIndex()
    index.attention_share = 0.01
    deep = make_chain("deep", 50, index)
    for turn in range(200):
        make_chain(f"other{turn}-", 5, index)
        index.evict(5)
    assert sum(key in index for key in deep) < 25


def test_a_use_protects() -> None:
    index = DiskPrefixIndex()
    old, new = make_chain("a", 3, index), make_chain("b", 3, index)
    index.evict(0)
    for _ in range(2):
        make_chain("c", 1, index)
        assert index.evict(1)
    index.touch(old)
    assert (
        index.evict(3, protected=[old[-1]]) == [*reversed(new)] or index.count_prefix(old, 0) == 3
    )


def test_protected_blocks_stay() -> None:
    index = DiskPrefixIndex()
    keys = make_chain("a", 3, index)
    assert index.evict(3, protected=[keys[1]]) == [keys[2]]
    assert index.evict(3) == [keys[1], keys[0]]
    assert index.evict(3) == []


def test_a_prefix_ends_at_a_missing_block() -> None:
    """A hit of a part is a hit of that part alone."""
    index = DiskPrefixIndex()
    keys = make_chain("a", 6, index)
    index.remove(keys[3])
    assert [index.count_prefix(keys, start) for start in (0, 2, 3, 4, 6)] == [3, 1, 0, 2, 0]
    assert index.count_prefix([*keys[:2], b"other", keys[3]], 0) == 2


@given(st.lists(st.integers(0, 2**40), min_size=12, max_size=12), st.integers(0, 11))
def test_keys_are_keyed_digests_of_all_tokens_up_to_the_end_of_a_block(
    tokens: list[int], place: int
) -> None:
    """A shorter key, or one that can be computed, would let one prompt pass for another."""

    def keys_of(token_ids: list[int], salt: str = "", secret: bytes = b"s" * 32) -> list[bytes]:
        return chain_hashes(root_hash(salt, secret), token_ids, 4, secret)

    keys = keys_of(tokens)
    assert [len(key) for key in keys] == [16] * 3
    changed = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    pairs = zip(keys, keys_of(changed), strict=True)
    assert [before == after for before, after in pairs] == [
        index < place // 4 for index in range(3)
    ]
    for others in (keys_of(tokens, salt="other"), keys_of(tokens, secret=b"t" * 32)):
        assert set(keys).isdisjoint(others)


@st.composite
def _operations(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    kinds = st.sampled_from(["chain", "touch", "evict", "remove", "rebuild"])
    numbers = st.integers(0, 5), st.integers(1, 6)
    return draw(st.lists(st.tuples(kinds, *numbers), max_size=40))


@given(_operations())
def test_only_blocks_without_followers_are_evicted_cheapest_first(
    operations: list[tuple[str, int, int]],
) -> None:
    index, blocks = DiskPrefixIndex(), dict[bytes, DiskBlock]()

    def is_leaf(key: bytes) -> bool:
        return all(block.parent != key for block in blocks.values())

    for kind, number, count in operations:
        keys = [f"{number}-{depth}".encode() for depth in range(6)]
        match kind:
            case "chain":
                for depth, key in enumerate(keys[:count]):
                    if key not in index:
                        parent = keys[depth - 1] if depth else ROOT
                        priority = index.priority_of(16 * depth)
                        blocks[key] = DiskBlock(key, parent, 16 * depth, priority)
                        index.add(blocks[key])
            case "touch":
                index.touch(keys[:count])
                for key in keys[:count]:
                    if key in blocks:
                        priority = index.priority_of(blocks[key].position)
                        blocks[key] = blocks[key]._replace(priority=priority)
            case "evict":
                for key in index.evict(count):
                    assert is_leaf(key)
                    leaves = [block.priority for each, block in blocks.items() if is_leaf(each)]
                    assert blocks.pop(key).priority == min(leaves)
            case "remove":
                index.remove(keys[0])
                blocks.pop(keys[0], None)
            case "rebuild":
                index = DiskPrefixIndex(list(blocks.values()))
        assert set(index.keys) == set(blocks)
    assert len(index.evict(len(blocks) + 1)) == len(blocks)
