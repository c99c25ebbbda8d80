"""A driver whose stage computes nothing, with a prefix cache that is watched."""

from typing import Any

from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_for_head, decode_for_worker, encode
from gllm.messages.kv_cache import KvCacheEvents
from gllm.messages.lifecycle import ResetPrefixCache
from gllm.messages.requests import EngineOutputs, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RunStep, StepDone
from gllm.runtime.driver.driver import Driver
from gllm.runtime.head.kv_events import KvEventSource
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler

BLOCK_SIZE = 4
TOKEN = 7
"""Token that every step samples."""


class KvDriver:
    """One epoch's driver, connected to a source of events."""

    def __init__(self, source: KvEventSource, num_blocks: int = 24) -> None:
        config = SchedulerConfig(block_size=BLOCK_SIZE).resolve(1, num_blocks, 64)
        self.scheduler = Scheduler(config)
        self.sent: list[WireMessage] = []
        self._source = source
        self._driver = Driver(self.scheduler, self._on_step, [], self)
        self._plans: list[StepPlan] = []
        self._next_seq = 0

    @property
    def digests(self) -> set[bytes]:
        """Hashes in the cache."""
        return set(self.scheduler.kv_cache.block_pool.digests)

    @property
    def is_watched(self) -> bool:
        """True if the driver records changes."""
        return self.scheduler.kv_cache.event_log is not None

    def attach(self) -> None:
        """Let the source watch this driver."""
        self._source.attach(self.handle)

    def handle(self, message: WireMessage) -> None:
        """Handle a message of the head process."""
        self._driver.handle(decode_for_worker(encode(message)))
        self._driver.run_iteration()

    def reset(self) -> None:
        """Empty the prefix cache."""
        self.handle(ResetPrefixCache(0))

    def run(self, prompt: list[int], max_tokens: int = 1, cache_salt: str = "") -> None:
        """Run a request to its end."""
        sampling = SequenceSamplingParams()
        self.handle(
            SubmitRequest(self._next_seq, prompt, sampling, max_tokens, [], cache_salt=cache_salt)
        )
        self._next_seq += 1
        while self._plans:
            plan = self._plans.pop(0)
            sampled = [SampledToken(row.seq, row.num_preemptions, TOKEN) for row in plan.rows]
            self._driver.commit(StepDone(StepResult(plan.step, sampled)))
            self._driver.run_iteration()

    def send(self, message: WireMessage) -> None:
        """Receive a message of the driver for the head process."""
        received: Any = decode_for_head(encode(message))
        if isinstance(received, KvCacheEvents):
            self._source.on_events(received)
        elif not isinstance(received, EngineOutputs):
            self.sent.append(received)

    def send_encoded(self, payload: bytes) -> None:
        raise AssertionError("the head process is sent messages")

    def _on_step(self, message: WireMessage) -> None:
        if isinstance(message, RunStep):
            self._plans.append(message.plan)


class KvFollower:
    """A subscriber: the hashes in the cache by its events alone."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()
        self.messages: list[KvCacheEvents] = []

    def __call__(self, message: KvCacheEvents) -> None:
        assert message.number == len(self.messages)
        assert message.is_cleared or self.messages
        self.messages.append(message)
        if message.is_cleared:
            self.digests.clear()
        self.digests.difference_update(message.removed)
        for blocks in message.stored:
            self.digests.update(blocks.digests)
