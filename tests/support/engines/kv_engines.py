"""Engines of one process behind a router's client, which move KV blocks between each other.

Drivers, schedulers, executors and the client are real, and messages are encoded and decoded. The
KV mover copies the tensors at once, when a test lets it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gllm.config.engine import EngineConfig
from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_for_stage, decode_for_worker, decode_from_kv_mover, encode
from gllm.messages.handoff import FirstChunkComputed, KvPushStarted
from gllm.messages.kv_transfer import (
    CancelKvFetch,
    FetchKv,
    KvCommand,
    KvFetched,
    KvReport,
    KvRevoked,
    RevokeKv,
    ServeKv,
)
from gllm.messages.requests import EngineOutputs
from gllm.messages.steps import RegisterSequences, RunStep, StepDone
from gllm.models.config import read_config
from gllm.models.split import split_layers
from gllm.router.client import FleetClient
from gllm.router.dispatch_target import KvPeer
from gllm.routing.disaggregation.policy import EnginePair
from gllm.routing.engine_losses import LossKind
from gllm.runtime.driver.driver import Driver
from gllm.runtime.head.request_stream import RequestStream
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.scheduler.plan import StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from tests.support.engines.epochs import Stages

MAX_MODEL_LEN, NUM_KV_TOKENS = 128, 2048


@dataclass(eq=False)
class RunningStep:
    """A step that not all stages have computed."""

    plan: StepPlan
    batches: dict[int, Batch] = field(default_factory=dict)
    """Micro-batch of each stage that has the plan."""
    num_computed: int = 0
    """Stages that have computed it."""
    output: Any = None
    """Of the latest stage."""


class KvEngine:
    """One engine: its driver, its stages, and its end of the KV mover."""

    def __init__(self, name: str, stages: Stages, cluster: "KvCluster") -> None:
        self.name = name
        self.stages = stages
        self.served: dict[int, ServeKv] = {}
        """Holds that the mover may read, by ticket."""
        self.fetches: deque[FetchKv] = deque()
        """Fetches that have not ended."""
        self._cluster = cluster
        self._running: dict[int, RunningStep] = {}
        """Steps that have not committed, by their number, the oldest first."""
        self._outputs: list[EngineOutputs] = []
        self.scheduler = Scheduler(stages.scheduler_config)
        executors = stages.executors
        for executor in executors:
            # They are used again, and know the sequences of drivers that were killed.
            executor.prepare(StepPlan(0, [], sorted(executor.held_seqs)))
        self.driver = Driver(
            self.scheduler,
            lambda message: self.on_stage_message(0, message),
            [_Channel(self, stage) for stage in range(1, len(executors))],
            self,
            vocab_size=executors[0].model.vocab_size,
            has_kv_mover=True,
        )
        assert self.driver.kv is not None
        self.driver.kv.connect(self.command_mover)

    def endpoint(self) -> bytes:
        return self.name.encode()

    def receive(self, message: WireMessage) -> None:
        """Handle a message of the router, or a report of the mover."""
        decode = decode_from_kv_mover if isinstance(message, KvReport) else decode_for_worker
        self.driver.handle(decode(encode(message)))

    def send(self, message: WireMessage) -> None:
        """Handle a report of the driver."""
        match message:
            case EngineOutputs():
                self._outputs.append(message)
            case FirstChunkComputed() | KvPushStarted():
                self._cluster.on_message(self.name, message)

    def command_mover(self, message: KvCommand) -> None:
        """Execute a command of the driver."""
        match message:
            case ServeKv(ticket):
                self.served[ticket] = message
            case RevokeKv(ticket):
                del self.served[ticket]
                self.receive(KvRevoked(ticket))
            case FetchKv():
                self.fetches.append(message)
            case CancelKvFetch(number):
                for fetch in [each for each in self.fetches if each.fetch == number]:
                    self.end_fetch(fetch, False)

    def send_encoded(self, payload: bytes) -> None:
        raise AssertionError

    def end_fetch(self, fetch: FetchKv, is_ok: bool) -> None:
        """Copy the blocks of a fetch if its source is still served, and report the end."""
        self.fetches.remove(fetch)
        source = self._cluster.engines.get(fetch.endpoint.decode())
        held = source.served.get(fetch.ticket) if source is not None else None
        is_ok = is_ok and held is not None
        if is_ok:
            assert source is not None
            assert held is not None
            self._copy(source, held, fetch)
        self.receive(KvFetched(fetch.fetch, is_ok, fetch.num_tokens * 64, 1e-4))

    def step(self) -> bool:
        """Run a turn of the driver and the oldest step; return False if there was none."""
        self.driver.run_iteration()
        if not self._running:
            return False
        oldest = next(iter(self._running.values()))
        for _ in self.stages.executors:
            self.compute(oldest)
        return True

    def compute(self, running: RunningStep) -> None:
        """Compute a step on its next stage; commit it after the last one."""
        stage = running.num_computed
        executor, batch = self.stages.executors[stage], running.batches[stage]
        output = executor.compute(batch, running.output)
        running.num_computed += 1
        if running.num_computed < len(self.stages.executors):
            # Another step may be next on this stage, which uses the memory again.
            running.output = output.clone()
        else:
            step = running.plan.step
            sampled, details = executor.sample(batch, output)
            del self._running[step]
            self.driver.commit(StepDone(StepResult(step, sampled), details))
            self.driver.run_iteration()

    def deliver(self) -> None:
        """Pass the output to the router, as long as it knows the engine."""
        outputs, self._outputs = self._outputs, []
        for message in outputs:
            self._cluster.on_message(self.name, message)

    def _copy(self, source: "KvEngine", held: ServeKv, fetch: FetchKv) -> None:
        """Copy keys and values by token, whatever the block sizes and stages of both sides."""
        assert held.num_tokens >= fetch.first_token + fetch.num_tokens
        for mine, theirs in zip(self._layers(), source._layers(), strict=True):
            for (to, size), (origin, their_size) in zip(mine, theirs, strict=True):
                for i in range(fetch.num_tokens):
                    token = fetch.first_token + i
                    block = held.block_ids[token // their_size]
                    offset = i + fetch.first_token % size
                    to[fetch.block_ids[offset // size], offset % size] = origin[
                        block, token % their_size
                    ]

    def _layers(self) -> list[list[tuple[Any, int]]]:
        """Keys and values of all layers, with the block size."""
        return [
            [(tensor, self.stages.scheduler_config.block_size) for tensor in layer]
            for executor in self.stages.executors
            for layer in executor.layer_caches
        ]

    def on_stage_message(self, stage: int, message: Any) -> None:
        executor = self.stages.executors[stage]
        match message:
            case RegisterSequences():
                executor.register(message)
            case RunStep(plan):
                running = self._running.setdefault(plan.step, RunningStep(plan))
                running.batches[stage] = executor.prepare(plan)


class _Channel:
    """Channel to a later stage."""

    def __init__(self, engine: KvEngine, stage: int) -> None:
        self._engine, self._stage = engine, stage

    def send(self, message: WireMessage) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, payload: bytes) -> None:
        self._engine.on_stage_message(self._stage, decode_for_stage(payload))


class FixedPair:
    """Pair chooser of one pair."""

    def __init__(self, prefill: str = "P", decode: str = "D") -> None:
        self.prefill, self.decode = prefill, decode

    def accepting(self, names: frozenset[str]) -> frozenset[str]:
        return names

    def choose(self, stream: RequestStream, names: frozenset[str]) -> EnginePair | None:
        return EnginePair(self.prefill, self.decode) if {"P", "D"} <= names else None

    def choose_decode(self, stream: RequestStream, names: frozenset[str]) -> str | None:
        return self.decode if self.decode in names else None

    def on_prefilled(self, stream: RequestStream) -> None:
        pass

    def on_ended(self, stream: RequestStream) -> None:
        pass

    def on_engine_lost(self, engine: str) -> None:
        pass


class KvCluster:
    """A router's client over engines."""

    def __init__(self, engines: dict[str, Stages], client: FleetClient | None = None) -> None:
        self.client = client or FleetClient(lambda stream, names: min(names), pairs=FixedPair())
        self.engines: dict[str, KvEngine] = {}
        self.departed: list[KvEngine] = []
        self.moves_kv = True
        """False to keep fetches waiting."""
        for name, stages in engines.items():
            self.attach(name, stages)

    def attach(
        self, name: str, stages: Stages, numerics: str = "x", digest: Callable[[], str] = str
    ) -> None:
        engine = self.engines[name] = self.create_engine(name, stages)
        peer = KvPeer(1, engine.endpoint, engine.receive, digest, accepts_prefetches=True)
        self.client.attach(name, numerics, engine.receive, peer)

    def on_message(self, name: str, message: WireMessage) -> None:
        """Handle a message of an engine, as a router does."""
        match message:
            case EngineOutputs():
                self.client.on_outputs(name, message)
            case KvPushStarted(ticket):
                self.client.handoffs.on_readable(name, ticket, time.monotonic())
            case FirstChunkComputed(ticket):
                self.client.handoffs.on_first_chunk(name, ticket, time.monotonic())

    def create_engine(self, name: str, stages: Stages) -> KvEngine:
        return KvEngine(name, stages, self)

    def kill(self, name: str) -> None:
        """End an engine without a warning; its KV goes with it."""
        engine = self.engines.pop(name)
        self.departed.append(engine)
        self.client.detach(name, "killed", LossKind.DIED)

    def step(self) -> None:
        """Let every engine compute a step and move KV."""
        for engine in list(self.engines.values()):
            engine.step()
            if self.moves_kv:
                for fetch in list(engine.fetches):
                    engine.end_fetch(fetch, True)
            engine.deliver()

    def run(self, streams: list[RequestStream], until: Callable[[], bool] | None = None) -> None:
        """Run until all requests have ended or a condition holds."""
        for _ in range(4000):
            if until is not None and until():
                return
            if not any(stream.alive for stream in streams):
                return
            self.step()
            for stream in streams:
                stream.pop_deltas()
            self.client.continue_handoffs()
        raise AssertionError("the requests do not end")

    def check_empty(self) -> None:
        """No engine has a request, a held block or a used one; the router has no hand-off."""
        for _ in range(3):
            self.step()
        assert not self.client.handoffs.num_running
        assert not self.client.handoffs._by_ticket
        for engine in self.engines.values():
            stats = engine.scheduler.stats()
            assert (stats.unfinished, stats.held_blocks, stats.fetching) == (0, 0, 0), engine.name
            assert not engine.served
            assert engine.scheduler.kv_cache.free_share == 1, engine.name


def load_stages(
    folder: Path,
    num_stages: int,
    block_size: int,
    descriptors: Sequence[int] = (),
    num_kv_tokens: int = NUM_KV_TOKENS,
    **options: object,
) -> Stages:
    """Stages of one more engine, in float32.

    Args:
        folder: of the model.
        num_stages: of the engine.
        block_size: in tokens.
        descriptors: files for the KV caches, one per stage; none for own memory.
        num_kv_tokens: tokens that fit into the KV cache.
        options: of the engine.
    """
    model = read_config(folder)
    config = EngineConfig.from_options(
        str(folder), block_size=block_size, dtype="float32", max_model_len=MAX_MODEL_LEN, **options
    )
    executors = [
        CpuExecutor(model, config, num_stages, layers)
        for layers in split_layers(model.model, num_stages)
    ]
    num_blocks = num_kv_tokens // block_size
    for executor, descriptor in zip_longest(executors, descriptors):
        executor.load(folder, lambda done, total: None)
        executor.allocate(num_blocks, block_size, descriptor)
    scheduler = config.scheduler.resolve(num_stages, num_blocks, MAX_MODEL_LEN)
    return Stages(executors, scheduler)
