"""The parent's side of epochs, by hand: what a supervisor does, step by step.

The workers are real, as processes or in the test's process; `Head` decides what happens to them.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import zmq

from gllm.config.engine import EngineConfig
from gllm.engine.preflight import plan_model
from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_for_head
from gllm.messages.kv_cache import AdoptKvBlocks
from gllm.messages.lifecycle import (
    CloseEpoch,
    EpochClosed,
    Hello,
    InitializeCache,
    Shutdown,
    StageLoaded,
    StageReady,
)
from gllm.messages.requests import EngineOutputs, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.observability.logs import LogConfig
from gllm.recovery.kept_blocks import intersect_slots
from gllm.recovery.placement import RankWorker, make_placement
from gllm.runtime.head.assignment import NodeAssignment, WorkerIdentity
from gllm.runtime.head.node import Node
from gllm.runtime.messaging.bus import Hub
from gllm.scheduler.intact_slots import NO_SLOTS, IntactSlots
from gllm.scheduler.plan import SchedulerStats

RUN = 7
SECONDS = 120.0
"""Limit for anything that should happen at once."""
GREEDY = SequenceSamplingParams(temperature=0.0)


class Head:
    """A hub, and the workers that say Hello to it."""

    def __init__(self, node: Node, stages: int, **options: Any) -> None:
        self.node = node
        config = EngineConfig.from_options(
            "demo",
            pipeline_parallel_size=stages,
            threads=torch.get_num_threads(),
            **{"dtype": "float32", "max_model_len": 256, "kv_cache_memory": 2**25, **options},
        )
        plan = plan_model(config)
        self.config = replace(config, max_model_len=plan.max_model_len)
        self.model_folder, self.layers = plan.folder, plan.layers
        self.senders = list(range(1, stages + 1))
        self.epoch = 0
        self.exits: dict[int, str] = {}
        self.messages: list[tuple[int, int, Any]] = []
        """Epoch in which each message came, its sender, and the message."""
        self._seqs = count()
        self._folder = Path(tempfile.mkdtemp(prefix="gllm-test-head-"))
        self._address = f"ipc://{self._folder}/hub"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.hub = Hub(self._context, RUN, decode_for_head)
        self.hub.bind(self._address)
        self.hub.start(self._on_messages, lambda sender, cause: None)
        node.watch(self.exits.__setitem__)

    def _on_messages(self, messages: list[tuple[int, Any]]) -> None:
        self.messages += [(self.epoch, *each) for each in messages]

    async def spawn(self, *senders: int) -> None:
        """Start workers and wait for them."""
        for sender in senders:
            self.hub.expect(sender)
            self.node.spawn(WorkerIdentity(RUN, sender, self._address, LogConfig()))
        for sender in senders:
            await self.wait_for(Hello, sender, epoch=None)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.sleep(0.01)

    async def wait_for(self, kind: type[Any], sender: int, epoch: int | None = 0) -> None:
        """Wait for a message of the current epoch, or of any."""
        wanted = self.epoch if epoch == 0 else epoch
        await self.until(
            lambda: any(
                wanted in (None, number) and other == sender and isinstance(message, kind)
                for number, other, message in self.messages
            )
        )

    def assign(
        self, layers: list[range] | None = None, cause: str = "", keeps_kv_cache: bool = False
    ) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.hub.advance(self.epoch)
        bounds = [(each.start, each.stop) for each in layers or self.layers]
        slots = [RankWorker(sender) for sender in self.senders]
        placement = make_placement(self.epoch, bounds, slots)
        assignment = NodeAssignment(placement, self.config, cause, keeps_kv_cache=keeps_kv_cache)
        self.node.assign(assignment, self.model_folder)

    async def initialize(self, num_blocks: int = 64) -> None:
        """Wait for the weights, and start the stages."""
        for sender in self.senders:
            await self.wait_for(StageLoaded, sender)
        self.send_all(InitializeCache(num_blocks))
        for sender in self.senders:
            await self.wait_for(StageReady, sender)
        self.node.on_epoch_ready()

    def adopt(self) -> IntactSlots:
        """Let the driver begin with the KV blocks that all workers of the epoch have reported.

        Returns:
            The slots that are intact on all of them.
        """
        reports = {
            sender: message.intact
            for epoch, sender, message in self.messages
            if epoch == self.epoch and isinstance(message, StageReady)
        }
        intact = intersect_slots(reports[sender] for sender in self.senders)
        if intact != NO_SLOTS:
            self.hub.send(self.senders[0], AdoptKvBlocks(intact))
        return intact

    @property
    def stats(self) -> SchedulerStats:
        """Latest statistics of the epoch's driver."""
        reports = [
            message.stats
            for epoch, _, message in self.messages
            if epoch == self.epoch and isinstance(message, EngineOutputs)
        ]
        return reports[-1]

    async def close_epoch(self, senders: list[int] | None = None) -> None:
        """Close the instances of some workers, by default of all."""
        senders = self.senders if senders is None else senders
        for sender in senders:
            self.hub.send(sender, CloseEpoch())
        for sender in senders:
            await self.wait_for(EpochClosed, sender)

    def send_all(self, message: WireMessage) -> None:
        for sender in self.senders:
            self.hub.send(sender, message)

    def submit(
        self, prompt: list[int], num_tokens: int, sampling: SequenceSamplingParams = GREEDY
    ) -> int:
        """Send a request to the driver; its wire id."""
        seq = next(self._seqs)
        self.hub.send(self.senders[0], SubmitRequest(seq, prompt, sampling, num_tokens, []))
        return seq

    def tokens(self, seq: int) -> list[int]:
        """All tokens of a sequence so far."""
        outcomes = [m.outcome for _, _, m in self.messages if isinstance(m, EngineOutputs)]
        return [
            token
            for outcome in outcomes
            for other, token in zip(outcome.seqs, outcome.token_ids, strict=True)
            if other == seq
        ]

    async def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        seq = self.submit(prompt, num_tokens)
        await self.until(lambda: len(self.tokens(seq)) == num_tokens)
        return self.tokens(seq)

    async def close(self) -> None:
        self.send_all(Shutdown())
        await self.node.stop()
        self.hub.close()
        self._context.term()
        shutil.rmtree(self._folder)


@asynccontextmanager
async def head_of(node: Node, stages: int, **options: Any) -> AsyncIterator[Head]:
    """Workers without a stage, and their end."""
    head = Head(node, stages, **options)
    try:
        await head.spawn(*head.senders)
        yield head
    finally:
        await head.close()


def num_open(pid: int | str = "self") -> int:
    """Descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_threads(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def num_mapped(name: str, pid: int | str = "self") -> int:
    """Return the number of mappings of files with a name."""
    return Path(f"/proc/{pid}/maps").read_text().count(name)
