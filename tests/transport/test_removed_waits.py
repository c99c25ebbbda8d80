"""Every wait of the compiled ranks is necessary: without one of them a test of sums fails."""

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gllm.kernels.all_reduce import GroupClosedError, GroupMismatchError, RankGroup
from gllm.kernels.native import library
from gllm.kernels.native.group_structures import (
    BarrierArguments,
    CancelArguments,
    ReduceArguments,
)
from gllm.kernels.native.library import KernelLibrary
from gllm.kernels.native.program import record_kernels
from gllm.transport.region import RegionLayout
from gllm.transport.region_memory import PARTS, Collective, GroupMemory
from gllm.transport.shared_region import SharedMemoryGroup
from tests.kernels.test_all_reduce import open_ranks

SOURCE = Path(library.__file__).with_name("all_reduce.cpp")
COMPILER = shutil.which("g++") or shutil.which("c++")
ROWS, WIDTH = 128, 16
LAYOUT = RegionLayout(max_tokens=ROWS, hidden_size=WIDTH, vocab_rows=0)
NUM_SUMS = 10
SLOW_SECONDS = 0.002
"""Time that the slow rank lets pass before it writes its part, and before it reads the other."""
NOTICE_SECONDS = 0.8
"""Time after which a rank hangs: less than the longest sleep of one for which no bell rings."""
REAL_LIBRARY = library.load_library()
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

    def __init__(self, base: KernelLibrary, path: Path) -> None:
        self._functions = dict(base._functions)
        self._run = base._run
        changed = ctypes.CDLL(str(path))
        names: dict[str, Any] = {
            "gllm_reduce": ReduceArguments,
            "gllm_barrier": BarrierArguments,
            "gllm_cancel": CancelArguments,
        }
        for name, arguments in names.items():
            function = changed[name]
            function.argtypes, function.restype = [ctypes.POINTER(arguments)], None
            self._functions[arguments] = function


@pytest.fixture
def removed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use collectives without a wait of REMOVED; return its name."""
    base = library.load_library()
    if COMPILER is None or base is None:
        pytest.skip("no compiler or no compiled kernels")
    name: str = request.param
    before, after = REMOVED[name]
    source = SOURCE.read_text()
    assert before in source
    changed, target = tmp_path / "changed.cpp", tmp_path / "changed.so"
    changed.write_text(source.replace(before, after, 1) if before else source)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-psabi", f"-I{SOURCE.parent}"]
    subprocess.run([COMPILER, *flags, changed, "-o", target], check=True)
    opened = _ChangedLibrary(base, target)
    monkeypatch.setattr(library, "load_library", lambda: opened)
    return name


class Ranks:
    """Two ranks as threads, which end within `timeout` seconds unless a wake-up is missing."""

    def __init__(self, timeout: float) -> None:
        self.groups = open_ranks(2, LAYOUT)
        self.timeout = timeout

    def run(self, function: Callable[[RankGroup], bool]) -> bool:
        """Return whether a function ends in time and is true on both ranks."""
        results: list[bool] = []

        def run_one(group: RankGroup) -> None:
            try:
                results.append(function(group))
            except (GroupClosedError, GroupMismatchError):
                results.append(False)
            if not results[-1]:
                group.cancel()

        threads = [threading.Thread(target=run_one, args=(group,)) for group in self.groups]
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
            for group in self.groups:
                memory = memory_of(group)
                for line in memory.lines:
                    line.sequence = memory.state.sequence
                if REAL_LIBRARY is not None:
                    REAL_LIBRARY(CancelArguments(memory.pointer))
            time.sleep(0.01)


def memory_of(group: RankGroup) -> GroupMemory:
    assert isinstance(group, SharedMemoryGroup)
    return group._memory


def sum_slowly(group: RankGroup, next_place: Callable[[], int]) -> bool:
    """Take part in sums as rank 1: write late, read late; return whether rank 0's parts are right.

    next_place: returns the place of the next sum.
    """
    assert isinstance(group, SharedMemoryGroup)
    for number in range(NUM_SUMS):
        place = next_place()
        time.sleep(SLOW_SECONDS)
        group._part(1, place, ROWS, WIDTH).fill_(number + 1)
        group._barrier(Collective.SUM, place, ROWS, WIDTH)
        time.sleep(SLOW_SECONDS)
        if not bool((group._part(0, place, ROWS, WIDTH) == number).all()):
            return False
    return True


def acquire_first_place(group: RankGroup) -> int:
    """Wait as a recorded program does before it writes to its first place; return the place."""
    kernels = library.load_library()
    assert kernels is not None
    kernels(BarrierArguments(memory_of(group).pointer, 0, PARTS[0], True))
    return PARTS[0]


def sum_recorded(group: RankGroup, is_copied: bool) -> bool:
    """Run a recorded program of one sum, whose place is always the same.

    is_copied: the sum itself writes the part to its place.
    """
    if group.rank:
        return sum_slowly(group, partial(acquire_first_place, group))
    memory = torch.empty(4 * ROWS * WIDTH, dtype=torch.uint8)
    kernels = library.load_library()
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


def sum_in_place(group: RankGroup) -> bool:
    """Return whether recorded sums of parts in the group's memory are right."""
    return sum_recorded(group, is_copied=False)


def sum_copies(group: RankGroup) -> bool:
    """Return whether recorded sums of parts elsewhere are right."""
    return sum_recorded(group, is_copied=True)


def sum_eagerly(group: RankGroup) -> bool:
    """Return whether eager sums are right."""
    if group.rank:
        assert isinstance(group, SharedMemoryGroup)
        return sum_slowly(group, partial(group._next_place, PARTS))
    for number in range(NUM_SUMS):
        part = group.partial(ROWS, WIDTH)
        assert part is not None
        part.fill_(number)
        if not bool((group.sum(part, None, torch.float32) == 2 * number + 1).all()):
            return False
    return True


def sum_late(group: RankGroup) -> bool:
    """Sum where one rank sleeps until the other one arrives."""
    time.sleep(0.05 * group.rank)
    return bool(group.sum(torch.ones(1, 4), None, torch.float32)[0, 0] == 2)


def cancel(group: RankGroup) -> bool:
    """Return whether a wait ends by the other rank's `cancel`."""
    if group.rank:
        time.sleep(0.05)
        group.cancel()
        return True
    with pytest.raises(GroupClosedError):
        group.sum(torch.ones(1, 4), None, torch.float32)
    return True


CHECKS = (sum_in_place, sum_copies, sum_eagerly, sum_late, cancel)


@pytest.mark.parametrize("removed", ["nothing"], indirect=True)
def test_with_every_wait_sums_are_right(removed: str) -> None:
    assert [check.__name__ for check in CHECKS if not Ranks(60).run(check)] == []


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
def test_a_removed_wait_is_noticed(removed: str, check: Callable[[RankGroup], bool]) -> None:
    assert not Ranks(NOTICE_SECONDS).run(check)


def test_without_alternating_places_sums_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedMemoryGroup, "_next_place", lambda group, places: places[0])
    assert not Ranks(5).run(sum_eagerly)


@pytest.mark.parametrize("is_removed", [False, True])
def test_without_polling_sums_are_wrong(is_removed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load_library", lambda: None)
    if is_removed:
        monkeypatch.setattr(GroupMemory, "_poll", lambda memory: None)
    assert Ranks(60).run(sum_eagerly) is not is_removed
