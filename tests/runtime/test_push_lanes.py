"""Prompts that are fetched while decodes overtake them: both engines have the same bytes.

Each stage of the prefill engine computes the steps of its lanes in a random order. After an
overtaking it waits until the mover has looked again at what is computed.
"""

import time
from functools import cache, partial
from itertools import product
from random import Random

import numpy as np
import pytest

from gllm.messages.kv_transfer import FetchKv, KvCommand, KvFetched, ServeKv
from gllm.messages.sampling import SequenceSamplingParams
from gllm.router.client import FleetClient
from gllm.routing.disaggregation.policy import EnginePair
from gllm.runtime.head.request_stream import RequestStream
from gllm.scheduler.lanes import DECODE_LANE
from gllm.transport.kv.pages import Bytes
from tests.support.engines.epochs import Stages
from tests.support.engines.kv_engines import FixedPair, RunningStep
from tests.support.engines.moving_engines import (
    CHUNKED,
    MappedStages,
    MovingCluster,
    MovingEngine,
    closing,
)
from tests.support.full_cases import full_but
from tests.support.text.grammar_writing import FOLDER

GREEDY = SequenceSamplingParams(temperature=0)
THETA = 16
LONG_TOKENS = 100
POLL_SECONDS = 1.0
"""Longest wait for the mover."""
NUM_POLLS = 3
"""The first one may have begun before."""


@cache
def stages_of(
    name: str, num_stages: int, block_size: int, kv_push: str, lanes: str, num_kv_tokens: int
) -> MappedStages:
    """Weights are loaded once per engine."""
    return MappedStages(
        FOLDER,
        num_stages,
        block_size,
        num_kv_tokens=num_kv_tokens,
        kv_push=kv_push,
        kv_push_threshold=THETA,
        lanes=lanes,
        **CHUNKED,
    )


class LongPromptsInPairs(FixedPair):
    """Pair chooser that leaves short prompts at the prefill engine."""

    def choose(self, stream: RequestStream, names: frozenset[str]) -> EnginePair | None:
        is_long = len(stream.entry.prompt) >= THETA
        return EnginePair(self.prefill, self.decode if is_long else self.prefill)


class OvertakingEngine(MovingEngine):
    """Engine whose stages choose the lane of the next step at random, and whose bytes are kept."""

    def __init__(self, name: str, stages: MappedStages, cluster: "OvertakingCluster") -> None:
        self.rng = Random(name)
        self.num_overtakes = self.num_polls = 0
        self.held: dict[int, Bytes] = {}
        """Keys and values of each prompt at the end of its prefill [tokens, bytes], by ticket."""
        self.fetched: list[tuple[FetchKv, Bytes]] = []
        """Complete fetches, with the keys and values [tokens, bytes] in their blocks."""
        for executor in stages.executors:
            for layer in executor.layer_caches:
                for tensor in layer:
                    tensor.zero_()
        super().__init__(name, stages, cluster)

    def step(self) -> bool:
        self.driver.run_iteration()
        ready, places = [], dict.fromkeys((0, 1), len(self.stages.executors))
        for running in self._running.values():
            lane = running.plan.lane
            if running.num_computed < places[lane]:
                ready.append(running)
            places[lane] = running.num_computed
        if not ready:
            return False
        chosen = self.rng.choice(ready)
        has_overtaken = self._is_overtaking(chosen)
        self.compute(chosen)
        if has_overtaken:
            self.num_overtakes += 1
            self._await_poll()
        return True

    def has_prefilled(self, num_tokens: int) -> bool:
        """Return True if prefill chunks of this many tokens have been scheduled."""
        return self.scheduler.stats().prefill_tokens >= num_tokens

    def _is_overtaking(self, chosen: RunningStep) -> bool:
        """Return True if a decode step's next stage has not computed an earlier prefill step."""
        return chosen.plan.lane == DECODE_LANE and any(
            running.plan.step < chosen.plan.step and running.num_computed <= chosen.num_computed
            for running in self._running.values()
            if running.plan.lane != DECODE_LANE
        )

    def _await_poll(self) -> None:
        """Wait until the mover has looked at the counters, unless no fetch waits for them."""
        least, end = self.num_polls + NUM_POLLS, time.monotonic() + POLL_SECONDS
        while self.mover.num_readers and self.num_polls < least and time.monotonic() < end:
            time.sleep(0.0001)

    def on_poll(self, seconds: float) -> None:
        super().on_poll(seconds)
        self.num_polls += 1

    def command_mover(self, message: KvCommand) -> None:
        if isinstance(message, ServeKv) and not message.step:
            self.held[message.ticket] = self.read_tokens(message.block_ids, 0, message.num_tokens)
        super().command_mover(message)

    def on_fetched(self, report: KvFetched) -> None:
        if report.is_ok:
            fetches = [each for each in self.commands if isinstance(each, FetchKv)]
            fetch = next(each for each in reversed(fetches) if each.fetch == report.fetch)
            self.fetched.append((fetch, self.read_tokens(fetch.block_ids, 0, fetch.num_tokens)))

    def read_tokens(self, block_ids: list[int], offset: int, num_tokens: int) -> Bytes:
        """Return the keys and values of tokens by layer, [tokens, bytes] uint8."""
        columns = []
        for pages in self.pages:
            slots = pages.find_slots(block_ids, offset, num_tokens)
            for layer in pages.layout.layers:
                run = pages.read(layer.layer, layer.heads, slots)
                num_key_bytes = num_tokens * layer.num_heads * layer.key_bytes
                columns += [part.reshape(num_tokens, -1) for part in np.split(run, [num_key_bytes])]
        return np.concatenate(columns, axis=1)


class OvertakingCluster(MovingCluster):
    """An engine that prefills and one that decodes."""

    engines: dict[str, OvertakingEngine]  # type: ignore[assignment]

    def create_engine(self, name: str, stages: Stages) -> OvertakingEngine:
        assert isinstance(stages, MappedStages)
        return OvertakingEngine(name, stages, self)


def make_prompts(rng: Random, count: int, num_tokens: int) -> list[list[int]]:
    return [rng.choices(range(3, 2048), k=num_tokens) for _ in range(count)]


Case = tuple[str, str, int, bool, bool]
CASES: list[Case] = list(
    product(("1", "2"), ("off", "chunk", "layer"), (1, 2, 3), (True, False), (False, True))
)
QUICK: set[Case] = {
    ("2", "layer", 2, False, False),
    ("2", "chunk", 3, True, True),
    ("1", "layer", 2, True, True),
}


@pytest.mark.parametrize(
    ("lanes", "kv_push", "num_stages", "has_equal_blocks", "is_preempted"), full_but(QUICK, CASES)
)
def test_both_engines_have_the_same_bytes(
    lanes: str, kv_push: str, num_stages: int, has_equal_blocks: bool, is_preempted: bool
) -> None:
    """D has one stage, whose blocks may be larger. In a small cache prompts are preempted."""
    num_kv_tokens = 288 if is_preempted else 1024
    prefill = stages_of("P", num_stages, 8, kv_push, lanes, num_kv_tokens)
    decode = stages_of("D", 1, 8 if has_equal_blocks else 16, kv_push, "1", 1024)
    client = FleetClient(lambda stream, names: min(names), pairs=LongPromptsInPairs())
    rng = Random(f"{lanes} {kv_push} {num_stages} {has_equal_blocks}")
    with closing(OvertakingCluster({"P": prefill, "D": decode}, client=client)) as rig:
        owner, receiver = rig.engines["P"], rig.engines["D"]
        streams = [
            client.submit(prompt, GREEDY, 24, [], 1, priority=-1)
            for prompt in make_prompts(rng, 3, 8)
        ]
        rig.run(streams, until=lambda: owner.scheduler.stats().decode_tokens > 3)
        for priority, prompt in enumerate(make_prompts(rng, 3, LONG_TOKENS)):
            streams.append(client.submit(prompt, GREEDY, 3, [], 1, priority=-priority))
            least = owner.scheduler.stats().prefill_tokens + 1
            rig.run(streams, partial(owner.has_prefilled, least))
        rig.run(streams)
        assert owner.scheduler.stats().preemptions > 0 or not is_preempted
        assert owner.num_overtakes > 0 or "1" in (lanes, str(num_stages))
        assert receiver.fetched or is_preempted
        for fetch, contents in receiver.fetched:
            first, whole = fetch.first_token, owner.held[fetch.ticket]
            assert np.array_equal(contents, whole[first : first + fetch.num_tokens])
        rig.check_empty()
