"""Lives of engines on several machines, which lose power, their network, and return."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gllm import __version__
from gllm.config.nodes import NodesConfig
from gllm.messages.node_report import NodeDrainError, UnknownNodeError
from gllm.messages.nodes import PROTOCOL, NodeFacts, NodeLoad
from gllm.observability.logs import DEFAULT_LOG_CONFIG
from gllm.recovery.join_check import JoinFacts
from gllm.recovery.placement import LOCAL_NODE
from gllm.runtime.driver import driver_relay
from gllm.runtime.head import cluster_head, node_hub
from gllm.runtime.head.cluster_head import ClusterHead
from gllm.runtime.head.supervisor import EngineError
from gllm.runtime.node import agent_workers, head_session, membership
from tests.support.simulation.head import HEAD, HubAddress, Part, patched_runtime
from tests.support.simulation.links import LINK_WORLD, SimulatedLinks
from tests.support.simulation.machines import HEAD_ADDRESS, Machine
from tests.support.simulation.network import Context, Hub, Spoke
from tests.support.simulation.process import Process
from tests.support.simulation.scenario import Limits, Scenario
from tests.support.simulation.workers import Worker
from tests.support.simulation.world import BOMB_TOKEN

BOMB_SECONDS = 2.0
"""Time after which a machine starts again that a poison request has powered off."""


@dataclass
class NodeLimits(Limits):
    """Size of a life on several machines."""

    num_nodes: int = 2
    num_spares: int = 0
    num_node_faults: int = 0
    has_bombs: bool = False
    """True if poison requests power off the machines that compute them, but not the head's."""
    can_repartition: bool = True
    """False if each machine has memory for the stages that it has, and no more."""
    short_num_stages: int = 0
    """Number of stages whose memory turns out not to suffice."""
    node_strikes: tuple[tuple[float, str, int, float], ...] = ()
    """Faults at given times after the start of requests: kind, number of the machine from 0, and
    seconds until it is over. In place of those that are drawn."""


class NodeScenario(Scenario):
    """Draws a life from a seed and plays it."""

    def __init__(self, seed: int, limits: NodeLimits) -> None:
        self.node_limits = limits
        super().__init__(seed, limits)
        self.head = Process(self.loop, "head")
        self.node.machine = self.head
        self.world.short_num_stages = limits.short_num_stages
        if not limits.can_repartition:
            self.world.memory_per_worker = 26_000
        self.machines = [
            Machine(self.world, f"node-{rank}", rank, is_spare=False)
            for rank in range(1, limits.num_nodes)
        ]
        self.machines += [
            Machine(self.world, f"spare-{number}", None, is_spare=True)
            for number in range(limits.num_spares)
        ]
        self.nodes_used: list[list[str]] = []
        """Names of the nodes of the stages of each epoch."""
        self._is_ending = False
        self.cluster: ClusterHead | None = None
        self.absences: dict[str, float] = {}
        """Time for which each drained machine stays away, by name."""
        self.drained: list[str] = []
        """Machines that have been drained, in order."""
        if limits.has_bombs:
            self.poison_token = BOMB_TOKEN

    async def _start(self) -> None:
        facts = JoinFacts(PROTOCOL, __version__, "demo", "", b"")
        links: Any = SimulatedLinks
        cluster = self.cluster = ClusterHead(
            self._nodes_config(), None, facts, self.degrees, 60.0, make_links=links
        )
        # A machine that the head has lost may compute on for a while; what it sends is dropped.
        members = cluster.hub.sessions
        self.world.is_lost = lambda process: (
            process is not self.head and (process.name not in members)
        )
        for machine in self.machines:
            self.loop.call_later(self.rng.uniform(0.0, 3.0), self._switch_on, machine)
        names = await cluster.form()
        self.supervisor.set_nodes(names, cluster.machines)
        self.supervisor.add_change_listener(self._on_change)
        self._draw_node_faults()
        await self.supervisor.start(Path("demo"), self.node, DEFAULT_LOG_CONFIG, cluster)

    def _on_change(self) -> None:
        placement = self.supervisor.recovery.placement
        if placement is not None and placement.epoch > len(self.nodes_used):
            nodes = {worker.stage: worker.node for worker in placement.workers}
            self.nodes_used.append(list(nodes.values()))

    # Faults.

    def _draw_node_faults(self) -> None:
        rng, now = self.rng, self.loop.time()
        for when, kind, number, seconds in self.node_limits.node_strikes:
            self.loop.call_at(now + when, self._strike_node, kind, self.machines[number], seconds)
        for _ in range(self.node_limits.num_node_faults):
            when = now + rng.uniform(0.0, self.limits.seconds)
            kind = rng.choice(["power", "power", "network", "drain", "drain"])
            seconds = rng.choice([0.5, 3.0, 8.0, 30.0, 200.0])
            self.loop.call_at(when, self._strike_node, kind, rng.choice(self.machines), seconds)

    def on_moment(self, moment: str, process: Process) -> None:
        if moment != "bomb":
            super().on_moment(moment, process)
            return
        for machine in self.machines:
            if machine.process is process.machine:
                self.faults["bomb"] += 1
                machine.power_off()
                self.loop.call_later(BOMB_SECONDS, self._switch_on, machine)

    def _strike_node(self, kind: str, machine: Machine, seconds: float) -> None:
        if self._is_ending or not machine.is_on:
            return
        self.faults[f"{kind} of a machine"] += 1
        if kind == "drain":
            self._drain(machine, seconds)
        elif kind == "power":
            machine.power_off()
            self.loop.call_later(seconds, self._switch_on, machine)
        else:
            process = machine.process
            others = [self.head, *(each.process for each in self.machines)]
            for other in others:
                if other is not process:
                    self.network.separate(process, other)
            self.loop.call_later(seconds, self._unite, process, others)

    def _drain(self, machine: Machine, seconds: float) -> None:
        """Take a machine out of the engine, if that is possible now; it joins again later."""
        assert self.cluster is not None
        try:
            for _ in range(2):
                self.cluster.drain(machine.name, self._check_ready)
        except (UnknownNodeError, NodeDrainError, EngineError):
            return
        self.absences[machine.name] = seconds

    def _check_ready(self) -> None:
        if self.supervisor.state != "ready":
            raise EngineError(self.supervisor.state)

    def _unite(self, process: Process, others: list[Process]) -> None:
        for other in others:
            self.network.unite(process, other)

    def _switch_on(self, machine: Machine) -> None:
        if not machine.is_on and not self.supervisor.died.is_set():
            machine.start()
            assert machine.task is not None
            machine.task.add_done_callback(lambda task: self._on_agent_ended(machine, task))

    def _on_agent_ended(self, machine: Machine, task: "asyncio.Task[int]") -> None:
        """Start an agent again that has given up, as whatever manages the machines does."""
        if task.cancelled() or self.supervisor.died.is_set():
            return
        seconds = 1.0
        if task.exception() is None and not task.result():
            # Nobody else ends an agent with status 0 while the engine lives.
            seconds = self.absences.pop(machine.name)
            self.drained.append(machine.name)
        self.loop.call_later(seconds, self._switch_on, machine)

    def end_faults(self) -> None:
        super().end_faults()
        self._is_ending = True
        processes = [self.head, *(each.process for each in self.machines)]
        for machine in self.machines:
            self._unite(machine.process, processes)
            self._switch_on(machine)

    async def _wait_for_machines(self) -> None:
        deadline = self.loop.time() + 400.0
        while any(machine.is_on for machine in self.machines):
            assert self.loop.time() < deadline, "an agent does not end"
            await asyncio.sleep(0.1)

    def _workers(self) -> dict[int, Worker]:
        workers = dict(self.node.workers)
        for machine in self.machines:
            workers |= machine.node.workers
        return workers

    def _kill_worker(self, sender: int) -> None:
        for node in (self.node, *(each.node for each in self.machines)):
            node.kill(sender)

    @property
    def num_deaths(self) -> int:
        remote = sum(each.num_deaths + each.node.num_deaths for each in self.machines)
        return self.node.num_deaths + remote

    def _can_poison_end(self) -> bool:
        has_local = any(set(nodes) == {LOCAL_NODE} for nodes in self.nodes_used)
        return self.node_limits.has_bombs and has_local

    def _stage_counts(self) -> tuple[int, ...]:
        return tuple(sorted({len(self.degrees), *map(len, self.nodes_used)}, reverse=True))

    # Setup.

    def _draw_degrees(self) -> tuple[int, ...]:
        num_stages = self.rng.randint(self.node_limits.num_nodes, 4)
        return tuple(self.rng.choice([1, 1, 2]) for _ in range(num_stages))

    def draw_layers(self) -> dict[str, Any]:
        # Even ones for lives whose course is given.
        return {} if self.limits.slowdown is not None else super().draw_layers()

    def _nodes_config(self) -> NodesConfig:
        return NodesConfig(nnodes=self.node_limits.num_nodes, node_rank=0, master_addr=HEAD_ADDRESS)

    def _more_options(self) -> dict[str, Any]:
        return {"nodes": self._nodes_config()}

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Replace sockets, the clock, files and machines."""
        facts = NodeFacts("head", "simulated", __version__, "127.0.0.1", 1, "", b"", [], 8, 2**30)
        monitor = SimpleNamespace(read=NodeLoad, gpu_names=[])
        parts: list[Part] = [
            *((module, "Hub", Hub) for module in (node_hub, agent_workers, driver_relay)),
            *((module, "Spoke", Spoke) for module in (head_session, driver_relay)),
            *(
                (module, "create_context", lambda owner: HEAD.get())
                for module in (membership, node_hub)
            ),
            (agent_workers, "HeadSocket", HubAddress),
            (cluster_head, "MachineMonitor", lambda: monitor),
            (cluster_head, "read_facts", lambda *_: facts),
        ]
        with patched_runtime(self.loop, self.rng, parts):
            HEAD.set(Context(self.network, self.head))
            LINK_WORLD.set((self.rng, self.head))
            yield
