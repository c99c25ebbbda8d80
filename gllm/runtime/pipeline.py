"""The worker processes as one pipeline: their start, what they are asked, their end.

Owns the pipeline's life (loading, ready, draining, dead) as the parent process sees it. Knows
nothing of text and of HTTP; imports no torch, that is the workers' business.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import zmq

from gllm.config.engine import EngineConfig
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage
from gllm.messages.control import CommandDone, Profile, ResetPrefixCache
from gllm.messages.lifecycle import (
    InitializeCache,
    LoadProgress,
    Shutdown,
    StageFailed,
    StageLoaded,
    StageReady,
)
from gllm.messages.reports import BubbleReport, StageUtilization
from gllm.messages.requests import EngineOutputs
from gllm.messages.sampling import SequenceSamplingParams
from gllm.observability.logs import LogConfig
from gllm.runtime.bus import FRONTEND, BusFault, Inbox, Outbox
from gllm.runtime.client import EngineClient
from gllm.runtime.device import kv_blocks
from gllm.runtime.launch import PipelineWorkers

log = logging.getLogger(__name__)


class EngineError(Exception):
    """The engine could not start, or is gone; the message says why."""


class WorkerPipeline:
    """All stages. `tell` hears of loading: bytes done, bytes in all."""

    def __init__(
        self, config: EngineConfig, layers: list[range], tell: Callable[[int, int], None]
    ) -> None:
        self.state = "loading"
        self.cause = ""
        self.died = asyncio.Event()
        """Set when the pipeline is dead."""
        self.num_blocks = 0
        self.kv_bytes = 0
        self.client = EngineClient()
        self.layers = layers
        self.workers: PipelineWorkers | None = None
        self._config = config
        self._tell = tell
        self._stages: list[Outbox] = []
        self._progress: dict[int, LoadProgress] = {}
        self._loaded: dict[int, StageLoaded] = {}
        self._ready: set[int] = set()
        self._news = asyncio.Event()
        self._numbers = count()
        self._questions: dict[int, asyncio.Queue[CommandDone]] = {}
        """Answers to the questions that somebody waits for, by their number."""

    async def start(self, folder: Path, workers: PipelineWorkers, logs: LogConfig) -> None:
        """Have the workers load the model in a folder and wait until a step has gone through all
        of them. Raises EngineError where one fails."""
        self.workers = workers
        workers.tell(self._config, folder, self.layers, logs)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = Inbox(self._context, workers.frontend)
        self._stages = [Outbox(self._context, a, FRONTEND) for a in workers.inboxes]
        self.client.connect(self._stages[0])
        self._inbox.start(self._handle, self._on_fault)
        workers.watch(self._on_death)
        try:
            await self._wait_for(self._loaded)
            self._start_stages()
            await self._wait_for(self._ready)
            await self._warm_up()
        except BaseException:
            await self.stop()
            raise
        workers.hide()
        self.state = "ready"

    async def drain(self, seconds: float) -> None:
        """Give running requests this long to end."""
        if self.state == "ready":
            self.state = "draining"
        deadline = time.monotonic() + seconds
        while self.client.num_requests and self.state == "draining" and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End the workers; requests that still run end with an error."""
        assert self.workers is not None, "only what was started can be stopped"
        self._die("the engine was stopped")
        for stage in self._stages:
            stage.send(Shutdown())
        await self.workers.stop()
        self._inbox.close()
        for stage in self._stages:
            stage.close()
        self._context.term()

    async def forget_prefixes(self) -> str:
        """Empty the prefix cache; why that could not be, empty where it was."""
        return await self._ask(ResetPrefixCache, self._stages[:1])

    async def profile(self, folder: str) -> str:
        """Begin a profile whose files go to this folder, an empty one ends it; why a stage could
        not, empty where all did."""
        return await self._ask(lambda question: Profile(question, folder), self._stages)

    async def _ask(self, make: Callable[[int], WireMessage], stages: list[Outbox]) -> str:
        """Send these stages the message that `make` makes of a question's number and wait until
        they have done what it says; the first error. Who stops waiting leaves nothing behind."""
        if self.state == "dead":
            return self.cause
        question = next(self._numbers)
        message, received = make(question), self._questions.setdefault(question, asyncio.Queue())
        try:
            for stage in stages:
                stage.send(message)
            answers = [await received.get() for _ in stages]
        finally:
            del self._questions[question]
        return next((answer.error for answer in answers if answer.error), "")

    async def _wait_for(self, reached: dict[int, StageLoaded] | set[int]) -> None:
        while len(reached) < len(self.layers):
            await self._news.wait()
            self._news.clear()
            if self.state == "dead":
                raise EngineError(self.cause)

    def _start_stages(self) -> None:
        """Divide the memory for KV blocks: the same number on every stage."""
        length = self._config.max_model_len
        assert length is not None
        block_bytes = sum(loaded.block_bytes for loaded in self._loaded.values())
        scheduler = self._config.scheduler
        most = scheduler.max_num_seqs * -(-length // scheduler.block_size)
        stages = [(loaded.block_bytes, loaded.room) for loaded in self._loaded.values()]
        self.num_blocks = min(kv_blocks(self._config.kv_cache_memory, stages), most)
        self.kv_bytes = self.num_blocks * block_bytes
        scheduler.resolve(len(self.layers), self.num_blocks, length)
        for stage in self._stages:
            stage.send(InitializeCache(self.num_blocks))

    async def _warm_up(self) -> None:
        """One token through all stages and back."""
        stream = self.client.submit(
            [0], SequenceSamplingParams(temperature=0), max_tokens=1, stop_ids=[]
        )
        try:
            end = None
            while end is None:
                await stream.wait()
                end = stream.take()[0].end
            if end.error:
                raise EngineError(f"the warm-up step failed: {end.error}")
        finally:
            self.client.release(stream)

    def _handle(self, messages: list[AnyMessage]) -> None:
        try:
            self._handle_all(messages)
        except Exception as error:
            # The rest of the messages is lost: nobody shall wait for what was in them.
            log.exception("a message of the workers could not be handled")
            self._die(f"a message could not be handled: {type(error).__name__}: {error}")
        self._news.set()

    def _handle_all(self, messages: list[AnyMessage]) -> None:
        for message in messages:
            match message:
                case EngineOutputs() | StageUtilization() | BubbleReport():
                    self.client.hear(message)
                case CommandDone(question):
                    if received := self._questions.get(question):
                        received.put_nowait(message)
                case LoadProgress(stage):
                    self._progress[stage] = message
                    parts = self._progress.values()
                    self._tell(sum(p.done for p in parts), sum(p.total for p in parts))
                case StageLoaded(stage):
                    self._loaded[stage] = message
                case StageReady(stage):
                    self._ready.add(stage)
                case StageFailed(stage, cause):
                    self._die(f"stage {stage} failed: {cause}")

    def _on_fault(self, fault: BusFault) -> None:
        self._die(str(fault))

    def _on_death(self, stage: int, ending: str) -> None:
        # Why it ended may still be on its way to us.
        asyncio.get_running_loop().call_later(0.05, self._die, ending)

    def _die(self, cause: str) -> None:
        """The first cause counts."""
        if self.state == "dead":
            return
        self.state, self.cause = "dead", cause
        self.client.fail_all(cause)
        for question, received in self._questions.items():
            for stage in range(len(self._stages)):
                received.put_nowait(CommandDone(question, stage, cause))
        self._news.set()
        self.died.set()
