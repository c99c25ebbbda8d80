"""The prefix index against a model that keeps a set of blocks per engine."""

from random import Random

import pytest

from gllm.routing.prefix_index import PrefixIndex, PromptBlockHashes
from gllm.scheduler.block_pool import chain_hash, root_hash
from tests.support.work import count_calls, held_bytes

NUM_MESSAGES = 2_000
EVENTS_PER_MESSAGE = 20


def longest_prefixes(model: dict[str, set[bytes]], hashes: list[bytes]) -> dict[str, int]:
    lengths = {}
    for name, blocks in model.items():
        length = 0
        while length < len(hashes) and hashes[length] in blocks:
            length += 1
        if length:
            lengths[name] = length
    return lengths


def test_index_equals_a_set_per_engine_over_1e5_events() -> None:
    rng = Random(0)
    engines = [f"engine-{number}" for number in range(9)]
    universe = [bytes([*divmod(number, 256)]) for number in range(600)]
    index = PrefixIndex()
    model: dict[str, set[bytes]] = {}
    numbers: dict[str, int] = {}
    num_events = 0
    for _ in range(NUM_MESSAGES):
        name = rng.choice(engines)
        if rng.random() < 0.005:
            index.forget(name)
            model.pop(name, None)
        is_cleared = name not in model or rng.random() < 0.002
        blocks = set() if is_cleared else model[name]
        touched = rng.sample(universe, EVENTS_PER_MESSAGE)
        removed = [each for each in touched if each in blocks and rng.random() < 0.7]
        stored = [each for each in touched if each not in blocks]
        number = 7 if is_cleared else numbers[name]
        assert index.on_events(name, number, stored, removed, is_cleared)
        numbers[name] = number + 1
        model[name] = (blocks - set(removed)) | set(stored)
        num_events += len(stored) + len(removed)
        chain = rng.sample(universe, 4)
        # Chains that engines share for a while, and chains that nobody has.
        chain = sorted(blocks)[: rng.randrange(12)] + chain
        assert index.cached_blocks(chain) == longest_prefixes(model, chain)
    assert num_events > 0.8 * NUM_MESSAGES * EVENTS_PER_MESSAGE
    assert index.num_blocks == {name: len(blocks) for name, blocks in model.items()}
    for name in engines:
        index.forget(name)
    assert not index.num_blocks
    assert not any(index.cached_blocks([block]) for block in universe)


def test_gap_empties_an_engine_until_its_next_snapshot() -> None:
    index = PrefixIndex()
    assert not index.on_events("a", 0, [b"x"], []), "no snapshot yet"
    assert index.on_events("a", 3, [b"x"], [], is_cleared=True)
    assert index.on_events("b", 0, [b"x"], [], is_cleared=True)
    assert not index.on_events("a", 5, [b"y"], [])
    assert index.cached_blocks([b"x"]) == {"b": 1}
    assert not index.on_events("a", 6, [b"x"], [])
    assert index.on_events("a", 0, [b"x", b"y"], [], is_cleared=True)
    assert index.cached_blocks([b"x", b"y"]) == {"a": 2, "b": 1}


def test_many_engines_come_and_go() -> None:
    index = PrefixIndex()
    sizes = []
    for number in range(300):
        index.on_events(f"old-{number}", 0, [b"x"], [], is_cleared=True)
        index.forget(f"old-{number}")
        index.on_events("a", 0, [b"x"], [], is_cleared=True)
        assert index.cached_blocks([b"x"]) == {"a": 1}
        sizes.append(held_bytes(index))
    assert max(sizes[50:]) <= max(sizes[:50]), "nothing is kept of engines that have gone"


def test_removal_of_an_unknown_block_changes_nothing() -> None:
    index = PrefixIndex()
    index.on_events("a", 0, [b"x"], [], is_cleared=True)
    index.on_events("b", 0, [], [], is_cleared=True)
    assert index.on_events("b", 1, [], [b"x", b"z"])
    assert index.cached_blocks([b"x"]) == {"a": 1}


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_prompt_hashes_are_those_of_the_scheduler(salt: str) -> None:
    tokens = list(range(50))
    expected = [chain_hash(root_hash(salt), tokens[:16])]
    expected.append(chain_hash(expected[0], tokens[16:32]))
    expected.append(chain_hash(expected[1], tokens[32:48]))
    hashes = PromptBlockHashes(tokens, 16, salt)
    assert len(hashes) == 3
    assert hashes[-1] == expected[2]
    assert list(hashes) == hashes[:] == expected
    with pytest.raises(IndexError):
        hashes[3]


def test_prompt_is_hashed_only_as_far_as_some_engine_has_cached_it() -> None:
    hashes = PromptBlockHashes(range(16_000), 16)
    index = PrefixIndex()
    index.on_events("a", 0, list(PromptBlockHashes(range(160), 16)), [], is_cleared=True)
    assert count_calls(lambda: index.cached_blocks(hashes), {"blocks": chain_hash}) == {
        "blocks": 11
    }
    assert index.cached_blocks(hashes) == {"a": 10}
