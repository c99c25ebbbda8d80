"""Which KV blocks a recovery keeps."""

from hypothesis import given
from hypothesis import strategies as st

from gllm.recovery.actions import AssignEpoch
from gllm.recovery.kept_blocks import (
    contains_block,
    has_same_places,
    intersect_slots,
)
from gllm.recovery.placement import RankWorker, make_placement
from gllm.scheduler.intact_slots import NO_SLOTS, IntactSlots
from tests.recovery.test_recovery import actions_of, ready_world, sender_of
from tests.support.recovery.world import World

NUM_BLOCKS = 40


def encode(blocks: set[int]) -> bytes:
    """A set of blocks as bytes."""
    return sum(1 << block for block in blocks).to_bytes(NUM_BLOCKS // 8, "little")


COUNTS = st.dictionaries(st.integers(0, NUM_BLOCKS - 1), st.integers(1, 4))
"""Number of intact slots by block, of 4."""


def slots_of(counts: dict[int, int]) -> IntactSlots:
    """A worker's intact slots."""
    full = {block for block, count in counts.items() if count == 4}
    begun = {block: count for block, count in counts.items() if count < 4}
    return IntactSlots(encode(full), begun)


@given(st.lists(COUNTS, min_size=1, max_size=4))
def test_slots_are_those_of_all_workers(workers: list[dict[int, int]]) -> None:
    common = intersect_slots(map(slots_of, workers))
    expected = {
        block: min(counts.get(block, 0) for counts in workers) for block in range(NUM_BLOCKS)
    }
    for block in range(2 * NUM_BLOCKS):
        count = expected.get(block, 0)
        assert contains_block(common.full, block) == (count == 4)
        assert common.begun.get(block, 0) == count % 4
    assert (common == NO_SLOTS) == (not any(expected.values()))


def test_a_worker_without_blocks_leaves_none() -> None:
    assert intersect_slots([slots_of({1: 4, 2: 3}), NO_SLOTS]) == NO_SLOTS
    assert intersect_slots([]) == NO_SLOTS


def test_places_are_the_same_with_other_processes_only() -> None:
    layers, workers = [(0, 3), (3, 6)], [RankWorker(1), RankWorker(2, "b")]
    before = make_placement(1, layers, workers)
    assert has_same_places(before, make_placement(2, layers, [RankWorker(1), RankWorker(9, "b")]))
    assert not has_same_places(before, make_placement(2, [(0, 2), (2, 6)], workers))
    assert not has_same_places(before, make_placement(2, layers, [RankWorker(1), RankWorker(2)]))
    assert not has_same_places(before, make_placement(2, [(0, 6)], workers[:1]))
    ranks = [RankWorker(1), RankWorker(2, "b"), RankWorker(3, "b")]
    assert not has_same_places(before, make_placement(2, layers, ranks, [1, 2]))


def kept(world: World) -> list[bool]:
    """For each epoch, True if it could keep the KV cache."""
    return [action.keeps_kv_cache for action in actions_of(world, AssignEpoch)]


def test_a_death_while_blocks_are_adopted_begins_anew() -> None:
    world = ready_world(2)
    world.exit(sender_of(world, 1))
    while kept(world) != [True]:
        assert world.act_fairly()
    world.exit(sender_of(world, 0))
    world.settle()
    assert world.is_attached
    assert kept(world) == [True, False]
    world.commit()
    world.exit(sender_of(world, 0))
    world.settle()
    assert kept(world) == [True, False, True]


def test_a_second_death_of_a_worker_without_a_step_between_begins_anew() -> None:
    """The blocks may be the cause."""
    world = ready_world(2)
    world.exit(sender_of(world, 1))
    world.settle()
    world.exit(sender_of(world, 1))
    world.settle()
    assert kept(world) == [True, False]
