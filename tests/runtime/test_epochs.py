"""Workers that live through many epochs, and instances that are closed at any moment."""

import asyncio
import json
import shutil
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gllm.messages.lifecycle import CloseEpoch, EpochClosed, StageLoaded
from gllm.messages.sampling import SequenceSamplingParams
from gllm.models.hub import DEMO
from gllm.models.loader import Checkpoint
from gllm.runtime.head.node import LocalNode
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.runtime.worker.grammars import GuideFactory
from tests.support.engines.local_workers import LocalWorkers
from tests.support.gpu.device_stage import host_as_gpu
from tests.support.nodes.scripted_head import Head, head_of, num_mapped, num_open, num_threads
from tests.support.servers.server import owned_bytes

PROMPT = [5, 9, 3, 7]
OF_DEVICE = {"_compute_steps", "_sample_steps", "host-staging"}
"""Threads of two stages on a device."""
DIGITS = SequenceSamplingParams(temperature=0.0, grammar="start: /[0-9]{40,60}/")


def resources(pids: list[int]) -> list[list[int]]:
    """Numbers of descriptors and of threads of each process."""
    return [[num_open(pid), num_threads(pid)] for pid in pids]


def has_resources(pids: list[int], expected: list[list[int]]) -> bool:
    return resources(pids) == expected


@pytest.mark.parametrize("num_epochs", [6, pytest.param(20, marks=pytest.mark.full)])
async def test_epochs_of_two_processes_leave_nothing_behind(num_epochs: int) -> None:
    """Same tokens, and the same descriptors, threads, mappings and memory in each epoch."""
    node = LocalNode(2)
    async with head_of(node, 2) as head:
        pids = [node.workers[sender].process.pid for sender in head.senders]
        outputs: list[list[int]] = []
        kept: list[list[int]] = []
        memory: list[int] = []
        for number in range(num_epochs):
            head.assign()
            await head.initialize(64 + number)
            outputs.append(await head.generate(PROMPT, 12))
            titles = [Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0") for pid in pids]
            assert titles == ["gllm-stage-0", "gllm-stage-1"]
            await head.close_epoch()
            if number <= 2:
                # The first ones start what lives as long as the process; ZeroMQ closes its
                # descriptors a little later.
                await asyncio.sleep(0.5)
                kept = resources(pids)
            await head.until(partial(has_resources, pids, kept))
            assert [num_mapped("gllm-edge", pid) for pid in pids] == [0, 0]
            memory.append(owned_bytes(pids))
        assert [node.workers[sender].process.pid for sender in head.senders] == pids
    assert outputs == [outputs[0]] * num_epochs
    # Far less than one copy of the weights or of the activations in each epoch.
    assert memory[-1] - memory[4] < 2**24, memory


async def test_weights_are_read_once(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    async with head_of(LocalWorkers(), 2) as head:
        head.model_folder = folder
        head.assign()
        await head.initialize()
        expected = await head.generate(PROMPT, 8)
        await head.close_epoch()
        for file in folder.glob("*.safetensors"):
            file.unlink()
        head.assign()
        await head.initialize()
        assert await head.generate(PROMPT, 8) == expected


async def test_another_split_is_loaded_anew() -> None:
    async with head_of(LocalWorkers(), 2) as head:
        head.assign()
        await head.initialize()
        expected = await head.generate(PROMPT, 8)
        await head.close_epoch()
        middle = head.layers[0].stop - 1
        head.assign([range(middle), range(middle, head.layers[1].stop)])
        await head.initialize()
        assert await head.generate(PROMPT, 8) == expected


@pytest.mark.parametrize("victim", [1, 2])
async def test_survivors_of_a_death_serve_with_a_new_worker(victim: int) -> None:
    """The driver or the last stage dies while a request runs."""
    node = LocalWorkers()
    async with head_of(node, 2) as head:
        head.assign()
        await head.initialize()
        expected = await head.generate(PROMPT, 8)
        running = head.submit(PROMPT, 200)
        await head.until(lambda: len(head.tokens(running)) > 3)
        node.kill(victim)
        await head.until(lambda: victim in head.exits)
        head.hub.forget(victim)
        survivor = 3 - victim
        await head.close_epoch([survivor])
        head.senders[victim - 1] = 3
        await head.spawn(3)
        head.assign(cause="a worker died")
        await head.initialize()
        assert await head.generate(PROMPT, 8) == expected


async def test_a_step_log_goes_on_over_epochs(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    async with head_of(LocalWorkers(), 1, step_log=str(path)) as head:
        for cause in ("", "a worker died"):
            head.assign(cause=cause)
            await head.initialize()
            await head.generate(PROMPT, 3)
            await head.close_epoch()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    starts = [each for each in events if each["event"] in ("start", "restart")]
    assert [each["event"] for each in starts] == ["start", "restart"]
    assert starts[1]["epoch"] == 2
    assert starts[1]["cause"] == "a worker died"
    assert sum(each["event"] == "add" for each in events) == 2


class Gate:
    """A call that waits in the middle until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.num_calls = 0
        self.is_armed = True
        call = getattr(owner, name)

        def gated(*arguments: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.is_armed:
                self.reached.set()
                assert self.opened.wait(60)
            return call(*arguments, **options)

        monkeypatch.setattr(owner, name, gated)


async def serves_again(head: Head, expected: list[int]) -> None:
    head.assign()
    await head.initialize()
    assert await head.generate(PROMPT, 8) == expected


async def first_epoch(head: Head) -> list[int]:
    head.assign()
    await head.initialize()
    return await head.generate(PROMPT, 8)


@pytest.mark.parametrize("stages", [1, 2])
async def test_closing_while_a_step_computes(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ends, its result is dropped, and a later stage that waits for it is closed."""
    async with head_of(LocalWorkers(), stages) as head:
        expected = await first_epoch(head)
        gate = Gate(monkeypatch, CpuExecutor, "compute")
        seq = head.submit(PROMPT, 8)
        assert await asyncio.to_thread(gate.reached.wait, 60)
        await head.close_epoch(head.senders[1:])
        head.hub.send(1, CloseEpoch())
        await asyncio.sleep(0.1)
        last = head.messages[-1]
        assert not (last[1] == 1 and isinstance(last[2], EpochClosed))
        gate.is_armed = False
        gate.opened.set()
        await head.wait_for(EpochClosed, 1)
        await serves_again(head, expected)
        assert head.tokens(seq) == []


async def test_closing_while_the_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next instance of the same layers takes them over when they are there."""
    async with head_of(LocalWorkers(), 1) as head:
        gate = Gate(monkeypatch, Checkpoint, "check_all_read")
        head.assign()
        assert await asyncio.to_thread(gate.reached.wait, 60)
        await head.close_epoch()
        head.assign()
        await asyncio.sleep(0.1)
        assert not any(isinstance(message, StageLoaded) for _, _, message in head.messages)
        gate.opened.set()
        await head.initialize()
        first = await head.generate(PROMPT, 8)
        assert gate.num_calls == 1
        await head.close_epoch()
        await serves_again(head, first)


async def test_weights_that_nobody_needs_are_not_loaded_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with head_of(LocalWorkers(), 2) as head:
        gate = Gate(monkeypatch, Checkpoint, "report_to")
        finished = Gate(monkeypatch, Checkpoint, "check_all_read")
        finished.is_armed = False
        head.assign()
        assert await asyncio.to_thread(gate.reached.wait, 60)
        await head.close_epoch()
        middle = head.layers[0].stop - 1
        head.assign([range(middle), range(middle, head.layers[1].stop)])
        await asyncio.sleep(0.1)
        gate.opened.set()
        await head.initialize()
        assert len(await head.generate(PROMPT, 8)) == 8
        assert finished.num_calls == 2


async def test_closing_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with head_of(LocalWorkers(), 2) as head:
        expected = await first_epoch(head)
        gate = Gate(monkeypatch, GuideFactory, "_compile")
        seq = head.submit(PROMPT, 50, DIGITS)
        assert await asyncio.to_thread(gate.reached.wait, 60)
        await head.close_epoch()
        gate.opened.set()
        await serves_again(head, expected)
        assert head.tokens(seq) == []
        other = head.submit(PROMPT, 50, DIGITS)
        await head.until(lambda: len(head.tokens(other)) > 30)


async def test_closing_while_a_token_waits_for_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampling thread waits for the guide, which is failed."""
    async with head_of(LocalWorkers(), 1) as head:
        expected = await first_epoch(head)
        held: Future[bytes] = Future()
        submit = GuideFactory.create_guide

        def create(*arguments: Any) -> Any:
            guide = submit(*arguments)
            guide._submit = lambda function: held
            return guide

        with monkeypatch.context() as patch:
            patch.setattr(GuideFactory, "create_guide", create)
            seq = head.submit(PROMPT, 50, DIGITS)
            await head.until(lambda: len(head.tokens(seq)) >= 1)
            await head.close_epoch()
        assert held.cancelled()
        await serves_again(head, expected)


async def test_a_worker_without_a_stage_has_nothing_to_close() -> None:
    node = LocalWorkers()
    async with head_of(node, 1) as head:
        head.epoch = 1
        head.hub.send(1, CloseEpoch())
        head.epoch = 0
        await asyncio.sleep(0.05)
        assert await first_epoch(head)
        await head.close_epoch()


async def test_a_second_assignment_is_an_error() -> None:
    node = LocalWorkers()
    async with head_of(node, 1) as head:
        await first_epoch(head)
        head.assign()
        await head.until(lambda: 1 in head.exits)
        assert head.exits[1] == "worker 1 exited with 1"


async def test_stages_on_a_device_end_their_threads() -> None:
    """Such a process is started anew for the next epoch, but it can be asked to close."""
    small = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    with host_as_gpu():
        async with head_of(LocalWorkers(), 2, **small) as head:
            expected = await first_epoch(head)
            loaded = [m for _, _, m in head.messages if isinstance(m, StageLoaded)]
            assert [message.keeps_weights for message in loaded] == [False, False]
            assert {thread.name for thread in threading.enumerate()} >= OF_DEVICE
            seq = head.submit(PROMPT, 200)
            await head.until(lambda: len(head.tokens(seq)) > 3)
            await head.close_epoch()
            assert not OF_DEVICE & {thread.name for thread in threading.enumerate()}
            await serves_again(head, expected)
