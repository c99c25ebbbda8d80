"""Simulated workers: processes with the real driver and scheduler, and stages of a fake model.

They follow gllm/runtime/worker.py and stage_instance.py message by message. Loading, computing and
closing take random times, and each step of their lives is a moment at which a fault may strike.
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from gllm.cluster.liveness import CHECK_SECONDS
from gllm.cluster.placement import Placement
from gllm.config.engine import EngineConfig
from gllm.messages.codec import decode_for_driver, decode_for_stage, decode_for_worker
from gllm.messages.lifecycle import (
    CloseGeneration,
    GenerationClosed,
    Heartbeat,
    Hello,
    InitializeCache,
    LoadProgress,
    Shutdown,
    StageFailed,
    StageLoaded,
    StageReady,
)
from gllm.messages.measurement import StageMeasured
from gllm.messages.reports import StageTimes, StageUtilization
from gllm.messages.steps import RegisterSequences, RunStep, StepDone
from gllm.runtime.assignment import WorkerIdentity
from gllm.runtime.bus import Peer
from gllm.runtime.driver import Driver
from gllm.runtime.driver_setup import dispatch_to_driver
from gllm.runtime.plan_record import PlanRecord
from gllm.scheduler.plan import StepPlan, StepTime
from gllm.scheduler.scheduler import Scheduler
from tests.simulation.model import VOCAB_SIZE, Stage, Values
from tests.simulation.network import Context, Hub, Network, Spoke
from tests.simulation.process import Process

BLOCK_SIZE = 4
NUM_BLOCKS = 48
LAYERS_PER_STAGE = 4
"""Layers per stage before other layers are chosen."""
MAX_MODEL_LEN = 96
REPORT_SECONDS = 0.5
LOST_SECONDS = 5.0
POISON_TOKEN = VOCAB_SIZE - 1
"""A prompt that begins with it kills the stage that computes it."""
BOMB_TOKEN = VOCAB_SIZE - 2
"""A prompt that begins with it kills the machine of the stage that computes it."""


@dataclass
class World:
    """What all processes share."""

    loop: Any
    rng: Random
    network: Network
    on_moment: Callable[[str, Process], None]
    """Called at each step of a process's life; it may end or stop the process."""
    instances: list["Instance"] = field(default_factory=list)
    """Open ones, of living processes and of those that died with them."""
    num_steps: int = 0
    slowness: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 10.0)
    """Factors of the times of processes, from which each draws one."""

    def begin_instance(self, instance: "Instance") -> None:
        """Check that no instance of another generation is at work."""
        self.instances = [
            each for each in self.instances if each.process.is_alive and not each.is_closed
        ]
        generation = instance.placement.generation
        for each in self.instances:
            assert each.placement.generation == generation, "two generations are at work"
        self.instances.append(instance)


@dataclass
class Assignment:
    """What a worker is assigned."""

    placement: Placement
    sender: int
    config: EngineConfig
    driver_address: str
    plan_record: int | None
    is_probe: bool = False

    @property
    def stage(self) -> int:
        stage = self.placement.stage_of(self.sender)
        assert stage is not None
        return stage


class Worker:
    """A worker process."""

    def __init__(self, world: World, process: Process, identity: WorkerIdentity) -> None:
        self.world, self.process, self.identity = world, process, identity
        self.instance: Instance | None = None
        self.layers: tuple[int, int] | None = None
        """Layers whose weights it has."""
        self._head: Spoke | None = None
        self._pending: list[Assignment] = []
        self._is_assigned = self._is_closing = self._is_measuring = False
        self.on_end: Callable[[str], None] = lambda description: None
        world.on_moment("spawn", process)
        process.call_later(world.rng.uniform(0.5, 2.0), self._connect)

    def assign(self, assignment: Assignment) -> None:
        if self._head is None:
            self._pending.append(assignment)
            return
        if self._is_assigned or self._is_closing or self._is_measuring:
            self.fail("a stage was assigned before the last one was closed")
            return
        if assignment.is_probe:
            self._is_measuring = True
            self.world.on_moment("measuring", self.process)
            delay = self.world.rng.uniform(0.1, 2.0)
            self.process.call_later(delay, self._on_measured, assignment)
            return
        self._is_assigned = True
        self._head.advance(assignment.placement.generation)
        self.instance = Instance(self, assignment)
        self.world.begin_instance(self.instance)
        self.instance.load()

    def _on_measured(self, assignment: Assignment) -> None:
        """Report the speed, unless the probe was ended."""
        if not self._is_measuring:
            return
        self._is_measuring = False
        num_layers = assignment.placement.layers[-1][1]
        seconds = [0.001 * self.slowness_of(assignment)] * num_layers
        keeps_weights = self.world.rng.random() < 0.9
        measured = StageMeasured(
            assignment.stage,
            0,
            seconds,
            0.0005,
            0.0001,
            [1] * num_layers,
            1,
            1,
            keeps_weights=keeps_weights,
        )
        self.head.send(measured)

    def slowness_of(self, assignment: Assignment) -> float:
        """Factor on the times of steps, besides that of a slow process."""
        return assignment.config.slowdown_of(assignment.stage)

    def fail(self, cause: str) -> None:
        """Report an error and end."""
        if not self.process.is_alive:
            return
        stage = self.instance.stage if self.instance is not None else 0
        self.head.send(StageFailed(stage, cause))
        self.exit(1)

    def exit(self, code: int) -> None:
        """End as a process that leaves its loop: what it has sent arrives."""
        self.process.end(is_killed=False)
        self.on_end(f"process {self.identity.sender} exited with {code}")

    @property
    def head(self) -> Spoke:
        assert self._head is not None
        return self._head

    def _connect(self) -> None:
        identity = self.identity
        context = Context(self.world.network, self.process)
        self._head = Spoke(
            context, identity.run, identity.sender, identity.hub_address, decode_for_worker
        )
        self._head.start(self._handle, lambda cause: self.fail(f"the parent was lost: {cause}"))
        self._send_heartbeat()
        self.world.on_moment("connected", self.process)
        while self._pending and self.process.is_alive:
            self.process.run(self.assign, self._pending.pop(0))

    def _send_heartbeat(self) -> None:
        step, seconds = -1, 0.0
        if self.instance is not None and self._is_assigned and self.instance.begin is not None:
            step, seconds = self.instance.step, self.world.loop.time() - self.instance.begin
        self.head.send(Heartbeat(step, seconds, 0, self.world.loop.time()))
        self.process.call_later(CHECK_SECONDS, self._send_heartbeat)

    def _handle(self, messages: list[Any]) -> None:
        for message in messages:
            match message:
                case CloseGeneration():
                    self._close_instance()
                case Shutdown():
                    self.exit(0)
                case _ if self.instance is not None and self._is_assigned:
                    self.instance.handle(message)

    def _close_instance(self) -> None:
        if self._is_closing:
            return
        self._is_closing, self._is_measuring = True, False
        self.world.on_moment("closing", self.process)
        if self.instance is not None and self._is_assigned:
            self._is_assigned = False
            self.instance.disconnect()
        delay = self.world.rng.choice([0.001, 0.05, 0.5])
        self.process.call_later(delay, self._on_closed)

    def _on_closed(self) -> None:
        if self.instance is not None:
            self.instance.is_closed = True
        self._is_closing = False
        self.head.send(GenerationClosed())
        self.world.on_moment("closed", self.process)


class Instance:
    """A stage of one generation."""

    def __init__(self, worker: Worker, assignment: Assignment) -> None:
        self.worker, self.process, self.world = worker, worker.process, worker.world
        self.assignment, self.placement = assignment, assignment.placement
        self.stage = assignment.stage
        self.is_closed = False
        """True once its threads have ended."""
        self.step = -1
        self.begin: float | None = None
        """Start of the step under way."""
        self._is_connected = True
        self._driver: Driver | None = None
        self._hub: Hub | None = None
        self._spoke: Spoke | None = None
        self._connected = 0
        num_stages = self.placement.num_stages
        self._arithmetic = Stage(BLOCK_SIZE, is_last=self.stage == num_stages - 1)
        self._prepared: deque[tuple[StepPlan, list[Any]]] = deque()
        self._hidden: dict[int, Values] = {}
        self._times: list[StepTime] = []
        self._num_steps, self._busy_seconds = 0, 0.0
        self._is_report_scheduled = False
        if self.stage == 0:
            self._hub = self._bind_hub()

    def load(self) -> None:
        rng, layers = self.world.rng, self.placement.layers[self.stage]
        num_parts = 1 if self.worker.layers == layers else rng.randint(1, 4)
        delay = 0.0
        for part in range(num_parts):
            delay += rng.uniform(0.01, 0.5)
            self.process.call_later(delay, self._on_progress, part + 1, num_parts)

    def handle(self, message: Any) -> None:
        """Handle a message of the head or of another stage."""
        if not self._is_connected:
            return
        match message:
            case RunStep(plan):
                self._run_plan(plan)
            case RegisterSequences():
                self._arithmetic.register(message)
            case InitializeCache(num_blocks):
                self.world.on_moment("initialize", self.process)
                self.process.call_later(self.world.rng.uniform(0.0, 0.2), self._start, num_blocks)
            case Hello():
                self._on_stage_connected()
            case _:
                assert self._driver is not None
                dispatch_to_driver(self._driver, message)
        if self._driver is not None:
            self._driver.run_turn()

    def disconnect(self) -> None:
        """End the sessions and the driver; a step under way goes on."""
        self._is_connected = False
        self._driver = None
        self._prepared.clear()
        for connection in (self._hub, self._spoke):
            if connection is not None:
                connection.close()

    def on_hidden(self, step: int, values: Values) -> None:
        """Receive activations of the previous stage."""
        if not self.is_closed:
            self._hidden[step] = values
            self._compute_next()

    def _on_progress(self, part: int, num_parts: int) -> None:
        if self._is_connected:
            self.worker.head.send(LoadProgress(self.stage, part, num_parts))
        self.world.on_moment("loading", self.process)
        if part == num_parts:
            self.worker.layers = self.placement.layers[self.stage]
            if self._is_connected and self.process.is_alive:
                block_bytes = (self.assignment.config.kv_cache_memory or 0) // NUM_BLOCKS
                block_bytes //= self.placement.num_stages
                self.worker.head.send(StageLoaded(self.stage, 1000, block_bytes))

    def _start(self, num_blocks: int) -> None:
        if not self._is_connected:
            return
        config = self.assignment.config.scheduler.resolve(
            self.placement.num_stages, num_blocks, MAX_MODEL_LEN
        )
        if self.stage > 0:
            context = Context(self.world.network, self.process)
            self._spoke = Spoke(
                context,
                self.worker.identity.run,
                self.worker.identity.sender,
                self.assignment.driver_address,
                decode_for_stage,
            )
            self._spoke.advance(self.placement.generation)
            self._spoke.start(lambda messages: [*map(self.handle, messages)], self._on_lost)
            self.worker.head.send(StageReady(self.stage))
            return
        assert self._hub is not None
        record = None
        if self.assignment.plan_record is not None:
            assert config.max_in_flight is not None
            record = PlanRecord(
                self.assignment.plan_record, config.max_in_flight, config.max_num_seqs
            )
            os.close(self.assignment.plan_record)
        self._driver = Driver(
            Scheduler(config),
            self._on_own_command,
            [Peer(self._hub, sender) for sender in self.placement.senders[1:]],  # type: ignore[arg-type]
            self.worker.head,
            vocab_size=VOCAB_SIZE,
            plan_record=record,
        )
        self._on_stage_connected()

    def _on_own_command(self, message: Any) -> None:
        if isinstance(message, RunStep):
            self._run_plan(message.plan)
        else:
            self._arithmetic.register(message)

    def _bind_hub(self) -> Hub:
        context = Context(self.world.network, self.process)
        hub = Hub(context, self.worker.identity.run, decode_for_driver)
        hub.advance(self.placement.generation)
        hub.bind(self.assignment.driver_address)
        for sender in self.placement.senders[1:]:
            hub.expect(sender)
        hub.start(
            lambda messages: [*map(self.handle, (message for _, message in messages))],
            lambda _, cause: self._on_lost(cause),
        )
        return hub

    def _on_stage_connected(self) -> None:
        self._connected += 1
        if self._connected == self.placement.num_stages:
            self.worker.head.send(StageReady(0))
            self.world.on_moment("ready", self.process)

    def _on_lost(self, cause: str) -> None:
        self.process.call_later(LOST_SECONDS, self._fail, f"another stage was lost: {cause}")

    def _fail(self, cause: str) -> None:
        if self._is_connected:
            self.worker.fail(cause)

    def _run_plan(self, plan: StepPlan) -> None:
        self._prepared.append((plan, self._arithmetic.prepare(plan)))
        self._schedule_report()
        self._compute_next()

    def _compute_next(self) -> None:
        if self.begin is not None or not self._prepared:
            return
        plan, rows = self._prepared[0]
        if self.stage > 0 and plan.step not in self._hidden:
            return
        self._prepared.popleft()
        self.step, self.begin = plan.step, self.world.loop.time()
        kind = "decode" if all(row.num_tokens == 1 for row in plan.rows) else "prefill"
        self.world.on_moment(kind, self.process)
        for token, moment in ((POISON_TOKEN, "poison"), (BOMB_TOKEN, "bomb")):
            if any(prompt[:1] == [token] for _, prompt, _ in rows):
                self.world.on_moment(moment, self.process)
        num_tokens = sum(row.num_tokens for row in plan.rows)
        seconds = self.world.rng.uniform(0.5, 1.5) * (0.002 + 0.0005 * num_tokens)
        begin, end = self.placement.layers[self.stage]
        seconds *= self.worker.slowness_of(self.assignment) * (end - begin) / LAYERS_PER_STAGE
        self.process.call_later(seconds, self._finish, plan, rows)

    def _finish(self, plan: StepPlan, rows: list[Any]) -> None:
        assert self.begin is not None
        begin, self.begin = self.begin, None
        self.world.num_steps += 1
        if self.is_closed:
            return
        now = self.world.loop.time()
        values = self._arithmetic.compute(rows, self._hidden.pop(plan.step, None))
        self._times.append(StepTime(plan.step, begin, now))
        self._num_steps += 1
        self._busy_seconds += now - begin
        if self._arithmetic.is_last:
            result = StepDone(self._arithmetic.sample(plan, values))
            if self._is_connected:
                self._send_to_driver(result)
        else:
            self._send_hidden(plan.step, values)
        self._compute_next()

    def _send_hidden(self, step: int, values: Values) -> None:
        """Write activations to the edge to the next stage."""
        for each in self.world.instances:
            if each.stage == self.stage + 1 and each.placement == self.placement:
                delay = self.world.rng.uniform(0.0, 0.001)
                self.world.loop.call_later(
                    delay, each.process.run, partial(each.on_hidden, step, values)
                )

    def _send_to_driver(self, message: Any) -> None:
        if self._spoke is not None:
            self._spoke.send(message)
        else:
            self.handle(message)

    def _schedule_report(self) -> None:
        if not self._is_report_scheduled:
            self._is_report_scheduled = True
            self.process.call_later(REPORT_SECONDS, self._report)

    def _report(self) -> None:
        self._is_report_scheduled = False
        if not self._is_connected:
            return
        self.worker.head.send(StageUtilization(self.stage, self._num_steps, self._busy_seconds))
        times, self._times = self._times, []
        until = self.world.loop.time() if self.begin is None else self.begin
        self._send_to_driver(StageTimes(self.stage, times, until))
        if times or self._prepared or self.begin is not None:
            self._schedule_report()
