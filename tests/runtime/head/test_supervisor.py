"""The supervisor over scripted workers: recoveries, limits, poison, commands, drain and stop."""

import asyncio
import errno
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.engine.pipeline import read_status
from gllm.messages.lifecycle import StageFailed, StartProfile, StopProfile
from gllm.messages.sampling import SequenceSamplingParams
from gllm.observability.logs import DEFAULT_LOG_CONFIG
from gllm.recovery import records
from gllm.recovery.partition import StageCosts
from gllm.runtime.head import event_receiver
from gllm.runtime.head.layer_planner import LayerPlanner
from gllm.runtime.head.supervisor import EngineError, Supervisor
from tests.support.engines.kv_driver import KvFollower
from tests.support.nodes.scripted_node import ScriptedNode, token_of

SEED = 11


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder that no other process writes to."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def create(num_stages: int = 2, **options: Any) -> Supervisor:
    config = EngineConfig.from_options(
        "demo", pipeline_parallel_size=num_stages, max_model_len=256, **options
    )
    layers = [range(stage, stage + 1) for stage in range(num_stages)]
    planner = LayerPlanner(config, layers, StageCosts((1.0,) * num_stages))
    return Supervisor(config, planner, lambda done, total: None)


@asynccontextmanager
async def running(
    num_stages: int = 2, **options: Any
) -> AsyncIterator[tuple[Supervisor, ScriptedNode]]:
    """A supervisor that is ready, with its node."""
    supervisor, node = create(num_stages, **options), ScriptedNode()
    await supervisor.start(Path("demo"), node, DEFAULT_LOG_CONFIG)
    try:
        yield supervisor, node
    finally:
        await supervisor.stop()


async def generate(
    supervisor: Supervisor, prompt: list[int], max_tokens: int = 20, n: int = 1
) -> tuple[list[list[int]], list[str]]:
    """Return the tokens and the errors of a request's choices."""
    params = SequenceSamplingParams(temperature=0)
    stream = supervisor.client.submit(prompt, params, max_tokens, [], n)
    tokens: list[list[int]] = [[] for _ in range(n)]
    errors = [""] * n
    num_running = n
    while num_running:
        await stream.wait()
        for choice, delta in stream.pop_deltas().items():
            tokens[choice] += delta.tokens
            if delta.end is not None:
                errors[choice] = delta.error_kind or delta.end.error
                num_running -= 1
    supervisor.client.release(stream)
    return tokens, errors


def expected(prompt: list[int], max_tokens: int = 20, n: int = 1) -> list[list[int]]:
    return [[token_of(prompt, choice, i) for i in range(max_tokens)] for choice in range(n)]


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def recovering(
    supervisor: Supervisor, node: ScriptedNode, victim: int, how: str = "was killed by SIGKILL"
) -> AsyncIterator[None]:
    """Let a stage's worker die; the recovery lasts at least until the end of the block."""
    node.may_load.clear()
    node.crash(victim, how)
    await until(lambda: supervisor.state == "recovering")
    yield
    node.may_load.set()


async def test_requests_run_and_nothing_is_left(temporary: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    async with running() as (supervisor, node):
        assert (supervisor.state, supervisor.recovery.epoch) == ("ready", 1)
        assert not list(temporary.iterdir()), "all workers have connected"
        assert await generate(supervisor, [5, 6], n=2) == (expected([5, 6], n=2), ["", ""])
    assert supervisor.state == "dead"
    assert not node.workers
    assert not list(temporary.iterdir())
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("victim", [0, 1], ids=["driver", "last stage"])
async def test_requests_survive_a_death(victim: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running() as (supervisor, node):
        tasks = [asyncio.create_task(generate(supervisor, [i], 100, 2)) for i in range(1, 6)]
        await until(lambda: supervisor.client.stats.running)
        survivor = node.worker_of(1 - victim)
        async with recovering(supervisor, node, victim):
            since = supervisor.recovering_since
            assert since is not None
            late = asyncio.create_task(generate(supervisor, [9]))
        assert [await task for task in tasks] == [
            (expected([i], 100, 2), ["", ""]) for i in range(1, 6)
        ]
        assert await late == (expected([9]), [""])
        assert node.worker_of(1 - victim) is survivor
        assert (supervisor.state, supervisor.recovery.epoch, node.num_spawned) == (
            "ready",
            2,
            3,
        )
        assert supervisor.deaths.recoveries == {"killed": 1}
        assert len(supervisor.deaths.recovery_seconds) == 1
        assert supervisor.client.num_resumed_requests == 5
        assert len(set(node.block_counts)) == 1
    (death,) = [each.message for each in caplog.records if "SIGKILL" in each.message]
    assert f"stage {victim}" in death
    assert "requests: 5" in death
    (ready,) = [each.message for each in caplog.records if "ready again" in each.message]
    assert "requests resumed: 5" in ready
    assert re.search(r"after .* s \(close .* s, .*warm up .* s\), in epoch 2", ready)


@pytest.mark.parametrize(
    ("stage", "rank"),
    [(1, 2), *(pytest.param(*each, marks=pytest.mark.full) for each in [(0, 1), (1, 0)])],
)
async def test_requests_survive_the_death_of_a_rank(
    stage: int, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": (2, 3), "layers": "even"}
    async with running(max_restarts=1, **options) as (supervisor, node):
        workers = {each.identity.sender: each for each in node.workers.values()}
        tasks = [asyncio.create_task(generate(supervisor, [i], 100)) for i in range(1, 4)]
        await until(lambda: supervisor.client.stats.running)
        victim = node.worker_of(stage, rank)
        node.crash(stage, rank=rank)
        assert [await task for task in tasks] == [(expected([i], 100), [""]) for i in range(1, 4)]
        assert (supervisor.recovery.epoch, node.num_spawned) == (2, 6)
        survivors = {sender: each for sender, each in workers.items() if each is not victim}
        assert survivors.items() <= node.workers.items()
        node.worker_of(stage, rank).send(StageFailed(stage, "no memory is left"))
        await until(lambda: supervisor.recovery.epoch == 3 and supervisor.state == "ready")
        assert supervisor.deaths.cause == f"stage {stage} rank {rank} failed: no memory is left"
    assert f"the worker of stage {stage} rank {rank} (process" in caplog.text


async def test_workers_share_the_memory_of_the_kv_cache() -> None:
    options: dict[str, Any] = {"tensor_parallel_size": (2, 1), "layers": "even"}
    async with running(kv_cache_memory=605, **options) as (supervisor, node):
        assert node.block_counts == [20] * 3, "10 bytes of a block in each of three workers"
        assert (supervisor.num_blocks, supervisor.kv_bytes) == (20, 600)
        # Commands reach all ranks.
        assert await supervisor.run_command(lambda number: StartProfile(number, "x")) == ""


async def test_the_prefix_cache_is_watched_again_after_a_recovery() -> None:
    follower = KvFollower()
    async with running() as (supervisor, node):
        assert not supervisor.kv_events.num_cached_blocks
        supervisor.kv_events.subscribe(follower)
        first = node.worker_of(0).identity.sender
        await until(lambda: follower.digests == {b"block %d" % first})
        async with recovering(supervisor, node, 0):
            assert not follower.digests
        await until(lambda: follower.digests)
        second = node.worker_of(0).identity.sender
        assert follower.digests == {b"block %d" % second} != {b"block %d" % first}
    assert not follower.digests


@pytest.mark.full
async def test_many_deaths_at_random_moments() -> None:
    rng = Random(SEED)
    async with running(3, max_restarts=1) as (supervisor, node):
        tasks = [asyncio.create_task(generate(supervisor, [i], 900)) for i in range(1, 9)]
        for _ in range(6):
            await until(lambda: supervisor.state == "ready")
            before = supervisor.client.step_sizes.total()
            while supervisor.client.step_sizes.total() <= before + 3:
                await asyncio.sleep(0.005)
            first, second = rng.sample(range(3), 2)
            node.crash(first)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.05)
                node.crash(second)
            await asyncio.sleep(rng.random() * 0.2)
        results = [await task for task in tasks]
    assert results == [(expected([i], 900), [""]) for i in range(1, 9)]


async def test_without_restarts_the_first_death_ends_the_engine(temporary: Path) -> None:
    async with running(max_restarts=0) as (supervisor, node):
        task = asyncio.create_task(generate(supervisor, [1], 1000))
        await until(lambda: supervisor.client.stats.running)
        node.crash(1)
        _, (error,) = await task
        assert supervisor.state == "dead"
        assert supervisor.died.is_set()
        assert "stage 1" in error
        assert "SIGKILL" in error
        assert supervisor.cause == error
        assert supervisor.deaths.recoveries == {}
        assert await supervisor.reset_prefix_cache() == error
        await until(lambda: not node.workers)
    assert not list(temporary.iterdir())


async def test_a_place_that_keeps_dying_ends_the_engine(temporary: Path) -> None:
    async with running(max_restarts=2) as (supervisor, node):
        task = asyncio.create_task(generate(supervisor, [1], 1000))
        await until(lambda: supervisor.client.stats.running)
        node.deaths_at_load[1] = 9
        node.crash(1)
        _, (error,) = await task
        assert "stage 1" in error
        assert "exited with 1" in error
        assert node.deaths_at_load[1] == 7
        assert "restarts without a finished step before: 2" in error
    (folder,) = temporary.iterdir()
    assert len(list(folder.iterdir())) == 3, "evidence is kept after the engine gave up"


async def test_a_failure_of_the_first_start_is_raised(temporary: Path) -> None:
    supervisor, node = create(), ScriptedNode()
    node.failures_at_load[1] = "the file has no weights"
    with pytest.raises(EngineError, match="stage 1 failed: the file has no weights"):
        await supervisor.start(Path("demo"), node, DEFAULT_LOG_CONFIG)
    assert not list(temporary.iterdir())


async def test_deaths_and_failed_spawns_of_the_first_start_are_recovered() -> None:
    supervisor, node = create(), ScriptedNode()
    node.deaths_at_load[1] = 1
    node.spawn_errors = 1
    await supervisor.start(Path("demo"), node, DEFAULT_LOG_CONFIG)
    assert supervisor.state == "ready"
    assert supervisor.deaths.recoveries == {}, "it was not ready before"
    await supervisor.stop()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many folders, by the beginning of their names, are still to find no space."""
    failures: Counter[str] = Counter()
    make = tempfile.mkdtemp

    def make_folder(prefix: str = "", **options: Any) -> str:
        if failures[prefix] > 0:
            failures[prefix] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return make(prefix=prefix, **options)

    monkeypatch.setattr(tempfile, "mkdtemp", make_folder)
    monkeypatch.setattr(records, "FIRST_BACKOFF_SECONDS", 0.02)
    return failures


async def test_a_full_temporary_folder_delays_an_epoch(full_disk: Counter[str]) -> None:
    async with running(max_restarts=2) as (supervisor, node):
        task = asyncio.create_task(generate(supervisor, [1], 100))
        await until(lambda: supervisor.client.stats.running)
        full_disk["gllm-test-driver-"] = 2
        node.crash(0)
        assert await task == (expected([1], 100), [""])
        assert full_disk["gllm-test-driver-"] == 0
        assert (supervisor.recovery.epoch, node.num_spawned) == (4, 3)
        assert supervisor.deaths.recoveries == {"killed": 1}


async def test_a_temporary_folder_that_stays_full_ends_the_engine(full_disk: Counter[str]) -> None:
    async with running(max_restarts=2) as (supervisor, node):
        task = asyncio.create_task(generate(supervisor, [1], 100))
        await until(lambda: supervisor.client.stats.running)
        full_disk["gllm-test-driver-"] = 9
        node.crash(0)
        _, (error,) = await task
        assert "could not be assigned" in error
        assert "No space left" in error
        assert full_disk["gllm-test-driver-"] == 6


async def test_the_first_start_waits_for_space(full_disk: Counter[str]) -> None:
    supervisor, node = create(), ScriptedNode()
    full_disk["gllm-"] = full_disk["gllm-test-driver-"] = 1
    await supervisor.start(Path("demo"), node, DEFAULT_LOG_CONFIG)
    assert supervisor.state == "ready"
    assert full_disk.total() == 0
    await supervisor.stop()


async def test_a_reported_failure_is_recovered() -> None:
    async with running() as (supervisor, node):
        task = asyncio.create_task(generate(supervisor, [1], 100))
        await until(lambda: supervisor.client.stats.running)
        node.worker_of(1).send(StageFailed(1, "no memory is left"))
        assert await task == (expected([1], 100), [""])
        assert supervisor.deaths.recoveries == {"failed": 1}
        assert supervisor.deaths.cause == "stage 1 failed: no memory is left"


async def test_a_broken_session_is_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_receiver, "LOST_SECONDS", 0.05)
    async with running() as (supervisor, node):
        task = asyncio.create_task(generate(supervisor, [1], 100))
        await until(lambda: supervisor.client.stats.running)
        node.worker_of(1).disconnect()
        assert await task == (expected([1], 100), [""])
        assert supervisor.deaths.recoveries == {"lost": 1}


async def test_an_exit_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session of a process ends with it; its death is handled once."""
    waited: list[int] = []
    monkeypatch.setattr(event_receiver, "LOST_SECONDS", 0.3)
    monkeypatch.setattr(
        event_receiver.EventReceiver, "_on_lost", lambda self, sender, cause: waited.append(sender)
    )
    async with running() as (supervisor, node):
        node.worker_of(1).disconnect()
        await asyncio.sleep(0.1)
        node.crash(1)
        await until(lambda: supervisor.recovery.epoch == 2 and supervisor.state == "ready")
        await asyncio.sleep(0.4)
        assert supervisor.deaths.recoveries == {"killed": 1}
        assert not waited


async def test_a_frozen_worker_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_receiver, "DUMP_SECONDS", 0.02)
    async with running(freeze_timeout=0.1) as (supervisor, node):
        task = asyncio.create_task(generate(supervisor, [1], 100))
        await until(lambda: supervisor.client.stats.running)
        frozen = node.worker_of(0)
        frozen.is_frozen = True
        assert await task == (expected([1], 100), [""])
        assert supervisor.deaths.recoveries == {"frozen": 1}
        assert node.killed == [frozen.identity.sender]
    assert f"Thread of worker {frozen.identity.sender}" in caplog.text


async def test_a_long_step_is_healthy_and_pending_requests_without_a_step_are_not() -> None:
    options: dict[str, Any] = {"health_timeout": 0.1, "freeze_timeout": 0.2, "max_restarts": 0}
    async with running(**options) as (supervisor, node):

        def is_healthy() -> bool:
            return read_status(supervisor, supervisor.config).is_healthy

        task = asyncio.create_task(generate(supervisor, [1], 100))
        await until(lambda: supervisor.client.stats.running)
        node.has_endless_steps, node.long_step_began = True, time.monotonic()
        await until(lambda: supervisor.client.stalled_seconds > 0.15)
        assert is_healthy()
        node.long_step_began = None
        await until(lambda: not is_healthy())
        node.has_endless_steps = False
        await until(is_healthy)
        assert await task == (expected([1], 100), [""])


async def test_a_poison_request_ends_alone() -> None:
    async with running(max_restarts=2) as (supervisor, node):
        node.is_poison = lambda prompt: prompt == [666]
        tasks = [asyncio.create_task(generate(supervisor, [i], 300)) for i in range(1, 5)]
        await until(lambda: supervisor.client.stats.running)
        _, (kind,) = await generate(supervisor, [666])
        assert kind == "poison"
        assert [await task for task in tasks] == [(expected([i], 300), [""]) for i in range(1, 5)]
        assert supervisor.deaths.recoveries == {"killed": 3}


async def test_the_recovery_timeout_ends_parked_requests_and_the_engine_returns() -> None:
    async with running(recovery_timeout=0.3) as (supervisor, node):
        task = asyncio.create_task(generate(supervisor, [1], 300))
        await until(lambda: supervisor.client.stats.running)
        node.may_load.clear()
        node.crash(0)
        _, (kind,) = await task
        assert kind == "unavailable"
        assert (supervisor.state, supervisor.is_recovery_overdue) == ("recovering", True)
        node.may_load.set()
        await until(lambda: supervisor.state == "ready")
        assert not supervisor.is_recovery_overdue
        assert await generate(supervisor, [2]) == (expected([2]), [""])


async def test_a_standby_worker_takes_the_place() -> None:
    async with running(standby_workers=1) as (supervisor, node):
        await until(lambda: len(node.workers) == 3)
        (standby,) = [worker for worker in node.workers.values() if worker.stage is None]
        node.crash(1)
        await until(lambda: supervisor.recovery.epoch == 2 and supervisor.state == "ready")
        assert node.worker_of(1) is standby
        await until(lambda: len(node.workers) == 3)


async def test_commands_fail_while_the_engine_recovers() -> None:
    async with running() as (supervisor, node):
        assert await supervisor.reset_prefix_cache() == ""
        assert await supervisor.run_command(lambda number: StartProfile(number, "x"), 2) == ""
        node.answers_commands = False
        waiting = asyncio.create_task(supervisor.run_command(StopProfile, 2))
        await asyncio.sleep(0.05)
        node.may_load.clear()
        node.crash(1)
        assert "SIGKILL" in await waiting
        assert "recovering" in await supervisor.reset_prefix_cache()


async def test_drain_waits_for_resumed_requests() -> None:
    async with running() as (supervisor, node):
        task = asyncio.create_task(generate(supervisor, [1], 100))
        await until(lambda: supervisor.client.stats.running)
        async with recovering(supervisor, node, 1):
            draining = asyncio.create_task(supervisor.drain(20))
            await until(lambda: supervisor.state == "draining")
        await draining
        assert supervisor.state == "draining"
        assert await task == (expected([1], 100), [""])


async def test_a_death_while_draining_is_recovered() -> None:
    async with running() as (supervisor, node):
        task = asyncio.create_task(generate(supervisor, [1], 100))
        await until(lambda: supervisor.client.stats.running)
        draining = asyncio.create_task(supervisor.drain(20))
        await asyncio.sleep(0.01)
        node.crash(0)
        await draining
        assert await task == (expected([1], 100), [""])


@pytest.mark.parametrize(
    "moment", [0, 3, 5, *(pytest.param(each, marks=pytest.mark.full) for each in (1, 2, 4))]
)
async def test_stop_works_at_every_moment_of_a_recovery(moment: int, temporary: Path) -> None:
    async with running(3) as (supervisor, node):
        task = asyncio.create_task(generate(supervisor, [1], 1000))
        await until(lambda: supervisor.client.stats.running)
        if moment == 5:
            node.may_load.clear()
        node.crash(1)
        for _ in range(4**moment):
            await asyncio.sleep(0)
    _, (error,) = await task
    assert error == "the engine was stopped"
    assert not list(temporary.iterdir())


async def test_stop_before_the_start_is_harmless(temporary: Path) -> None:
    supervisor, node = create(), ScriptedNode()
    await supervisor.stop()
    await supervisor.stop()
    assert supervisor.state == "dead"
    with pytest.raises(EngineError, match="was stopped"):
        await supervisor.start(Path("demo"), node, DEFAULT_LOG_CONFIG)
    assert not node.num_spawned
    await node.stop()
    assert not list(temporary.iterdir())


class NodeWithBadStacks(ScriptedNode):
    """A node whose workers' stacks are unreadable, or text that no file can hold."""

    def __init__(self, is_readable: bool) -> None:
        super().__init__()
        self.is_readable = is_readable

    def read_stacks(self, sender: int) -> str:
        if not self.is_readable:
            raise ValueError("no stacks")
        return "\ud800"


@pytest.mark.parametrize(
    ("is_readable", "error"), [(True, "evidence of a death"), (False, "stacks of a worker")]
)
async def test_a_death_whose_evidence_cannot_be_kept_is_recovered(
    is_readable: bool, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, node = create(), NodeWithBadStacks(is_readable)
    await supervisor.start(Path("demo"), node, DEFAULT_LOG_CONFIG)
    try:
        task = asyncio.create_task(generate(supervisor, [1], 100))
        await until(lambda: supervisor.client.stats.running)
        node.crash(1)
        async with asyncio.timeout(20):
            assert await task == (expected([1], 100), [""])
        assert (supervisor.recovery.epoch, supervisor.deaths.recoveries) == (2, {"killed": 1})
    finally:
        await supervisor.stop()
    assert error in caplog.text


async def test_evidence_of_crashes_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "crashes"
    async with running(crash_folder=str(folder)) as (supervisor, node):
        for _ in range(12):
            await generate(supervisor, [1], 2)
            async with recovering(supervisor, node, 1, "was killed by SIGSEGV"):
                pass
            await until(lambda: supervisor.state == "ready")
    files = sorted(folder.iterdir())
    assert len(files) == 10
    text = files[-1].read_text()
    assert "SIGSEGV" in text
    assert "Thread of worker" in text
    assert "Heartbeat" in text


async def test_evidence_in_the_temporary_folder_is_removed_at_the_end(temporary: Path) -> None:
    async with running() as (supervisor, node):
        node.crash(0)
        await until(lambda: supervisor.recovery.epoch == 2 and supervisor.state == "ready")
        (folder,) = temporary.iterdir()
        assert len(list(folder.glob("crash-*"))) == 1
    assert not list(temporary.iterdir())
