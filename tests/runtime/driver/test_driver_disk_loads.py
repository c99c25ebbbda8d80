"""Requests whose first blocks are on disk: what the driver loads, and how the requests go on."""

import time
from typing import Any

import pytest

from gllm.messages.base import WireMessage
from gllm.messages.kv_disk import (
    KvDiskOpened,
    KvDiskRecords,
    KvDiskTotals,
    LoadKvFromDisk,
    PrefetchKvOnDisk,
)
from gllm.messages.kv_transfer import CancelKvFetch, KvCommand, KvFetched, KvMoverGone
from gllm.messages.requests import SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.observability.logged_scheduler import LoggedScheduler, replay_event
from gllm.observability.step_log import ScheduleEvent, StepLogEvent
from gllm.runtime.driver.driver_kv import DriverKv
from gllm.scheduler.block_pool import chain_hashes, root_hash
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.disk_index import DiskBlock
from gllm.scheduler.plan import FirstToken, SampledToken, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.step_cost import StepCostCoefficients

SIZE = 4
SECRET = b"k" * 32
PROMPT = list(range(20, 43))
"""Five full blocks and three tokens."""


class LoadingDriver:
    """A driver whose disk tier has the first blocks of PROMPT."""

    def __init__(self, num_on_disk: int, num_blocks: int = 32) -> None:
        config = SchedulerConfig(block_size=SIZE, expected_output_tokens=0, async_scheduling=False)
        self.log: list[StepLogEvent] = []
        resolved = config.resolve(1, num_blocks, 64)
        self.scheduler = LoggedScheduler(resolved, self.log.append, time.monotonic)
        self.sent: list[KvCommand] = []
        self.reports: list[WireMessage] = []
        self.first_tokens: list[FirstToken] = []
        self.kv = DriverKv(self.scheduler, self.reports.append, has_disk=True)
        self.kv.connect(self.sent.append)
        self.keys = chain_hashes(root_hash("", SECRET), PROMPT[:20], SIZE, SECRET)
        parents = [root_hash("", SECRET), *self.keys]
        blocks = [
            DiskBlock(key, parents[number], number * SIZE, 1.0)
            for number, key in enumerate(self.keys[:num_on_disk])
        ]
        self.kv.on_message(KvDiskRecords(blocks))
        self.kv.on_message(KvDiskOpened(SECRET, 100, 10))

    def submit(self, seq: int, prompt: list[int], max_tokens: int = 2, **fields: Any) -> None:
        request = SchedulerRequest(seq, prompt, max_tokens)._replace(**fields)
        outputs = [list(each) for each in request.outputs]
        message = SubmitRequest(seq, prompt, SequenceSamplingParams(), max_tokens, [])
        assert not outputs or len(outputs) == request.n
        self.scheduler.add(self.kv.add_transfer_fields(request, message), time.monotonic())

    def step(self) -> bool:
        """Run a turn of the driver and the step that it schedules; return False if it has none."""
        self.kv.start_fetches()
        plan = self.scheduler.schedule(time.monotonic())
        self.kv.report_transfers()
        if plan is None:
            return False
        sampled = [
            SampledToken(row.seq, row.num_preemptions, 1) for row in plan.rows if row.should_sample
        ]
        output = self.scheduler.commit(StepResult(plan.step, sampled))
        self.first_tokens += output.first_tokens
        return True

    def run(self) -> None:
        while self.scheduler.stats().unfinished:
            assert self.step()

    def pop_load(self) -> LoadKvFromDisk:
        (load,) = (each for each in self.sent if isinstance(each, LoadKvFromDisk))
        self.sent.clear()
        return load

    def totals(self) -> KvDiskTotals:
        self.kv.report_transfers()
        return sum(
            (each for each in self.reports if isinstance(each, KvDiskTotals)), KvDiskTotals()
        )


def test_blocks_on_disk_are_loaded_and_not_computed() -> None:
    driver = LoadingDriver(num_on_disk=4)
    driver.submit(0, PROMPT)
    # The read begins when the request is queued.
    assert driver.sent == [PrefetchKvOnDisk(driver.keys[:4])]
    assert not driver.step()
    load = driver.pop_load()
    assert load.keys == driver.keys[:4]
    assert len(set(load.block_ids)) == 4
    driver.kv.on_message(KvFetched(load.fetch, True, 1000, 0.01))
    driver.run()
    assert driver.scheduler.stats().prefill_tokens == len(PROMPT) - 16
    assert [first.num_cached_tokens for first in driver.first_tokens] == [16]
    totals = driver.totals()
    assert (totals.num_queried_tokens, totals.num_hit_tokens, totals.num_loads) == (20, 16, 1)
    assert totals.num_read_bytes == 1000
    # Now they are in memory.
    driver.submit(1, PROMPT)
    driver.run()
    assert not [each for each in driver.sent if isinstance(each, LoadKvFromDisk)]
    assert driver.scheduler.stats().fetched_tokens == 0, "no other engine had them"


def test_only_what_memory_lacks_is_loaded() -> None:
    driver = LoadingDriver(num_on_disk=5)
    driver.submit(0, PROMPT[:9], max_tokens=1)
    driver.sent.clear()
    # The first two blocks are loaded for the first request.
    driver.step()
    load = driver.pop_load()
    assert load.keys == driver.keys[:2]
    driver.kv.on_message(KvFetched(load.fetch, True, 1000, 0.01))
    driver.run()
    driver.submit(1, PROMPT)
    driver.step()
    assert driver.pop_load().keys == driver.keys[2:5]


@pytest.mark.parametrize("cause", ["failed", "gone", "evicted"])
def test_what_cannot_be_loaded_is_computed(cause: str) -> None:
    driver = LoadingDriver(num_on_disk=4)
    driver.submit(0, PROMPT)
    if cause == "evicted":
        assert driver.kv.disk is not None
        driver.kv.disk._discard(driver.keys[1:2])
    driver.step()
    if cause == "failed":
        load = driver.pop_load()
        driver.kv.on_message(KvFetched(load.fetch, False, cause="a block on disk is damaged"))
    elif cause == "gone":
        driver.kv.on_message(KvMoverGone())
    driver.run()
    assert driver.scheduler.stats().prefill_tokens == len(PROMPT)
    assert [first.num_cached_tokens for first in driver.first_tokens] == [0]
    assert driver.totals().num_failed_loads == 1
    assert driver.scheduler.stats().failed_fetches == 0, "no other engine was asked"


def test_a_load_that_takes_longer_than_the_prefill_is_not_made() -> None:
    driver = LoadingDriver(num_on_disk=4)
    driver.submit(0, PROMPT)
    driver.step()
    load = driver.pop_load()
    # Ten seconds for 16 tokens, which are computed in a moment.
    driver.kv.on_message(KvFetched(load.fetch, True, 1000, 10.0))
    driver.run()
    driver.kv.set_step_cost(StepCostCoefficients(token=1e-6))
    for seq in range(1, 80):
        driver.submit(seq, [100 + seq] * 17, max_tokens=1)
    driver.run()
    driver.scheduler.reset_prefix_cache()
    driver.sent.clear()
    driver.submit(90, PROMPT)
    driver.run()
    assert not [each for each in driver.sent if isinstance(each, LoadKvFromDisk)]
    driver.kv.fetch_choice = "always"
    driver.scheduler.reset_prefix_cache()
    driver.submit(91, PROMPT)
    driver.step()
    assert driver.pop_load().keys == driver.keys[:4]


def test_requests_that_score_their_prompt_load_nothing() -> None:
    driver = LoadingDriver(num_on_disk=4)
    driver.submit(0, PROMPT, reads_prefix_cache=False)
    driver.kv.fetch_choice = "never"
    driver.submit(1, PROMPT)
    driver.run()
    assert not [each for each in driver.sent if isinstance(each, LoadKvFromDisk)]


def test_a_resumed_request_loads_its_output_too() -> None:
    driver = LoadingDriver(num_on_disk=5)
    driver.submit(0, PROMPT[:18], max_tokens=9, outputs=[PROMPT[18:]])
    driver.step()
    assert driver.pop_load().keys == driver.keys


def test_an_aborted_load_ends_before_its_blocks_are_free() -> None:
    driver = LoadingDriver(num_on_disk=4)
    driver.submit(0, PROMPT)
    driver.step()
    load = driver.pop_load()
    driver.scheduler.abort([0])
    driver.step()
    assert driver.sent == [CancelKvFetch(load.fetch)]
    assert driver.scheduler.stats().kv_usage > 0
    driver.kv.on_message(KvFetched(load.fetch, False, cause="the load was cancelled"))
    assert driver.scheduler.stats().kv_usage == 0


def test_the_step_log_repeats_loads() -> None:
    driver = LoadingDriver(num_on_disk=4)
    driver.submit(0, PROMPT)
    driver.step()
    driver.kv.on_message(KvFetched(driver.pop_load().fetch, True, 1000, 0.01))
    driver.run()
    again = Scheduler(driver.scheduler.config)
    for event in driver.log:
        plan = replay_event(again, event)
        assert not isinstance(event, ScheduleEvent) or plan == event.plan
    assert again.stats() == driver.scheduler.stats()
