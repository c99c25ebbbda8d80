"""KV blocks of engines whose workers share the memory of several machines."""

import msgspec
import pytest

from gllm.messages.lifecycle import StageLoaded
from gllm.recovery.placement import Placement, RankWorker, make_placement
from gllm.runtime.head.layer_planner import list_free_memories, list_placement_memories
from gllm.runtime.worker import device
from gllm.scheduler.kv_memory import (
    MAX_UNSTORED_BLOCKS,
    KvDivision,
    KvMemory,
    divide_kv_memory,
)

Report = tuple[int, int | None, int | None]
"""Bytes of a block, of own memory and of the machine's memory."""


def workers(*reports: tuple[str, Report]) -> tuple[Placement, dict[int, StageLoaded]]:
    slots = [RankWorker(sender, node) for sender, (node, _) in enumerate(reports, 1)]
    layers = [(stage, stage + 1) for stage in range(len(reports))]
    loaded = {
        sender: StageLoaded(sender - 1, 100, block, own, host_available_bytes=host)
        for sender, (_, (block, own, host)) in enumerate(reports, 1)
    }
    return make_placement(1, layers, slots), loaded


def divide(memories: list[KvMemory], max_blocks: int = 10**9) -> KvDivision:
    """Blocks and state slots for sequences of 10 blocks, four at once."""
    return divide_kv_memory(memories, 10, max_blocks, 4)


def count_placement_blocks(
    requested_bytes: int | None, placement: Placement, loaded: dict[int, StageLoaded]
) -> int:
    return divide(list_placement_memories(requested_bytes, placement, loaded)).num_blocks


def limit_blocks(placement: Placement, loaded: dict[int, StageLoaded]) -> int:
    return divide(list_free_memories(placement, loaded)).num_blocks


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has 40,000 bytes left."""
    monkeypatch.setattr(device, "available_memory_bytes", lambda: 40_000)


def test_one_machine_is_measured_once_all_weights_are_loaded() -> None:
    # What its workers have measured is older.
    placement, loaded = workers(("local", (4, None, 10)), ("local", (6, None, 10)))
    assert count_placement_blocks(None, placement, loaded) == 1000
    assert count_placement_blocks(500, placement, loaded) == 50


def test_the_machine_with_the_least_memory_decides() -> None:
    placement, loaded = workers(
        ("local", (10, None, 99)),
        ("b", (4, None, 9000)),
        ("b", (6, None, 8000)),
        ("c", (1, None, 900)),
    )
    # A quarter of 40,000 for 10 bytes, of 8,000 for 10 bytes, of 900 for 1 byte.
    assert count_placement_blocks(None, placement, loaded) == 200
    # Requested bytes are those of all workers, as on one machine.
    assert count_placement_blocks(21_000, placement, loaded) == 1000


def test_workers_with_memory_of_their_own() -> None:
    placement, loaded = workers(("local", (10, 5000, None)), ("b", (10, 3000, None)))
    assert count_placement_blocks(None, placement, loaded) == 300
    assert limit_blocks(placement, loaded) == 300
    placement, loaded = workers(("local", (10, 5000, None)), ("b", (10, None, 8000)))
    assert count_placement_blocks(None, placement, loaded) == 200


def test_all_memory_is_the_limit_of_layers_that_have_moved() -> None:
    placement, loaded = workers(("local", (10, None, 7000)), ("b", (5, None, 3000)))
    assert limit_blocks(placement, loaded) == 600
    placement, loaded = workers(("local", (10, None, None)), ("b", (5, None, None)))
    assert limit_blocks(placement, loaded) == 10**9


def test_states_get_up_to_half_of_the_memory() -> None:
    # 16 slots are two for each of four sequences and as many checkpoints.
    assert divide([KvMemory(10_000, 10, 100)]) == (840, 16)
    assert divide([KvMemory(2000, 10, 100)]) == (100, 10)
    # Each memory has the same numbers: the scarcest decides.
    assert divide([KvMemory(2000, 10, 100), KvMemory(600, 5, 50)]) == (60, 6)
    # A part without attention or without recurrent layers.
    assert divide([KvMemory(2000, 0, 100), KvMemory(600, 5)], max_blocks=1000) == (120, 10)
    assert divide([KvMemory(2000, 0, 100)], max_blocks=7) == (7, 10)
    # A model without attention: blocks take no memory of the stages, but the scheduler's.
    assert divide([KvMemory(2000, 0, 100)] * 2) == (MAX_UNSTORED_BLOCKS, 10)
    assert divide_kv_memory([KvMemory(2000, 0, 100)], 10**6, 10**9, 4).num_blocks == 10**6


def test_one_sequence_of_full_length_comes_before_states() -> None:
    assert divide([KvMemory(320, 10, 100)]) == (12, 2)
    assert divide([KvMemory(420, 10, 150)]) == (12, 2)
    # Two slots are always there; resolving the scheduler's configuration fails with too few blocks.
    assert divide([KvMemory(250, 10, 100)]) == (5, 2)
    assert divide([KvMemory(150, 10, 100)]) == (0, 2)


def test_requested_bytes_are_for_blocks_and_states_of_all_workers() -> None:
    placement, loaded = workers(("local", (4, None, 10)), ("local", (6, None, 10)))
    loaded[2] = msgspec.structs.replace(loaded[2], state_bytes=100)
    assert divide(list_placement_memories(1000, placement, loaded)) == (50, 5)
    assert divide(list_free_memories(placement, loaded)) == (0, 2)
