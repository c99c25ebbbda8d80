"""Every wait of the compiled ranks is necessary: without one of them a test of sums fails."""

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gllm.kernels.all_reduce import GroupClosedError, RankGroup
from gllm.kernels.native import library
from gllm.kernels.native.group_structures import (
    BarrierArguments,
    CancelArguments,
    ReduceArguments,
)
from gllm.kernels.native.library import KernelLibrary
from gllm.kernels.native.program import record_kernels
from gllm.transport.region import RegionLayout
from gllm.transport.region_memory import GroupMemory
from gllm.transport.shared_region import SharedMemoryGroup
from tests.kernels.test_all_reduce import open_ranks

SOURCE = Path(library.__file__).with_name("all_reduce.cpp")
COMPILER = shutil.which("g++") or shutil.which("c++")
ROWS, WIDTH = 128, 2048
"""Parts of 1 MiB: adding them takes long enough for another rank to write meanwhile."""
NUM_SUMS = 150
HANG_SECONDS = 5.0
REAL_LIBRARY = library.load_library()
LAYOUT = RegionLayout(max_tokens=ROWS, hidden_size=WIDTH, vocab_rows=0)
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
    """Two ranks as threads; what they wait for never takes long, unless a wake-up is missing."""

    def __init__(self) -> None:
        self.groups = open_ranks(2, LAYOUT)

    def run(self, function: Callable[[RankGroup], bool]) -> bool:
        """Return whether a function ends in time and is true on both ranks."""
        results: list[bool] = []
        threads = [
            threading.Thread(target=lambda group=group: results.append(function(group)))
            for group in self.groups
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + HANG_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        in_time = not any(thread.is_alive() for thread in threads)
        self._release(threads)
        return in_time and all(results) and len(results) == 2

    def _release(self, threads: list[threading.Thread]) -> None:
        """End threads that hang."""
        kernels = REAL_LIBRARY
        while any(thread.is_alive() for thread in threads):
            for group in self.groups:
                memory = group._memory  # type: ignore[attr-defined]
                for line in memory.lines:
                    line.sequence = memory.state.sequence
                assert kernels is not None
                kernels(CancelArguments(memory.pointer))
            time.sleep(0.01)


def sum_in_one_place(group: RankGroup) -> bool:
    """Sum by recorded calls, whose place is always the same; return whether all are right."""
    memory = torch.empty(4 * ROWS * WIDTH, dtype=torch.uint8)
    kernels = library.current_library()
    assert kernels is not None
    with record_kernels(kernels, ROWS, memory) as recorder:
        part = group.partial(ROWS, WIDTH)
        assert part is not None
        result = group.sum(part, None, torch.float32)
    for number in range(NUM_SUMS):
        kernels(recorder.calls[0])
        part.fill_(number + group.rank)
        kernels(recorder.calls[1])
        if not bool((result == 2 * number + 1).all()):
            return False
    return True


def copy_to_one_place(group: RankGroup) -> bool:
    """As sum_in_one_place, where the sum itself writes the part to its place."""
    memory = torch.empty(4 * ROWS * WIDTH, dtype=torch.uint8)
    kernels = library.current_library()
    assert kernels is not None
    part = torch.empty(ROWS, WIDTH)
    with record_kernels(kernels, ROWS, memory) as recorder:
        result = group.sum(part, None, torch.float32)
    for number in range(NUM_SUMS):
        part.fill_(number + group.rank)
        kernels(recorder.calls[0])
        if not bool((result == 2 * number + 1).all()):
            return False
    return True


def sum_eagerly(group: RankGroup) -> bool:
    """Return whether eager sums are right."""
    for number in range(NUM_SUMS):
        part = group.partial(ROWS, WIDTH)
        assert part is not None
        part.fill_(number + group.rank)
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
    try:
        group.sum(torch.ones(1, 4), None, torch.float32)
    except GroupClosedError:
        return True
    return False


CHECKS = (sum_in_one_place, copy_to_one_place, sum_eagerly, sum_late, cancel)


def failed_checks() -> set[str]:
    """Return the names of the checks that fail."""
    return {check.__name__ for check in CHECKS if not Ranks().run(check)}


@pytest.mark.parametrize(
    ("removed", "failed"),
    [
        ("nothing", set()),
        ("the wait for the other ranks' parts", {"sum_eagerly"}),
        ("the wait for readers of a place", {"sum_in_one_place"}),
        ("the wait before a copy", {"copy_to_one_place"}),
        ("the bell of a rank that arrives", {"sum_late"}),
        ("the bell of a rank that cancels", {"cancel"}),
        ("the look at the reason to close", {"cancel"}),
    ],
    indirect=["removed"],
)
def test_a_removed_wait_is_noticed(removed: str, failed: set[str]) -> None:
    found = failed_checks()
    assert found >= failed
    assert bool(found) == bool(failed)


def test_without_alternating_places_sums_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedMemoryGroup, "_next_place", lambda group, places: places[0])
    assert not Ranks().run(sum_eagerly)


@pytest.mark.parametrize("is_removed", [False, True])
def test_without_polling_sums_are_wrong(is_removed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load_library", lambda: None)
    if is_removed:
        monkeypatch.setattr(GroupMemory, "_poll", lambda memory, number: None)
    assert Ranks().run(sum_eagerly) is not is_removed
