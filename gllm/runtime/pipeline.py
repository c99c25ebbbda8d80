"""The worker processes as one pipeline, seen from the parent: start, commands, shutdown.

States are loading, ready, draining and dead. This module imports no torch: the workers do.
"""

import asyncio
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import zmq

from gllm.cluster.placement import Slot, make_placement
from gllm.config.engine import EngineConfig
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, decode_for_head
from gllm.messages.control import CommandDone, ResetPrefixCache, StartProfile, StopProfile
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
from gllm.observability.logs import LogConfig
from gllm.runtime.assignment import WorkerIdentity
from gllm.runtime.bus import Hub, Peer
from gllm.runtime.client import EngineClient
from gllm.runtime.device import count_kv_blocks
from gllm.runtime.node import Node

log = logging.getLogger(__name__)

LOST_SECONDS = 1.0
"""Time in which a process whose connection ended has to be reported by its exit."""


class EngineError(Exception):
    """The engine could not start, or has died; the message has the cause."""


class WorkerPipeline:
    """All stages of an engine."""

    def __init__(
        self,
        config: EngineConfig,
        layers: list[range],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Create the pipeline.

        Args:
            config: of the engine, with max_model_len resolved.
            layers: of each stage.
            on_progress: called while weights are loaded, with the bytes loaded and in total.
        """
        self.state = "loading"
        self.cause = ""
        """The reason for which the pipeline is dead."""
        self.died = asyncio.Event()
        """Set when the pipeline is dead."""
        self.num_blocks = 0
        self.kv_bytes = 0
        """Bytes of the KV cache over all stages."""
        self.client = EngineClient()
        self.layers = layers
        self.node: Node | None = None
        self.senders = list(range(1, 1 + len(layers)))
        """Identity of each stage's worker."""
        self._config = config
        self._on_progress = on_progress
        self._stages: list[Peer] = []
        self._progress: dict[int, LoadProgress] = {}
        self._loaded: dict[int, StageLoaded] = {}
        self._ready: set[int] = set()
        self._has_changed = asyncio.Event()
        """Set after each batch of messages."""
        self._command_ids = count()
        self._command_reports: dict[int, asyncio.Queue[CommandDone]] = {}
        """Reports on the commands that a caller waits for, by command id."""

    async def start(self, folder: Path, node: Node, logs: LogConfig) -> None:
        """Load a model and run one token through all stages.

        Args:
            folder: of the model.
            node: of the workers.
            logs: configuration of the workers' logs.

        Raises:
            EngineError: a stage failed.
        """
        self.node = node
        self._socket_folder = Path(tempfile.mkdtemp(prefix="gllm-head-"))
        run, address = secrets.randbits(64), f"ipc://{self._socket_folder}/hub"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._hub = Hub(self._context, run, decode_for_head)
        self._hub.advance(1)
        # Workers connect once, so the hub is bound before they start.
        self._hub.bind(address)
        self._stages = [Peer(self._hub, sender) for sender in self.senders]
        self._hub.start(self._handle, self._on_lost)
        node.watch(self._on_worker_exit)
        try:
            for sender in self.senders:
                self._hub.expect(sender)
                node.spawn(WorkerIdentity(run, sender, address, logs))
            bounds = [(each.start, each.stop) for each in self.layers]
            placement = make_placement(1, bounds, [Slot(sender) for sender in self.senders])
            node.assign(placement, self._config, folder)
            await self._wait_for(self._loaded)
            self._initialize_caches()
            await self._wait_for(self._ready)
            await self._warm_up()
            self.client.attach(self._stages[0].send)
        except BaseException:
            await self.stop()
            raise
        self._remove_sockets()
        self.state = "ready"

    async def drain(self, seconds: float) -> None:
        """Wait until running requests have ended, for at most this long."""
        if self.state == "ready":
            self.state = "draining"
        deadline = time.monotonic() + seconds
        while self.client.num_requests and self.state == "draining" and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End the workers; running requests end with an error."""
        assert self.node is not None, "a pipeline is started before it is stopped"
        self._die("the engine was stopped")
        for stage in self._stages:
            stage.send(Shutdown())
        await self.node.stop()
        self._remove_sockets()
        self._hub.close()
        self._context.term()

    async def reset_prefix_cache(self) -> str:
        """Empty the prefix cache; return the error, empty on success."""
        return await self._run_command(ResetPrefixCache, self._stages[:1])

    async def start_profile(self, folder: str) -> str:
        """Start a profile on all stages; return the first error, empty on success."""
        return await self._run_command(lambda number: StartProfile(number, folder), self._stages)

    async def stop_profile(self) -> str:
        """Stop the profile on all stages; return the first error, empty on success."""
        return await self._run_command(StopProfile, self._stages)

    async def _run_command(self, create: Callable[[int], WireMessage], stages: list[Peer]) -> str:
        """Send a command to some stages and wait for all of them.

        Args:
            create: creates the command with an id.
            stages: receivers.

        Returns:
            The first error, empty on success.
        """
        if self.state == "dead":
            return self.cause
        command_id = next(self._command_ids)
        command = create(command_id)
        queue = self._command_reports.setdefault(command_id, asyncio.Queue())
        try:
            for stage in stages:
                stage.send(command)
            reports = [await queue.get() for _ in stages]
        finally:
            del self._command_reports[command_id]
        return next((report.error for report in reports if report.error), "")

    async def _wait_for(self, stages: dict[int, StageLoaded] | set[int]) -> None:
        """Wait until the collection has an entry for each stage."""
        while len(stages) < len(self.layers):
            await self._has_changed.wait()
            self._has_changed.clear()
            if self.state == "dead":
                raise EngineError(self.cause)

    def _initialize_caches(self) -> None:
        """Divide the memory for KV blocks: every stage gets the same number."""
        max_model_len = self._config.max_model_len
        assert max_model_len is not None
        loaded = self._loaded.values()
        scheduler = self._config.scheduler
        max_blocks = scheduler.max_num_seqs * -(-max_model_len // scheduler.block_size)
        stages = [(stage.block_bytes, stage.available_bytes) for stage in loaded]
        num_blocks = count_kv_blocks(self._config.kv_cache_memory, stages)
        self.num_blocks = min(num_blocks, max_blocks)
        self.kv_bytes = self.num_blocks * sum(stage.block_bytes for stage in loaded)
        scheduler.resolve(len(self.layers), self.num_blocks, max_model_len)
        for stage in self._stages:
            stage.send(InitializeCache(self.num_blocks))

    async def _warm_up(self) -> None:
        """Generate one token."""
        stream = self.client.submit_warm_up(self._stages[0].send)
        end = None
        while end is None:
            await stream.wait()
            end = stream.pop_deltas()[0].end
        if end.error:
            raise EngineError(f"the warm-up step failed: {end.error}")

    def _handle(self, messages: list[tuple[int, AnyMessage]]) -> None:
        try:
            for _, message in messages:
                self._handle_message(message)
        except Exception as error:
            # The other messages are lost, so their requests would wait forever.
            log.exception("a message of the workers could not be handled")
            self._die(f"a message could not be handled: {type(error).__name__}: {error}")
        self._has_changed.set()

    def _handle_message(self, message: AnyMessage) -> None:
        match message:
            case EngineOutputs() | StageUtilization() | BubbleReport():
                self.client.on_report(message)
            case CommandDone(command_id):
                if queue := self._command_reports.get(command_id):
                    queue.put_nowait(message)
            case LoadProgress(stage):
                self._progress[stage] = message
                parts = self._progress.values()
                done = sum(part.done_bytes for part in parts)
                self._on_progress(done, sum(part.total_bytes for part in parts))
            case StageLoaded(stage):
                self._loaded[stage] = message
            case StageReady(stage):
                self._ready.add(stage)
            case StageFailed(stage, cause):
                self._die(f"stage {stage} failed: {cause}")

    def _on_lost(self, sender: int, cause: str) -> None:
        # Of a worker that exits, the exit itself says more.
        description = f"the worker of stage {self.senders.index(sender)} was lost: {cause}"
        asyncio.get_running_loop().call_later(LOST_SECONDS, self._die, description)

    def _on_worker_exit(self, sender: int, description: str) -> None:
        # The worker's own report of the cause may still be on its way.
        cause = f"the worker of stage {self.senders.index(sender)} ({description})"
        asyncio.get_running_loop().call_later(0.05, self._die, cause)

    def _remove_sockets(self) -> None:
        """Remove the sockets' names, so that nothing else can connect."""
        assert self.node is not None
        self.node.on_generation_ready()
        shutil.rmtree(self._socket_folder, ignore_errors=True)

    def _die(self, cause: str) -> None:
        """Fail everything with the cause, once."""
        if self.state == "dead":
            return
        self.state, self.cause = "dead", cause
        self.client.fail_all(cause)
        for command_id, queue in self._command_reports.items():
            for stage in range(len(self._stages)):
                queue.put_nowait(CommandDone(command_id, stage, cause))
        self._has_changed.set()
        self.died.set()
