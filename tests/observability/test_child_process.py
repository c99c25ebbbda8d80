"""Exits of child processes: as events, and in words."""

import asyncio
import gc
import os
import signal
import sys

import pytest

from gllm.observability.child_process import ChildProcess, describe_exit

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def num_open() -> int:
    gc.collect()  # Descriptors of earlier tests.
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("status", "lines", "cause"),
    [
        (0, ["bye"], "it exited with 0"),
        (1, ["start", "gllm: no memory", " "], "it exited with 1: gllm: no memory"),
        (2, [], "it exited with 2"),
        (-9, ["x"], "it was killed by SIGKILL"),
        (-99, ["x"], "it was killed by signal 99"),
    ],
)
def test_causes_of_exits(status: int, lines: list[str], cause: str) -> None:
    assert describe_exit(status, last_lines=lines) == cause
    assert describe_exit(status, "process 7", lines) == cause.replace("it", "process 7", 1)


async def test_an_exit_is_an_event_of_a_process_that_was_reaped() -> None:
    before = num_open()
    child = ChildProcess(SLEEP)
    exits: asyncio.Queue[int | None] = asyncio.Queue()
    child.watch(lambda: exits.put_nowait(0))
    child.watch(lambda: exits.put_nowait(child.returncode))
    child.kill()
    async with asyncio.timeout(60):
        assert await exits.get() == -signal.SIGKILL
        await child.exited()
    assert child.describe_exit("the child") == "the child was killed by SIGKILL"
    assert exits.empty()
    assert num_open() == before


async def test_an_exit_that_is_not_watched_any_more_is_no_event() -> None:
    before = num_open()
    child = ChildProcess(SLEEP)
    exits: list[None] = []
    child.watch(lambda: exits.append(None))
    child.unwatch()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(child.exited(), 0.01)
    child.kill()
    await child.exited()
    await asyncio.sleep(0)
    assert exits == []
    assert num_open() == before


def test_an_exit_may_be_watched_no_more_after_the_loop_has_ended() -> None:
    before = num_open()

    async def start() -> ChildProcess:
        child = ChildProcess(SLEEP)
        child.watch(lambda: pytest.fail("the loop has ended"))
        return child

    child = asyncio.run(start())
    child.kill()
    assert child.describe_exit() == "it was killed by SIGKILL"
    child.unwatch()
    assert num_open() == before
