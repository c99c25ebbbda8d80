"""A simulated node: it spawns, kills and reaps simulated workers."""

import asyncio
import os
from pathlib import Path

from gllm.recovery.liveness import ProcessSample
from gllm.recovery.placement import LOCAL_NODE
from gllm.runtime.head.assignment import NodeAssignment, StageAssignment, WorkerIdentity
from gllm.runtime.head.node import Node, OnExit
from tests.support.simulation.links import SimulatedLinks
from tests.support.simulation.process import Process
from tests.support.simulation.rank_group import RankGroup
from tests.support.simulation.workers import Worker
from tests.support.simulation.world import Assignment, World


class SimulatedNode(Node):
    """Workers on the virtual clock."""

    def __init__(
        self, world: World, node_name: str = LOCAL_NODE, machine: Process | None = None
    ) -> None:
        super().__init__("simulated", node_name)
        self.world = world
        self.machine = machine
        """Process of the machine's agent, or of the head."""
        self.workers: dict[int, Worker] = {}
        """Those that have not been reaped."""
        self.num_deaths = 0
        """Ends of processes that nobody asked for, and those of the killed ones."""
        self._on_exit: OnExit | None = None
        self._address = ""

    def watch(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit

    def spawn(self, identity: WorkerIdentity) -> None:
        process = Process(self.world.loop, f"worker {identity.sender}")
        process.slowness = self.world.rng.choice(self.world.slowness)
        process.machine = self.machine or process
        worker = self.workers[identity.sender] = Worker(self.world, process, identity)
        worker.on_end = lambda description: self._reap(identity.sender, description)
        if not process.is_alive:
            self._reap(identity.sender, f"process {identity.sender} was killed by SIGKILL")

    def kill(self, sender: int) -> None:
        worker = self.workers.get(sender)
        if worker is not None and worker.process.is_alive:
            worker.process.end(is_killed=True)
            self._reap(sender, f"process {sender} was killed by SIGKILL")

    def sample(self, sender: int) -> ProcessSample | None:
        worker = self.workers.get(sender)
        if worker is None or not worker.process.is_alive:
            return None
        stopped = worker.process.is_stopped
        return ProcessSample(stopped, 0.0 if stopped else self.world.loop.time())

    def dump_stacks(self, sender: int) -> None:
        """There are none."""

    def read_stacks(self, sender: int) -> str:
        return ""

    async def stop(self) -> None:
        deadline = self.world.loop.time() + 5.0
        while self.workers and self.world.loop.time() < deadline:
            await asyncio.sleep(0.01)
        for sender in list(self.workers):
            self.kill(sender)
        self._on_exit = None

    def prepare(self, assignment: NodeAssignment, folder: Path, node: str | None = None) -> None:
        if node not in (None, self.node_name):
            return
        for place in assignment.placement.workers_on(self.node_name):
            if (worker := self.workers.get(place.sender)) is not None:
                own = Assignment(
                    assignment.placement,
                    place.sender,
                    assignment.config,
                    "",
                    None,
                    None,
                    assignment.is_probe,
                    assignment.change,
                )
                self._assign(worker, own)

    def assign(
        self,
        assignment: NodeAssignment,
        folder: Path,
        plan_record: int | None = None,
        output_lengths: dict[int, list[int]] | None = None,
    ) -> None:
        self.on_epoch_ready()
        placement, config = assignment.placement, assignment.config
        self._address = f"driver of {placement.epoch} for {self.node_name}"
        loop, rng = self.world.loop, self.world.rng
        groups = [RankGroup(loop, rng, size) if size > 1 else None for size in placement.degrees]
        for index, place in enumerate(placement.workers):
            worker = self.workers.get(place.sender)
            if worker is None:
                continue
            record = os.dup(plan_record) if index == 0 and plan_record is not None else None
            group = groups[place.stage]
            assert place.node == self.node_name
            stage = Assignment(placement, place.sender, config, self._address, record, group)
            self._assign(worker, stage)

        if isinstance(self.remote_edges, SimulatedLinks):
            self.remote_edges.open_edges(placement, self.node_name)

    @property
    def driver_address(self) -> str:
        return self._address

    def _assign(self, worker: Worker, assignment: Assignment) -> None:
        """Send an assignment, which arrives a little later."""
        self.world.loop.call_later(
            self.world.rng.uniform(0.0, 0.01), worker.process.run, worker.assign, assignment
        )

    def on_epoch_ready(self) -> None:
        self.world.network.bound.pop(self._address, None)

    def _send(self, assignment: StageAssignment) -> None:
        raise NotImplementedError

    def power_off(self) -> None:
        """End all workers; nobody learns of it."""
        for worker in self.workers.values():
            if worker.process.is_alive:
                self.num_deaths += 1
                worker.process.end(is_killed=True)
        self.workers.clear()
        self._on_exit = None

    def _reap(self, sender: int, description: str) -> None:
        self.num_deaths += 1
        self.world.loop.call_later(
            self.world.rng.choice([0.0001, 0.01, 0.3]), self._report, sender, description
        )

    def _report(self, sender: int, description: str) -> None:
        self.workers.pop(sender, None)
        if self._on_exit is not None:
            self._on_exit(sender, description)
