"""Ranks in shared memory: what each collective returns, and how a group ends."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gllm.kernels.all_reduce import GroupClosedError, GroupMismatchError, RankGroup
from gllm.kernels.native import library
from gllm.kernels.native.program import record_kernels
from gllm.transport.groups import StageGroups, open_groups
from gllm.transport.region import RegionLayout, create_region
from gllm.transport.region_memory import PARTS, CloseReason, GroupMemory
from gllm.transport.shared_region import (
    MAX_ERROR_BYTES,
    SharedMemoryGroup,
    open_region_memory,
)
from tests.support.models.kernel_builds import using_build
from tests.support.models.thread_group import run_ranks, thread_groups

RANKS = 3
LAYOUT = RegionLayout(max_tokens=40, hidden_size=64, vocab_rows=1_100_000)


def open_stage(size: int = RANKS, name: str = "test-region") -> list[StageGroups]:
    region = create_region(name)
    stages = [open_groups(region, rank, size, LAYOUT) for rank in range(size)]
    region.close()
    return stages


def open_memories() -> list[GroupMemory]:
    """Return each rank's view of the memory of a group of layers."""
    region = create_region("test-region")
    memories = [
        GroupMemory(open_region_memory(region.descriptors, rank, RANKS, LAYOUT), 0)
        for rank in range(RANKS)
    ]
    region.close()
    return memories


@contextmanager
def computing(way: str) -> Iterator[None]:
    """Compute with the selected build, or with torch alone."""
    if way == "torch":
        with using_build("torch"):
            yield
        return
    if library.load_library() is None:
        pytest.skip("no compiled kernels")
    yield


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with computing(request.param):
        yield request.param


@pytest.fixture
def stages(way: str) -> list[StageGroups]:
    return open_stage()


@pytest.fixture
def ranks(stages: list[StageGroups]) -> list[RankGroup]:
    return [stage.layers for stage in stages]


@pytest.fixture(params=["threads", "native", "torch"])
def every_kind(request: pytest.FixtureRequest) -> Iterator[list[RankGroup]]:
    """Groups in shared memory, and the test double."""
    if request.param == "threads":
        yield thread_groups(RANKS)
        return
    with computing(request.param):
        yield [stage.head for stage in open_stage()]


def gather(group: RankGroup, parts: list[Tensor]) -> Tensor | None:
    return group.gather(parts[group.rank], [part.shape[1] for part in parts])


def test_parts_of_logits_are_side_by_side_on_rank_0(every_kind: list[RankGroup]) -> None:
    sizes = [5, 2, 7]
    for rows in (0, 1, 9):
        parts = [torch.randn(rows, size) for size in sizes]
        results = run_ranks(every_kind, partial(gather, parts=parts))
        assert results[1:] == [None, None]
        assert results[0] is not None
        assert torch.equal(results[0], torch.cat(parts, dim=1))


def test_parts_larger_than_the_memory_are_gathered_in_chunks(stages: list[StageGroups]) -> None:
    """4 Mi floats hold three rows of the largest part."""
    sizes = [1_100_000, 10, 3]
    parts = [torch.randn(8, size) for size in sizes]
    results = run_ranks([stage.head for stage in stages], partial(gather, parts=parts))
    assert results[0] is not None
    assert torch.equal(results[0], torch.cat(parts, dim=1))


def test_the_first_error_of_any_rank(every_kind: list[RankGroup]) -> None:
    def meet(group: RankGroup) -> list[str]:
        errors = ["", "", "two"], ["", "öne", "two"], ["zero", "one", ""], ["", "", ""]
        return [group.agree_on_step(step, texts[group.rank]) for step, texts in enumerate(errors)]

    assert run_ranks(every_kind, meet) == [["two", "öne", "zero", ""]] * RANKS


def test_a_long_error_is_cut_off(ranks: list[RankGroup]) -> None:
    long = "x" * 100_000
    assert set(run_ranks(ranks, lambda group: group.agree_on_step(0, long))) == {
        "x" * MAX_ERROR_BYTES
    }


def test_ranks_at_different_steps_are_a_mismatch(every_kind: list[RankGroup]) -> None:
    with pytest.raises(GroupMismatchError):
        run_ranks(every_kind, lambda group: group.agree_on_step(group.rank // 2, ""))


def test_values_of_rank_0_reach_all(every_kind: list[RankGroup]) -> None:
    values = torch.tensor([1, -1, 2**40])

    def broadcast(group: RankGroup) -> list[Tensor]:
        mine = values if group.rank == 0 else None
        none = values[:0] if group.rank == 0 else None
        return [group.broadcast(mine, 3), group.broadcast(none, 0)]

    for received, nothing in run_ranks(every_kind, broadcast):
        assert torch.equal(received, values)
        assert nothing.shape == (0,)


Call = Callable[[RankGroup], object]


@pytest.mark.parametrize(
    "other",
    [
        lambda group: group.sum(torch.zeros(3, 8), None, torch.float32),
        lambda group: group.maximum(torch.zeros(4)),
        lambda group: group.agree_on_step(0, ""),
    ],
)
def test_ranks_that_call_different_collectives_are_a_mismatch(
    every_kind: list[RankGroup], other: Call
) -> None:
    def call(group: RankGroup) -> None:
        # Which rank is first must not matter.
        time.sleep(0.01 * ((group.rank + 1) % RANKS))
        if group.rank == 1:
            other(group)
        else:
            group.sum(torch.zeros(4, 8), None, torch.float32)

    with pytest.raises(GroupMismatchError):
        run_ranks(every_kind, call)


def end_of(call: Call, group: RankGroup) -> tuple[threading.Thread, list[BaseException]]:
    """Call on a thread; return it and the list of its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call(group)
        except GroupClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("seconds", [0.0, 0.05])
@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.sum(torch.zeros(1, 8), None, torch.float32),
        lambda group: group.maximum(torch.zeros(4)),
        lambda group: group.agree_on_step(0, ""),
        lambda group: group.broadcast(torch.zeros(4, dtype=torch.int64), 4),
        lambda group: group.gather(torch.zeros(1, 8), [8] * RANKS),
    ],
)
def test_a_cancelled_group_ends_every_wait(
    stages: list[StageGroups], call: Call, seconds: float
) -> None:
    """Ranks that wait for one that is gone end, in both groups, and later calls do too."""
    waits = [end_of(call, group) for stage in stages[:2] for group in stage[:1]]
    waits.append(end_of(call, stages[0].head))
    time.sleep(seconds)
    stages[1].layers.cancel()
    for thread, errors in waits:
        thread.join(10)
        assert len(errors) == 1
    for stage in stages:
        for group in stage:
            with pytest.raises(GroupClosedError):
                call(group)


def test_ranks_tell_that_they_wait(ranks: list[RankGroup]) -> None:
    threads = [threading.Thread(target=group.agree_on_step, args=(0, "")) for group in ranks]
    for number, thread in enumerate(threads):
        assert not ranks[number].is_waiting
        thread.start()
        is_last = number == RANKS - 1
        while not (is_last or ranks[number].is_waiting):
            time.sleep(0.001)
    for thread in threads:
        thread.join(10)
    assert not any(group.is_waiting for group in ranks)
    ranks[0].close()
    assert not ranks[0].is_waiting


def test_a_rank_that_dies_while_it_cancels(way: str) -> None:
    """It has closed the groups, but woken nobody."""
    memories = open_memories()
    thread, errors = end_of(
        lambda group: group.agree_on_step(0, ""), SharedMemoryGroup(memories[0])
    )
    time.sleep(0.05)
    memories[1].region.close(CloseReason.CANCELLED)
    thread.join(10)
    assert len(errors) == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_sleeping_ranks_wake_up(ranks: list[RankGroup], is_late: bool) -> None:
    """A rank sleeps after 20 us, whether or not others do."""
    parts = [torch.full((2, 8), float(rank)) for rank in range(RANKS)]

    def sum_twice(group: RankGroup) -> list[Tensor]:
        sums = []
        for turn in range(2):
            if (group.rank == turn) is is_late:
                time.sleep(0.1)
            sums.append(group.sum(parts[group.rank], None, torch.float32))
        return sums

    assert all(
        result.unique().tolist() == [3.0]
        for results in run_ranks(ranks, sum_twice)
        for result in results
    )


def test_one_rank_alone_waits_for_nobody(way: str) -> None:
    group = open_stage(1)[0].layers
    assert torch.equal(group.sum(torch.ones(2, 3), None, torch.float32), torch.ones(2, 3))
    assert group.agree_on_step(5, "error") == "error"


def test_too_many_ranks_are_refused() -> None:
    region = create_region("test-region")
    with pytest.raises(ValueError, match="at most 64"):
        open_groups(region, 0, 65, LAYOUT)
    region.close()


def test_sequence_numbers_may_overflow(way: str) -> None:
    memories = open_memories()
    for memory in memories:
        memory.state.sequence = 2**32 - 3
        memory.lines[memory.region.rank].sequence = 2**32 - 3
    parts = torch.randn(6, RANKS, 2, 8)
    ranks = [SharedMemoryGroup(memory) for memory in memories]
    results = run_ranks(
        ranks,
        lambda group: [group.sum(part[group.rank], None, torch.float32) for part in parts],
    )
    for sums in results:
        for part, total in zip(parts, sums, strict=True):
            assert torch.equal(part[0] + part[1] + part[2], total)


def mapped(name: str) -> int:
    """How often a region is mapped."""
    return Path("/proc/self/maps").read_text().count(f"memfd:{name} (")


def test_closed_groups_map_nothing(way: str) -> None:
    name = f"test-closed-{way}"
    stage = open_stage(1, name=name)[0]
    total = stage.layers.sum(torch.ones(2, 3), None, torch.float32)
    part = stage.layers.partial(2, 3)
    assert mapped(name) == 1
    stage.layers.close()
    stage.head.close()
    del part
    assert mapped(name) == 0
    stage.layers.cancel()
    assert torch.equal(total, torch.ones(2, 3))


def test_recorded_calls_keep_the_memory() -> None:
    kernels = library.load_library()
    if kernels is None:
        pytest.skip("no compiled kernels")
    name = "test-recorded"
    stage, part = open_stage(1, name=name)[0], torch.ones(2, 3)
    with record_kernels(kernels, 2, torch.empty(1024, dtype=torch.uint8)) as recorder:
        stage.layers.sum(part, None, torch.float32)
    calls = recorder.calls
    stage.layers.close()
    stage.head.close()
    del stage, recorder
    # Of the oldest objects collections take seconds.
    gc.collect(1)
    assert mapped(name) == 1
    calls.clear()
    gc.collect(1)
    if mapped(name):
        gc.collect()
    assert mapped(name) == 0


def test_untouched_places_take_no_memory(way: str) -> None:
    region = create_region("test-lazy")
    layout = RegionLayout(max_tokens=8192, hidden_size=8192, vocab_rows=100_000)
    groups = open_groups(region, 0, 1, layout)
    groups.layers.sum(torch.ones(2, 8192), None, torch.float32)
    used = Path(f"/proc/self/fd/{region.descriptors[0]}").stat().st_blocks * 512
    region.close()
    assert used < 2**20


def test_eager_collectives_alternate_between_places(way: str) -> None:
    """With one place a rank would overwrite a part that another one still reads."""
    memories = open_memories()
    ranks = [SharedMemoryGroup(memory) for memory in memories]

    def places(group: RankGroup) -> list[int]:
        pointers = []
        memory = memories[group.rank]
        begins = [memory.places[group.rank][place].data_ptr() for place in PARTS]
        for _ in range(6):
            part = group.partial(2, 8)
            assert part is not None
            pointers.append(begins.index(part.data_ptr()))
            group.maximum(torch.zeros(2))
            group.sum(part, None, torch.float32)
        return pointers

    for used in run_ranks(ranks, places):
        assert all(one != other for one, other in pairwise(used))
        # Where a program begins.
        assert PARTS[0] not in used
