"""Every wait of the compiled ranks is necessary: without one of them a test of sums fails."""

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gllm.kernels.all_reduce import GroupClosedError, GroupMismatchError
from gllm.kernels.native import library
from gllm.kernels.native.builds import select_build
from gllm.kernels.native.library import (
    BarrierArguments,
    CancelArguments,
    KernelLibrary,
    ReduceArguments,
)
from gllm.kernels.native.program import record_kernels
from gllm.transport.region import Region, RegionLayout, create_region
from gllm.transport.region_memory import PARTS, Collective, GroupMemory, make_tag
from gllm.transport.shared_region import SharedMemoryGroup, open_region_memory
from tests.support.models.kernel_builds import using_build

SOURCE = Path(library.__file__).with_name("all_reduce.cpp")
POOL = SOURCE.with_name("pool.cpp")
COMPILER = shutil.which("g++") or shutil.which("c++")
ROWS, WIDTH = 128, 16
LAYOUT = RegionLayout(max_tokens=ROWS, hidden_size=WIDTH, vocab_rows=0)
NUM_SUMS = 10
SLOW_SECONDS = 0.002
"""Time that the slow rank lets pass before it writes its part, and before it reads the other."""
NOTICE_SECONDS = 0.8
"""Time after which a rank hangs: less than the longest sleep of one for which no bell rings."""
REMOVED = {
    "nothing": ("", ""),
    "the wait for the other ranks' parts": (
        "    wait(group);\n    if (!have_arrived(group)) return false;\n",
        "",
    ),
    "the wait for readers of a place": (
        "return group.used[place] != group.sequence || barrier(group, place, ACQUIRE);",
        "return true;",
    ),
    "the wait before a copy": ("if (!acquire(group, a.place)) return;", ""),
    "the bell of a rank that arrives": (
        "if (rank != group.rank && group.lines[rank].is_sleeping.load()) ring(group.lines[rank]);",
        ";",
    ),
    "the bell of a rank that cancels": (
        "for (int rank = 0; rank < group.size; ++rank) ring(group.lines[rank]);\n}\n\nbool have",
        "}\n\nbool have",
    ),
    "the look at the reason to close": (
        "have_arrived(group) || group.closed->load() != OPEN",
        "have_arrived(group)",
    ),
}
"""Waits and wake-ups to the text of all_reduce.cpp that is replaced to remove them."""


class _ChangedLibrary(KernelLibrary):
    """A build of the kernels whose collectives are those of another source."""

    def __init__(self, base: Path, path: Path) -> None:
        super().__init__(base)
        changed = ctypes.CDLL(str(path))
        names: dict[str, Any] = {
            "gllm_reduce": ReduceArguments,
            "gllm_barrier": BarrierArguments,
            "gllm_cancel": CancelArguments,
        }
        self.changed = {}
        for name, arguments in names.items():
            function = changed[name]
            function.argtypes, function.restype = [ctypes.POINTER(arguments)], None
            self.changed[arguments] = function

    def function(self, arguments: ctypes.Structure) -> Any:
        return self.changed.get(type(arguments)) or super().function(arguments)


@pytest.fixture
def removed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Use collectives without a wait of REMOVED; yield its name."""
    base = select_build().path
    if COMPILER is None or base is None:
        pytest.skip("no compiler or no compiled kernels")
    name: str = request.param
    before, after = REMOVED[name]
    source = SOURCE.read_text()
    assert before in source
    changed, target = tmp_path / "changed.cpp", tmp_path / "changed.so"
    changed.write_text(source.replace(before, after, 1) if before else source)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-psabi", f"-I{SOURCE.parent}"]
    subprocess.run([COMPILER, *flags, changed, POOL, "-o", target], check=True)
    with library.using_library(_ChangedLibrary(base, target)):
        yield name


class Rank:
    """A rank's end of a group, and its memory."""

    def __init__(self, region: Region, number: int) -> None:
        self.memory = GroupMemory(open_region_memory(region.descriptors, number, 2, LAYOUT), 0)
        self.group = SharedMemoryGroup(self.memory)
        self.number = number

    def part_of(self, rank: int, place: int) -> Tensor:
        """Return the part of a rank in a place, [ROWS, WIDTH] float32."""
        memory = self.memory.places[rank][place][: 4 * ROWS * WIDTH]
        return memory.view(torch.float32).view(ROWS, WIDTH)

    def finish_sum(self, place: int) -> None:
        """Wait until both parts of a sum are in their place."""
        tag, kernels = make_tag(Collective.SUM, place, ROWS, WIDTH), library.current_library()
        if kernels is None:
            self.memory.wait_at_barrier(place, tag)
            return
        kernels(BarrierArguments(self.memory.pointer, tag, place, False))
        self.group.check()


class Ranks:
    """Two ranks as threads, which end within `timeout` seconds unless a wake-up is missing."""

    def __init__(self, timeout: float) -> None:
        region = create_region("test-waits")
        self.ranks = [Rank(region, number) for number in range(2)]
        region.close()
        self.timeout = timeout

    def run(self, function: Callable[[Rank], bool]) -> bool:
        """Return whether a function ends in time and is true on both ranks."""
        results: list[bool] = []

        def run_one(rank: Rank) -> None:
            try:
                results.append(function(rank))
            except (GroupClosedError, GroupMismatchError):
                results.append(False)
            if not results[-1]:
                rank.group.cancel()

        threads = [
            threading.Thread(target=copy_context().run, args=(run_one, rank)) for rank in self.ranks
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + self.timeout
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        in_time = not any(thread.is_alive() for thread in threads)
        self._release(threads)
        return in_time and all(results)

    def _release(self, threads: list[threading.Thread]) -> None:
        """End threads that hang."""
        while any(thread.is_alive() for thread in threads):
            for rank in self.ranks:
                memory = rank.memory
                for line in memory.lines:
                    line.sequence = memory.state.sequence
                rank.group.cancel()
            time.sleep(0.01)


def sum_slowly(rank: Rank, next_place: Callable[[], int]) -> bool:
    """Take part in sums as rank 1: write late, read late; return whether rank 0's parts are right.

    next_place: returns the place of the next sum.
    """
    for number in range(NUM_SUMS):
        place = next_place()
        time.sleep(SLOW_SECONDS)
        rank.part_of(1, place).fill_(number + 1)
        rank.finish_sum(place)
        time.sleep(SLOW_SECONDS)
        if not bool((rank.part_of(0, place) == number).all()):
            return False
    return True


def acquire_first_place(rank: Rank) -> int:
    """Wait as a recorded program does before it writes to its first place; return the place."""
    kernels = library.current_library()
    assert kernels is not None
    kernels(BarrierArguments(rank.memory.pointer, 0, PARTS[0], True))
    return PARTS[0]


def next_eager_place(rank: Rank) -> int:
    """Return the place of the next eager sum: not that of the last, the first one if need be."""
    last = rank.memory.last_used(PARTS)
    return next(place for place in reversed(PARTS) if place != last)


def sum_recorded(rank: Rank, is_copied: bool) -> bool:
    """Run a recorded program of one sum, whose place is always the same.

    is_copied: the sum itself writes the part to its place.
    """
    if rank.number:
        return sum_slowly(rank, partial(acquire_first_place, rank))
    group, memory = rank.group, torch.empty(4 * ROWS * WIDTH, dtype=torch.uint8)
    kernels = library.current_library()
    assert kernels is not None
    elsewhere = torch.empty(ROWS, WIDTH)
    with record_kernels(kernels, ROWS, memory) as recorder:
        part = elsewhere if is_copied else group.partial(ROWS, WIDTH)
        assert part is not None
        result = group.sum(part, None, torch.float32)
    for number in range(NUM_SUMS):
        for call in recorder.calls[:-1]:
            kernels(call)
        part.fill_(number)
        kernels(recorder.calls[-1])
        if not bool((result == 2 * number + 1).all()):
            return False
    return True


def sum_in_place(rank: Rank) -> bool:
    """Return whether recorded sums of parts in the group's memory are right."""
    return sum_recorded(rank, is_copied=False)


def sum_copies(rank: Rank) -> bool:
    """Return whether recorded sums of parts elsewhere are right."""
    return sum_recorded(rank, is_copied=True)


def sum_eagerly(rank: Rank) -> bool:
    """Return whether eager sums are right."""
    if rank.number:
        return sum_slowly(rank, partial(next_eager_place, rank))
    for number in range(NUM_SUMS):
        part = rank.group.partial(ROWS, WIDTH)
        assert part is not None
        part.fill_(number)
        if not bool((rank.group.sum(part, None, torch.float32) == 2 * number + 1).all()):
            return False
    return True


def sum_late(rank: Rank) -> bool:
    """Sum where one rank sleeps until the other one arrives."""
    time.sleep(0.05 * rank.number)
    return bool(rank.group.sum(torch.ones(1, 4), None, torch.float32)[0, 0] == 2)


def cancel(rank: Rank) -> bool:
    """Return whether a wait ends by the other rank's cancellation."""
    kernels = library.current_library()
    assert kernels is not None
    if rank.number:
        time.sleep(0.05)
        kernels(CancelArguments(rank.memory.pointer))
        return True
    with pytest.raises(GroupClosedError):
        rank.group.sum(torch.ones(1, 4), None, torch.float32)
    return True


CHECKS = (sum_in_place, sum_copies, sum_eagerly, sum_late, cancel)


@pytest.mark.skipif(library.load_library() is None, reason="no compiled kernels")
def test_with_every_wait_sums_are_right() -> None:
    assert [check.__name__ for check in CHECKS if not Ranks(60).run(check)] == []


@pytest.mark.full
@pytest.mark.parametrize("removed", ["nothing"], indirect=True)
def test_the_source_compiled_alone_has_every_wait(removed: str) -> None:
    assert [check.__name__ for check in CHECKS if not Ranks(60).run(check)] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("removed", "check"),
    [
        ("the wait for the other ranks' parts", sum_eagerly),
        ("the wait for readers of a place", sum_in_place),
        ("the wait before a copy", sum_copies),
        ("the bell of a rank that arrives", sum_late),
        ("the bell of a rank that cancels", cancel),
        ("the look at the reason to close", cancel),
    ],
    indirect=["removed"],
)
def test_a_removed_wait_is_noticed(removed: str, check: Callable[[Rank], bool]) -> None:
    assert not Ranks(NOTICE_SECONDS).run(check)


def test_sums_of_slow_ranks_without_compiled_kernels_are_right() -> None:
    with using_build("torch"):
        assert Ranks(60).run(sum_eagerly)
