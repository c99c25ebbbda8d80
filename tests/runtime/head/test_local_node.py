"""Worker processes: start, identity, exit, and what is left of them."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, NoReturn

import pytest
import zmq

from gllm.messages.codec import decode_for_head
from gllm.messages.lifecycle import Heartbeat, Hello, Shutdown
from gllm.observability.child_process import ChildProcess, has_import_failure
from gllm.observability.logs import LogConfig
from gllm.runtime.head.assignment import WorkerIdentity
from gllm.runtime.head.node import LocalNode
from gllm.runtime.messaging.bus import Hub
from gllm.runtime.worker.stage_instance import run_in_thread
from tests.support.servers.server import alive, wait_until

SECONDS = 60.0
"""Limit for anything that should happen at once."""


class Head:
    """The parent's end: exits and messages of workers."""

    def __init__(self, folder: Path, node: LocalNode | None = None) -> None:
        self.node = node or LocalNode(1)
        self.address = f"ipc://{folder}/hub"
        self.exits: dict[int, str] = {}
        self.stacks: dict[int, str] = {}
        self.messages: list[tuple[int, Any]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.hub = Hub(self._context, 7, decode_for_head)
        self.hub.bind(self.address)
        self.hub.start(self.messages.extend, lambda sender, cause: None)
        self.node.watch(self._on_exit)

    def _on_exit(self, sender: int, description: str) -> None:
        self.exits[sender] = description
        self.stacks[sender] = self.node.read_stacks(sender)

    def spawn(self, sender: int) -> int:
        """The process's id."""
        self.hub.expect(sender)
        self.node.spawn(WorkerIdentity(7, sender, self.address, LogConfig()))
        return self.node.workers[sender].process.pid

    async def wait_for(self, kind: type, sender: int) -> None:
        async with asyncio.timeout(SECONDS):
            while not any(s == sender and isinstance(m, kind) for s, m in self.messages):
                await asyncio.sleep(0.02)

    async def wait_for_exit(self, sender: int) -> str:
        async with asyncio.timeout(SECONDS):
            while sender not in self.exits:
                await asyncio.sleep(0.02)
        return self.exits[sender]

    async def close(self) -> None:
        for sender in list(self.node.workers):
            self.hub.send(sender, Shutdown())
        await self.node.stop()
        self.end()

    def end(self) -> None:
        """End all sessions at once."""
        self.hub.close()
        self._context.term()


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_processes_without_an_identity_leave_nothing_behind() -> None:
    before = num_open()
    node = LocalNode(2)
    pids = [process.pid for process in node.processes]
    assert all(alive(pid) for pid in pids)
    node.close()
    assert not any(alive(pid) for pid in pids)
    node.close()
    assert num_open() == before


def ignores(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigIgn"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_signals_that_all_processes_get_are_for_the_parent_of_workers() -> None:
    node = LocalNode(1)
    try:
        [process] = node.processes
        for number in (signal.SIGTERM, signal.SIGINT):
            wait_until(partial(ignores, process.pid, number))
            process.send_signal(number)
        assert alive(process.pid)
    finally:
        node.close()


@pytest.mark.full
async def test_a_process_whose_parent_closes_the_channel_exits(tmp_path: Path) -> None:
    node = LocalNode(1)
    node._unused[0].channel.close()
    process = node.processes[0]
    assert await asyncio.to_thread(process.wait, SECONDS) == 1
    node.close()


def test_a_build_of_kernels_that_is_none_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLLM_CPU_KERNELS", "sse9")
    with pytest.raises(ValueError, match="GLLM_CPU_KERNELS is 'sse9', but has to be one of"):
        LocalNode(1, popen=lambda *_, **__: pytest.fail("a worker was started"))


@pytest.mark.full
async def test_the_life_of_workers_without_a_stage(tmp_path: Path) -> None:
    """One that was there before, one that is started on demand, and their ends."""
    before = num_open()
    head = Head(tmp_path)
    pids = {sender: head.spawn(sender) for sender in (1, 2, 3)}
    assert pids[1] < pids[2]
    for sender, pid in pids.items():
        await head.wait_for(Hello, sender)
        await head.wait_for(Heartbeat, sender)
        assert Path(f"/proc/{pid}/cmdline").read_text().startswith("gllm-standby")
        sample = head.node.sample(sender)
        assert sample is not None
        assert sample.cpu_seconds > 0
        assert not sample.is_stopped
    heartbeat = next(m for s, m in head.messages if isinstance(m, Heartbeat))
    assert heartbeat.step == -1
    assert heartbeat.cpu_seconds > 0

    os.kill(pids[1], signal.SIGSTOP)
    await stopped(head, 1)
    head.node.kill(1)
    assert await head.wait_for_exit(1) == f"process {pids[1]} was killed by SIGKILL"
    assert not Path(f"/proc/{pids[1]}").exists()
    assert head.node.sample(1) is None
    head.node.kill(1)

    os.kill(pids[2], signal.SIGSEGV)
    assert await head.wait_for_exit(2) == f"process {pids[2]} was killed by SIGSEGV"
    assert "run_worker" in head.stacks[2]
    assert "Segmentation fault" in head.stacks[2]

    await head.close()
    assert not alive(pids[3])
    assert list(head.exits) == [1, 2]
    assert num_open() == before


async def stopped(head: Head, sender: int) -> None:
    async with asyncio.timeout(SECONDS):
        while not (sample := head.node.sample(sender)) or not sample.is_stopped:
            await asyncio.sleep(0.02)


async def test_a_stopped_worker_writes_its_stacks_once_it_goes_on(tmp_path: Path) -> None:
    before = num_open()
    head = Head(tmp_path)
    pid = head.spawn(1)
    await head.wait_for(Hello, 1)
    await head.wait_for(Heartbeat, 1)
    os.kill(pid, signal.SIGSTOP)
    await stopped(head, 1)
    head.node.dump_stacks(1)
    assert head.node.read_stacks(1) == ""
    os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(SECONDS):
        while "run_worker" not in head.node.read_stacks(1):
            await asyncio.sleep(0.02)
    head.node.kill(1)
    assert await head.wait_for_exit(1) == f"process {pid} was killed by SIGKILL"
    assert "run_worker" in head.stacks[1]
    assert head.node.sample(1) is None
    await head.close()
    assert num_open() == before


@pytest.mark.full
async def test_a_worker_exits_with_its_parent(tmp_path: Path) -> None:
    """The parent's end of the session is gone, and that of its channel too."""
    head = Head(tmp_path)
    pid = head.spawn(1)
    await head.wait_for(Heartbeat, 1)
    head.end()
    assert await head.wait_for_exit(1) == f"process {pid} exited with 1"
    await head.node.stop()


async def test_a_failed_start_is_an_error_of_the_system(tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise BlockingIOError("no process is left")

    head = Head(tmp_path, LocalNode(0, popen=fail))
    before = num_open()
    with pytest.raises(OSError, match="no process"):
        head.spawn(1)
    assert num_open() == before
    await head.close()


async def test_what_fails_in_its_own_thread_is_raised() -> None:
    def fail() -> None:
        raise LookupError("no such tensor")

    with pytest.raises(LookupError, match="no such tensor"):
        await run_in_thread(fail)
    done: list[int] = []
    await run_in_thread(lambda: done.append(1))
    assert done == [1]


async def test_a_worker_whose_modules_cannot_be_imported_says_so(
    tmp_path: Path, broken_imports: None
) -> None:
    popen = partial(ChildProcess, stderr=DEVNULL)
    head = Head(tmp_path, LocalNode(1, popen=popen))
    try:
        head.spawn(1)
        assert has_import_failure(await head.wait_for_exit(1))
    finally:
        await head.close()
