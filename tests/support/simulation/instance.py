"""Simulated stages: the real driver and scheduler, and ranks of a fake model.

They follow gllm/runtime/worker/stage_instance.py message by message. Loading and computing take
random times.
"""

import os
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from gllm.messages.codec import decode_for_driver, decode_for_stage
from gllm.messages.lifecycle import Hello, InitializeCache, LoadProgress, StageLoaded, StageReady
from gllm.messages.reports import StageTimes, StageUtilization
from gllm.messages.steps import RegisterSequences, RunStep, StepDone
from gllm.runtime.driver.driver import Driver
from gllm.runtime.driver.plan_record import PlanRecord
from gllm.runtime.worker.stage_sessions import RankPeers
from gllm.scheduler.plan import StepPlan, StepTime
from gllm.scheduler.scheduler import Scheduler
from tests.support.simulation.model import VOCAB_SIZE, Rows, Stage, Values, combine
from tests.support.simulation.network import Context, Hub, Spoke
from tests.support.simulation.rank_group import OnParts, Wait
from tests.support.simulation.world import (
    BLOCK_SIZE,
    BOMB_TOKEN,
    LAYERS_PER_STAGE,
    LOST_SECONDS,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    POISON_TOKEN,
    REPORT_SECONDS,
    Assignment,
)

if TYPE_CHECKING:
    from tests.support.simulation.workers import Worker


class Instance:
    """A rank of a stage in one epoch."""

    def __init__(self, worker: "Worker", assignment: Assignment) -> None:
        self.worker, self.process, self.world = worker, worker.process, worker.world
        self.assignment, self.placement = assignment, assignment.placement
        self.stage, self.rank = assignment.place.stage, assignment.place.rank
        self.has_driver = (self.stage, self.rank) == (0, 0)
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
        self._is_last = self.stage == self.placement.num_stages - 1
        num_ranks = self.placement.degrees[self.stage]
        has_sampler = self._is_last and self.rank == 0
        self._arithmetic = Stage(BLOCK_SIZE, has_sampler, self.rank, num_ranks)
        self.is_waiting = False
        """True while it waits for the other ranks of its stage."""
        self._is_busy = False
        """True from the moment at which it waits for the other ranks to the end of a step."""
        self._prepared: deque[tuple[StepPlan, Rows]] = deque()
        self._hidden: dict[int, Values] = {}
        self._times: list[StepTime] = []
        self._num_steps, self._busy_seconds = 0, 0.0
        self._is_report_scheduled = False
        if self.has_driver:
            self._hub = self._bind_hub()

    def load(self) -> None:
        rng, layers = self.world.rng, self.placement.layers[self.stage]
        is_held = layers in (self.worker.layers, self.worker.prepared)
        num_parts = 1 if is_held else rng.randint(1, 4)
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
            case InitializeCache(num_blocks, num_state_slots):
                self.world.on_moment("initialize", self.process)
                delay = self.world.rng.uniform(0.0, 0.2)
                self.process.call_later(delay, self._start, num_blocks, num_state_slots)
            case Hello():
                self._on_stage_connected()
            case _:
                assert self._driver is not None
                self._driver.handle(message)
        if self._driver is not None:
            self._driver.run_iteration()

    def disconnect(self) -> None:
        """End the sessions and the driver; a step of a single rank goes on."""
        self.cancel_group()
        self._is_connected = False
        self._driver = None
        self._prepared.clear()
        for connection in (self._hub, self._spoke):
            if connection is not None:
                connection.close()

    def cancel_group(self) -> None:
        """End the steps of all ranks of the stage, now and later."""
        if self.assignment.group is not None:
            self.assignment.group.cancel()

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
                block_bytes //= len(self.placement.workers)
                self.worker.head.send(
                    StageLoaded(
                        self.stage,
                        1000,
                        block_bytes,
                        host_available_bytes=self._count_available_bytes(),
                        state_bytes=self.world.state_bytes,
                    )
                )

    def _count_available_bytes(self) -> int | None:
        """Return the memory of the machine, which suffices for the stages that it has."""
        if self.placement.num_stages == self.world.short_num_stages:
            return 1
        if (per_worker := self.world.memory_per_worker) is None:
            return None
        return per_worker * len(self.placement.workers_on(self.assignment.place.node))

    def _start(self, num_blocks: int, num_state_slots: int) -> None:
        if not self._is_connected:
            return
        config = self.assignment.config.scheduler.resolve(
            self.placement.num_stages,
            num_blocks,
            MAX_MODEL_LEN,
            num_state_slots=num_state_slots,
        )
        if not self.has_driver:
            context = Context(self.world.network, self.process)
            self._spoke = Spoke(
                context,
                self.worker.identity.run,
                self.worker.identity.sender,
                self.assignment.driver_address,
                decode_for_stage,
            )
            self._spoke.advance(self.placement.epoch)
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
        own, *others = [
            RankPeers(self._hub, [each.sender for each in self.placement.workers_of(stage)])  # type: ignore[arg-type]
            for stage in range(self.placement.num_stages)
        ]
        own.senders.remove(self.assignment.sender)
        self._driver = Driver(
            Scheduler(config),
            self._on_own_command,
            [*others],
            self.worker.head,
            vocab_size=VOCAB_SIZE,
            plan_record=record,
            first_stage_ranks=own if own.senders else None,
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
        hub.advance(self.placement.epoch)
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
        if self._connected == len(self.placement.workers):
            self.worker.head.send(StageReady(0))
            self.world.on_moment("ready", self.process)

    def _on_lost(self, cause: str) -> None:
        self.process.call_later(LOST_SECONDS, self._fail, f"another worker was lost: {cause}")

    def _fail(self, cause: str) -> None:
        if self._is_connected:
            self.worker.fail(cause)

    def _run_plan(self, plan: StepPlan) -> None:
        self._prepared.append((plan, self._arithmetic.prepare(plan)))
        self._schedule_report()
        self._compute_next()

    def _compute_next(self) -> None:
        if self._is_busy or not self._prepared:
            return
        plan, rows = self._prepared[0]
        if self.stage > 0 and plan.step not in self._hidden:
            return
        self._prepared.popleft()
        self._is_busy = True
        self._exchange(("meet", plan.step), None, lambda _: self._begin(plan, rows))

    def _exchange(self, kind: tuple[Any, ...], part: Any, on_parts: OnParts) -> None:
        """Take part in a collective of the stage's ranks; a single rank has all parts."""
        group = self.assignment.group
        if group is None:
            on_parts([part])
        else:
            self.is_waiting = True
            wait = Wait(self.process, part, partial(self._on_parts, on_parts), self._on_closed)
            self.process.run(group.exchange, self.rank, kind, wait)

    def _on_parts(self, on_parts: OnParts, parts: list[Any]) -> None:
        self.is_waiting = False
        on_parts(parts)

    def _on_closed(self) -> None:
        """End the step, because the group was cancelled: the parent closes the instance soon."""
        self.begin, self.is_waiting = None, False
        self.process.call_later(LOST_SECONDS, self._fail, "another rank was lost")

    def _begin(self, plan: StepPlan, rows: Rows) -> None:
        """Begin to compute a step that all ranks have reached."""
        if self.is_closed:
            return
        self.step, self.begin = plan.step, self.world.loop.time()
        kind = "decode" if all(row.num_tokens == 1 for row in plan.rows) else "prefill"
        self.world.on_moment(kind, self.process)
        if any(prompt[:1] == [POISON_TOKEN] for _, prompt, *_ in rows):
            self.world.on_moment("poison", self.process)
        if self._has_bomb(rows):
            self.world.on_moment("bomb", self.process)
        num_tokens = sum(row.num_tokens for row in plan.rows)
        seconds = self.world.rng.uniform(0.5, 1.5) * (0.002 + 0.0005 * num_tokens)
        first, end = self.placement.layers[self.stage]
        seconds *= self.assignment.slowdown * (end - first) / LAYERS_PER_STAGE
        placeholders = self._arithmetic.placeholders(rows)
        compute = partial(self.process.call_later, seconds, self._attend, plan, rows)
        if placeholders and self.stage == 0:
            self._exchange(("broadcast", plan.step), placeholders, lambda parts: compute(parts[0]))
        else:
            compute(placeholders)

    def _has_bomb(self, rows: Rows) -> bool:
        """Return True if a row's prompt begins with BOMB_TOKEN; only stage 0 has the prompts."""
        life = self.worker.identity.run, self.placement.epoch
        keys = [(*life, row.seq) for row, *_ in rows]
        if self.stage == 0:
            bombs = zip(keys, rows, strict=True)
            self.world.bombs |= {
                key for key, (_, prompt, *_) in bombs if prompt[:1] == [BOMB_TOKEN]
            }
        return not self.world.bombs.isdisjoint(keys)

    def _attend(self, plan: StepPlan, rows: Rows, placeholders: list[int]) -> None:
        """Combine the values in the ranks' blocks, then compute those of the step."""
        if self.is_closed:
            self.begin = None
            return

        def compute(parts: list[Values]) -> None:
            hidden = self._hidden.pop(plan.step, None)
            part = self._arithmetic.compute(rows, combine(parts), hidden, placeholders)
            finish = partial(self._finish, plan)
            self._exchange(("sum", plan.step, 1), part, lambda parts: finish(combine(parts)))

        self._exchange(("sum", plan.step, 0), self._arithmetic.previous(rows), compute)

    def _finish(self, plan: StepPlan, values: Values) -> None:
        assert self.begin is not None
        begin, self.begin = self.begin, None
        self.world.num_steps += 1
        self._is_busy = False
        if self.is_closed:
            return
        now = self.world.loop.time()
        self._times.append(StepTime(plan.step, begin, now))
        self._num_steps += 1
        self._busy_seconds += now - begin
        if self._arithmetic.has_sampler:
            result = StepDone(self._arithmetic.sample(plan, values))
            if self._is_connected:
                self._send_to_driver(result)
        elif not self._is_last:
            self._send_hidden(plan.step, values)
        self._compute_next()

    def _send_hidden(self, step: int, values: Values) -> None:
        """Write activations to the edges to the next stage."""
        targets = {
            (edge.target, edge.target_rank)
            for edge in self.placement.edges
            if (edge.source, edge.source_rank) == (self.stage, self.rank)
        }
        for each in self.world.instances:
            if (each.stage, each.rank) in targets and each.placement == self.placement:
                delay = self.world.rng.uniform(0.0, 0.001)
                self.world.loop.call_later(delay, self._deliver, each, step, values)

    def _deliver(self, target: "Instance", step: int, values: Values) -> None:
        """Let activations arrive, once no partition separates the machines any more."""
        if self.world.network.is_separated(self.process.machine, target.process.machine):
            if not self.is_closed:
                self.world.loop.call_later(0.1, self._deliver, target, step, values)
            return
        target.process.run(partial(target.on_hidden, step, values))

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
        self.worker.head.send(
            StageUtilization(self.stage, self._num_steps, self._busy_seconds, rank=self.rank)
        )
        times, self._times = self._times, []
        until = self.world.loop.time() if self.begin is None else self.begin
        if self.rank == 0:
            self._send_to_driver(StageTimes(self.stage, times, until))
        if times or self._prepared or self.begin is not None:
            self._schedule_report()
