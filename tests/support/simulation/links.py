"""Simulated data connections between machines; the activations themselves travel in the world."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from random import Random
from typing import Any

from gllm.messages.nodes import LinkState
from gllm.recovery.placement import Placement
from gllm.runtime.head.node_group import remote_edges
from tests.support.simulation.process import Process

LINK_WORLD: ContextVar[tuple[Random, Process]] = ContextVar("LINK_WORLD")
"""Source of delays, and process of the machine, for links that are created."""


class SimulatedLinks:
    """Links with the interface of gllm.runtime.head.link_process.LinkProcess."""

    def __init__(self, node: str, *arguments: Any, **options: Any) -> None:
        self.links: list[LinkState] = []
        self.refused: dict[str, int] = {}
        self.num_malformed = 0
        self._rng, self._process = LINK_WORLD.get()
        self._on_opened: Callable[[int, int], None] = lambda epoch, edge: None
        self._closed = 0
        """Latest epoch whose edges are closed."""

    async def listen(self) -> int:
        return 29601

    def begin_run(
        self,
        run: int,
        on_opened: Callable[[int, int], None],
        on_lost: Callable[[int, int, str], None],
    ) -> None:
        self._on_opened = on_opened

    def open(self, command: Any, edge: Any) -> None:
        raise AssertionError("simulated nodes have no edges")

    def open_edges(self, placement: Placement, node: str) -> None:
        """Report, a little later, each edge that ends on this machine."""
        loop = asyncio.get_running_loop()
        for number, (_, target) in remote_edges(placement).items():
            if target == node:
                delay = self._rng.uniform(0.001, 0.3)
                loop.call_later(delay, self._process.run, self._open, placement.epoch, number)

    def close_edges(self, epoch: int) -> None:
        self._closed = epoch

    def close(self) -> None:
        """Nothing is left."""

    def _open(self, epoch: int, number: int) -> None:
        if epoch > self._closed:
            self._on_opened(epoch, number)
