"""Simulated worker processes: they follow gllm/runtime/worker/worker.py message by message.

Connecting and closing take random times, and each step of their lives is a moment at which a fault
may strike.
"""

from collections.abc import Callable
from typing import Any

from gllm.messages.codec import decode_for_worker
from gllm.messages.lifecycle import (
    CloseEpoch,
    EpochClosed,
    Heartbeat,
    LayersPrepared,
    Shutdown,
    StageFailed,
)
from gllm.messages.reports import StageMeasured
from gllm.recovery.liveness import CHECK_SECONDS
from gllm.runtime.head.assignment import WorkerIdentity
from tests.support.simulation.instance import Instance
from tests.support.simulation.network import Context, Spoke
from tests.support.simulation.process import Process
from tests.support.simulation.world import Assignment, World


class Worker:
    """A worker process."""

    def __init__(self, world: World, process: Process, identity: WorkerIdentity) -> None:
        self.world, self.process, self.identity = world, process, identity
        self.instance: Instance | None = None
        self.layers: tuple[int, int] | None = None
        """Layers whose weights it has."""
        self.prepared: tuple[int, int] | None = None
        """Layers that it has loaded beside its stage."""
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
        if assignment.change:
            self._prepare(assignment)
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
        self._head.advance(assignment.placement.epoch)
        self.instance = Instance(self, assignment)
        self.world.begin_instance(self.instance)
        self.instance.load()

    def _prepare(self, assignment: Assignment) -> None:
        """Load the layers of a planned change while the instance goes on; it may not succeed."""
        rng = self.world.rng
        layers = assignment.placement.layers[assignment.place.stage]
        cause = "no memory" if rng.random() < 0.1 else ""

        def report() -> None:
            self.prepared = None if cause else layers
            self.head.send(LayersPrepared(assignment.change, 1000, cause))
            self.world.on_moment("prepared", self.process)

        self.process.call_later(0.0 if self.layers == layers else rng.uniform(0.1, 3.0), report)

    def _on_measured(self, assignment: Assignment) -> None:
        """Report the speed, unless the probe was ended."""
        if not self._is_measuring:
            return
        self._is_measuring = False
        num_layers = assignment.placement.layers[-1][1]
        seconds = [0.001 * assignment.slowdown] * num_layers
        keeps_weights = self.world.rng.random() < 0.9
        measured = StageMeasured(
            assignment.place.stage,
            assignment.place.rank,
            seconds,
            0.0005,
            0.0001,
            [1] * num_layers,
            1,
            1,
            keeps_weights=keeps_weights,
        )
        self.head.send(measured)

    def fail(self, cause: str) -> None:
        """Report an error and end."""
        if not self.process.is_alive:
            return
        stage = 0
        if self.instance is not None:
            stage = self.instance.stage
            self.instance.cancel_group()
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
                case CloseEpoch():
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
            if self.instance.is_waiting:
                # The thread that computes has to end first.
                self.process.call_later(0.001, self._on_closed)
                return
            self.instance.is_closed = True
        self._is_closing = False
        self.head.send(EpochClosed())
        self.world.on_moment("closed", self.process)
