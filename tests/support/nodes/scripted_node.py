"""Workers without a model on the test's event loop: real sessions with the head, scripted faults.

The driver's token is a function of the prompt and the position, so that a request's output shows
whether it was resumed where it ended. Its prefix cache has one block, named after the process.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq

from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_for_worker
from gllm.messages.kv_cache import KvCacheEvents, WatchKvCache
from gllm.messages.lifecycle import (
    CloseEpoch,
    CommandDone,
    EpochClosed,
    Heartbeat,
    InitializeCache,
    LayersPrepared,
    LoadProgress,
    ResetPrefixCache,
    Shutdown,
    StageFailed,
    StageLoaded,
    StageReady,
    StartProfile,
    StopProfile,
)
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.recovery.liveness import ProcessSample
from gllm.runtime.driver.plan_record import PlanRecord
from gllm.runtime.head.assignment import StageAssignment, WorkerIdentity
from gllm.runtime.head.node import Node, OnExit
from gllm.runtime.messaging.bus import Spoke
from gllm.scheduler.cache_events import StoredBlocks
from gllm.scheduler.plan import (
    FinishedSequence,
    FirstToken,
    ScheduledRow,
    SchedulerStats,
    StepOutput,
    StepPlan,
)

STEP_SECONDS = 0.002
"""Time of a step."""


def token_of(prompt: list[int], choice: int, index: int) -> int:
    """Return the output token of a choice at an index."""
    return (31 * sum(prompt) + 17 * choice + 7 * index) % 997


class Running:
    """A sequence in the scripted driver."""

    def __init__(self, request: SubmitRequest, position: int) -> None:
        self.prompt = request.prompt
        self.choice = request.choices[position] if request.choices else position
        self.num_tokens = len(request.outputs[position]) if request.outputs else 0
        self.max_tokens = request.max_tokens


class ScriptedWorker:
    """One worker: answers the head's commands; in the first place it is the driver."""

    def __init__(self, node: "ScriptedNode", identity: WorkerIdentity) -> None:
        self.node, self.identity = node, identity
        self.stage: int | None = None
        self.rank = 0
        self.has_driver = False
        self.is_alive = True
        self.is_frozen = False
        self._spoke = Spoke(
            node.context, identity.run, identity.sender, identity.hub_address, decode_for_worker
        )
        self._spoke.start(self._on_messages, lambda cause: None)
        self._running: dict[int, Running] = {}
        self._record: PlanRecord | None = None
        self._descriptor: int | None = None
        self._step = 0
        self._tasks = [asyncio.create_task(self._beat())]

    def assign(self, assignment: StageAssignment) -> None:
        """Begin an epoch, or prepare a planned change."""
        if assignment.change:
            self.send(LayersPrepared(assignment.change, 0))
            return
        stage = self.stage = assignment.stage
        self.rank, self.has_driver = assignment.rank, assignment.has_driver
        self._spoke.advance(assignment.placement.epoch)
        if assignment.plan_record is not None:
            self._descriptor = os.dup(assignment.plan_record)
            self._record = PlanRecord(self._descriptor, 1, 64)
        if self.node.deaths_at_load[stage]:
            self.node.deaths_at_load[stage] -= 1
            self.node.exit(self.identity.sender, "exited with 1")
        elif cause := self.node.failures_at_load.get(stage):
            self.send(StageFailed(stage, cause))
        else:
            self._tasks.append(asyncio.create_task(self._load(stage)))

    def send(self, message: WireMessage) -> None:
        """Send a message to the head."""
        if self.is_alive:
            self._spoke.send(message)

    def disconnect(self) -> None:
        """End the session with the head; the process goes on."""
        self._spoke.close()

    def end(self) -> None:
        """End at once."""
        self.is_alive = False
        self._close_instance()
        for task in self._tasks:
            task.cancel()
        self._spoke.close()

    def _close_instance(self) -> None:
        self._running.clear()
        if self._record is not None and self._descriptor is not None:
            self._record.close()
            os.close(self._descriptor)
            self._record = None

    async def _beat(self) -> None:
        while True:
            if not self.is_frozen:
                began = self.node.long_step_began
                step = (-1, 0.0, 0) if began is None else (9, time.monotonic() - began, 5)
                self.send(Heartbeat(*step, 0.0))
            await asyncio.sleep(0.02)

    async def _load(self, stage: int) -> None:
        self.send(LoadProgress(stage, 1, 2))
        await self.node.may_load.wait()
        self.send(LoadProgress(stage, 2, 2))
        self.send(StageLoaded(stage, 100, 10))

    def _on_messages(self, messages: list[Any]) -> None:
        for message in messages:
            if self.is_alive and not self.is_frozen:
                self._on_message(message)

    def _on_message(self, message: Any) -> None:
        assert self.stage is not None or isinstance(message, Shutdown)
        match message:
            case InitializeCache(num_blocks):
                self.node.block_counts.append(num_blocks)
                self.send(StageReady(self.stage or 0))
                if self.has_driver:
                    self._tasks.append(asyncio.create_task(self._run_steps()))
            case CloseEpoch():
                for task in self._tasks[1:]:
                    task.cancel()
                self._close_instance()
                self.send(EpochClosed())
            case SubmitRequest(seq):
                for position in range(message.n):
                    self._running[seq + position] = Running(message, position)
            case AbortSequences(seqs):
                for seq in seqs:
                    self._running.pop(seq, None)
                self._report(StepOutput([], [], [], []))
            case ResetPrefixCache(number) | StartProfile(number) | StopProfile(number):
                if self.node.answers_commands:
                    self.send(CommandDone(number, self.stage or 0))
            case WatchKvCache(True):
                stored = [StoredBlocks(b"", [b"block %d" % self.identity.sender])]
                self.send(KvCacheEvents(0, stored, [], True))
            case Shutdown():
                self.node.exit(self.identity.sender, "exited with 0")

    async def _run_steps(self) -> None:
        """Compute one token of all sequences per step."""
        while True:
            await asyncio.sleep(STEP_SECONDS)
            if self._running and not (self.is_frozen or self.node.has_endless_steps):
                self._run_step()

    def _run_step(self) -> None:
        self._step += 1
        rows = [ScheduledRow(seq, 0, 0, 1, [], [], True) for seq in self._running]
        assert self._record is not None
        self._record.on_scheduled(StepPlan(self._step, rows, []))
        if any(self.node.is_poison(each.prompt) for each in self._running.values()):
            self.node.exit(self.identity.sender, "was killed by SIGSEGV")
            return
        self._record.on_committed(self._step)
        tokens, first, finished = [], [], []
        for seq, each in self._running.items():
            if not each.num_tokens:
                first.append(FirstToken(seq, 0, 0.0))
            tokens.append(token_of(each.prompt, each.choice, each.num_tokens))
            each.num_tokens += 1
            if each.num_tokens == each.max_tokens:
                finished.append(FinishedSequence(seq, "length"))
        outcome = StepOutput(list(self._running), tokens, first, finished, len(tokens))
        for end in finished:
            del self._running[end.seq]
        self._report(outcome)

    def _report(self, outcome: StepOutput) -> None:
        self.send(EngineOutputs(outcome, SchedulerStats(running=len(self._running))))


class ScriptedNode(Node):
    """Node of scripted workers."""

    def __init__(self) -> None:
        super().__init__("gllm-test")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.workers: dict[int, ScriptedWorker] = {}
        """Living workers by sender."""
        self.num_spawned = 0
        self.killed: list[int] = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.deaths_at_load: Counter[int] = Counter()
        """Deaths that are still to happen when the stage loads, by stage."""
        self.failures_at_load: dict[int, str] = {}
        self.spawn_errors = 0
        """Spawns that are still to fail."""
        self.is_poison: Callable[[list[int]], bool] = lambda prompt: False
        self.answers_commands = True
        self.has_endless_steps = False
        """No step ends."""
        self.long_step_began: float | None = None
        """Begin of the step that heartbeats report, whose process uses a core."""
        self.block_counts: list[int] = []
        self._on_exit: OnExit | None = None

    def worker_of(self, stage: int, rank: int = 0) -> ScriptedWorker:
        """Return the living worker of a rank of a stage."""
        workers = self.workers.values()
        return next(each for each in workers if (each.stage, each.rank) == (stage, rank))

    def crash(self, stage: int, how: str = "was killed by SIGKILL", rank: int = 0) -> None:
        """Let the worker of a rank of a stage die."""
        self.exit(self.worker_of(stage, rank).identity.sender, how)

    def exit(self, sender: int, how: str) -> None:
        """End a worker and report its exit."""
        if worker := self.workers.pop(sender, None):
            worker.end()
            asyncio.get_running_loop().call_soon(self._report, sender, f"process {sender} {how}")

    def _report(self, sender: int, description: str) -> None:
        if self._on_exit is not None:
            self._on_exit(sender, description)

    def watch(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit

    def spawn(self, identity: WorkerIdentity) -> None:
        if self.spawn_errors:
            self.spawn_errors -= 1
            raise BlockingIOError("no process is left")
        self.num_spawned += 1
        self.workers[identity.sender] = ScriptedWorker(self, identity)

    def kill(self, sender: int) -> None:
        self.killed.append(sender)
        self.exit(sender, "was killed by SIGKILL")

    def sample(self, sender: int) -> ProcessSample | None:
        worker = self.workers.get(sender)
        seconds = 0.0 if self.long_step_began is None else time.monotonic()
        return None if worker is None else ProcessSample(worker.is_frozen, seconds)

    def dump_stacks(self, sender: int) -> None:
        pass

    def read_stacks(self, sender: int) -> str:
        return f"Thread of worker {sender}"

    async def stop(self) -> None:
        async with asyncio.timeout(5):
            while self.workers:
                await asyncio.sleep(0.005)
        self.close_kv_files()
        self.on_epoch_ready()
        self.context.term()

    def _send(self, assignment: StageAssignment) -> None:
        if worker := self.workers.get(assignment.sender):
            worker.assign(assignment)
