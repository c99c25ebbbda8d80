"""Machines with the real agent on the virtual clock: they lose power, and return."""

import asyncio
from contextvars import copy_context
from pathlib import Path
from typing import Any

from gllm import __version__
from gllm.messages.nodes import NodeFacts
from gllm.runtime.node.agent import Agent
from gllm.runtime.node.head_session import AgentConfig
from tests.support.simulation.head import HEAD
from tests.support.simulation.links import LINK_WORLD, SimulatedLinks
from tests.support.simulation.network import Context
from tests.support.simulation.node import SimulatedNode
from tests.support.simulation.process import Process
from tests.support.simulation.world import World

HEAD_ADDRESS = "127.0.0.1:29600"


class Machine:
    """A machine other than the head's."""

    def __init__(self, world: World, name: str, rank: int | None, is_spare: bool) -> None:
        self.world, self.name = world, name
        self._rank, self._is_spare = rank, is_spare
        self.node = SimulatedNode(world, name)
        self.process = Process(world.loop, name)
        self.num_deaths = 0
        """Ends of workers on earlier lives of the machine."""
        self.task: asyncio.Task[int] | None = None

    @property
    def is_on(self) -> bool:
        """True if its agent runs."""
        return self.task is not None and not self.task.done() and self.process.is_alive

    def start(self) -> None:
        """Switch the machine on: its agent starts and dials the head."""
        assert not self.is_on
        world, name = self.world, self.name
        self.num_deaths += self.node.num_deaths
        self.process = Process(world.loop, name)
        self.node = SimulatedNode(world, name, self.process)
        facts = NodeFacts(name, "simulated", __version__, "127.0.0.1", 29601, "", b"", [], 8, 2**30)
        config = AgentConfig(HEAD_ADDRESS, name, self._rank, self._is_spare)
        context = copy_context()
        context.run(HEAD.set, Context(world.network, self.process))
        context.run(LINK_WORLD.set, (world.rng, self.process))
        links: Any = context.run(SimulatedLinks, name)
        agent = Agent(config, facts, self.node, links, lambda model, digest: Path("demo"))
        self.task = asyncio.get_running_loop().create_task(agent.run(), context=context)

    def power_off(self) -> None:
        """End all processes of the machine at once."""
        if self.is_on:
            assert self.task is not None
            self.process.end(is_killed=True)
            self.world.network.unbind(self.process)
            self.node.power_off()
            self.task.cancel()
