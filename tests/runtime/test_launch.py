"""Worker processes before anybody has told them what to be."""

import asyncio

import pytest

from gllm.runtime.launch import WorkerProcesses
from gllm.runtime.worker import run_in_thread
from tests.e2e.server import alive


def test_workers_that_are_never_told_leave_nothing_behind() -> None:
    workers = WorkerProcesses(2)
    pids = [process.pid for process in workers.processes]
    assert all(alive(pid) for pid in pids)
    workers.kill()
    assert not any(alive(pid) for pid in pids)
    workers.kill()


async def test_a_worker_without_its_line_ends() -> None:
    workers = WorkerProcesses(1)
    deaths: list[tuple[int, str]] = []
    workers.watch(lambda stage, how: deaths.append((stage, how)))
    pipe = workers.processes[0].stdin
    assert pipe is not None
    pipe.close()
    while not deaths:
        await asyncio.sleep(0.01)
    ((stage, how),) = deaths
    assert (stage, how.endswith("exited with 1")) == (0, True)
    workers.kill()


def test_a_build_of_kernels_that_is_none_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLLM_CPU_KERNELS", "sse9")
    monkeypatch.setattr(WorkerProcesses, "_spawn", lambda *_: pytest.fail("a worker was started"))
    with pytest.raises(ValueError, match="GLLM_CPU_KERNELS is 'sse9', but has to be one of"):
        WorkerProcesses(1)


async def test_what_fails_in_its_own_thread_is_raised() -> None:
    def fail() -> None:
        raise LookupError("no such tensor")

    with pytest.raises(LookupError, match="no such tensor"):
        await run_in_thread(fail)
    done: list[int] = []
    await run_in_thread(lambda: done.append(1))
    assert done == [1]
