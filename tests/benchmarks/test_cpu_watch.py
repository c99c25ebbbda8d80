"""What a process tree uses: a child that works is ours or foreign, as we look at it."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.cpu.watch import CpuWatch, MemoryWatch, cpu_seconds, pss_bytes, tree

pytestmark = pytest.mark.full

BUSY = "while True: pass"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
IDLE = "input()"
LARGE = "block = bytearray(64 * 2**20); print(flush=True); input()"


@contextmanager
def child(code: str) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        if "print" in code:
            assert process.stdout is not None
            process.stdout.readline()
        yield process.pid
    finally:
        for pid in reversed(tree(process.pid)):
            subprocess.run(["kill", "-9", str(pid)], check=False)
        process.communicate()


def wait_for_work(root: int) -> None:
    """Until a grandchild has used some CPU."""
    while cpu_seconds(tree(root)[1:]) < 0.2:
        time.sleep(0.02)


def test_work_of_a_tree_is_not_foreign_to_it() -> None:
    with child(IDLE) as idle, child(PARENT) as busy:
        watches = CpuWatch(idle), CpuWatch(busy)
        wait_for_work(busy)
        beside, within = (watch.foreign() for watch in watches)
        assert len(tree(busy)) == 2
        assert cpu_seconds([busy]) < cpu_seconds(tree(busy))
    assert 0 <= within < beside <= 1


def test_memory_of_a_tree() -> None:
    with child(LARGE) as large:
        with MemoryWatch(large, seconds=60) as memory:
            pass
        assert 64 * 2**20 < memory.peak < 128 * 2**20


def test_processes_that_are_gone() -> None:
    with child(IDLE) as idle:
        pass
    assert (tree(idle), cpu_seconds([idle]), pss_bytes([idle])) == ([idle], 0, 0)
