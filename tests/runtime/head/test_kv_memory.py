"""KV blocks of engines whose workers share the memory of several machines."""

import pytest

from gllm.messages.lifecycle import StageLoaded
from gllm.recovery.placement import Placement, RankWorker, make_placement
from gllm.runtime.head.layer_planner import count_placement_blocks, limit_blocks
from gllm.runtime.worker import device

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
    assert limit_blocks(placement, loaded) == float("inf")
