"""Requests whose first blocks are on disk: what the driver loads, and how the requests go on."""

import time
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from gllm.scheduler.kv_transfers import READ_AHEAD_SHARE
from gllm.scheduler.plan import FirstToken, SampledToken, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.step_cost import StepCostCoefficients
from tests.support.examples import num_examples

SIZE = 4
SECRET = b"k" * 32
PROMPT = list(range(20, 43))
"""Five full blocks and three tokens."""


def make_records(prompt: list[int], num_blocks: int) -> list[DiskBlock]:
    """Return the first blocks of a prompt as a mover reports them."""
    keys = chain_hashes(root_hash("", SECRET), prompt[: num_blocks * SIZE], SIZE, SECRET)
    parents = [root_hash("", SECRET), *keys]
    return [DiskBlock(key, parents[number], number * SIZE, 1.0) for number, key in enumerate(keys)]


class LoadingDriver:
    """A driver whose disk tier has the first blocks of PROMPT."""

    def __init__(self, num_on_disk: int, num_blocks: int = 32, **fields: Any) -> None:
        fields = {
            "block_size": SIZE,
            "expected_output_tokens": 0,
            "async_scheduling": False,
        } | fields
        config = SchedulerConfig(**fields)
        self.log: list[StepLogEvent] = []
        resolved = config.resolve(1, num_blocks, min(64, num_blocks * SIZE))
        self.scheduler = LoggedScheduler(resolved, self.log.append, time.monotonic)
        self.sent: list[KvCommand] = []
        self.reports: list[WireMessage] = []
        self.first_tokens: list[FirstToken] = []
        self.kv = DriverKv(self.scheduler, self.reports.append, has_disk=True)
        self.kv.connect(self.sent.append)
        self.keys = chain_hashes(root_hash("", SECRET), PROMPT[:20], SIZE, SECRET)
        self.kv.on_message(KvDiskRecords(make_records(PROMPT, num_on_disk)))
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

    def run_with_loads(self) -> None:
        """Run to the end; all loads succeed at once."""
        while self.scheduler.stats().unfinished:
            has_step = self.step()
            loads = [each for each in self.sent if isinstance(each, LoadKvFromDisk)]
            self.sent.clear()
            for load in loads:
                self.kv.on_message(KvFetched(load.fetch, True, 1000, 0.01))
            assert has_step or loads

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


def replay(driver: LoadingDriver) -> None:
    again = Scheduler(driver.scheduler.config)
    for event in driver.log:
        plan = replay_event(again, event)
        assert not isinstance(event, ScheduleEvent) or plan == event.plan
    assert again.stats() == driver.scheduler.stats()


def test_the_step_log_repeats_loads() -> None:
    driver = LoadingDriver(num_on_disk=4)
    driver.submit(0, PROMPT)
    driver.step()
    driver.kv.on_message(KvFetched(driver.pop_load().fetch, True, 1000, 0.01))
    driver.run()
    replay(driver)


def test_blocks_that_were_read_are_reported_as_stored() -> None:
    driver = LoadingDriver(num_on_disk=4)
    driver.scheduler.kv_cache.watch(with_token_ids=True)
    driver.submit(0, PROMPT)
    driver.step()
    driver.kv.on_message(KvFetched(driver.pop_load().fetch, True, 1000, 0.01))
    events = driver.scheduler.kv_cache.pop_events()
    assert events is not None
    (stored,) = events.stored
    assert stored.digests == chain_hashes(root_hash(""), PROMPT[:16], SIZE)
    assert list(stored.token_ids) == PROMPT[:16]


# Requests that are read ahead because they cannot be admitted yet.


def make_busy_driver(num_on_disk: int = 4, **fields: Any) -> LoadingDriver:
    """Return a driver whose only place is taken by sequence 0, which generates 20 tokens."""
    driver = LoadingDriver(num_on_disk, **{"max_num_seqs": 1} | fields)
    driver.submit(0, [7] * 5, max_tokens=20)
    driver.step()
    return driver


def test_a_request_without_a_place_is_read_ahead_and_a_hit_once() -> None:
    driver = make_busy_driver()
    driver.submit(1, PROMPT)
    driver.step()
    load = driver.pop_load()
    assert load.keys == driver.keys[:4]
    driver.kv.on_message(KvFetched(load.fetch, True, 1000, 0.01))
    assert driver.scheduler.stats().running == 1
    # What was read may be evicted: it takes nothing from others.
    assert driver.scheduler.kv_cache.num_spare_blocks >= 28
    driver.run()
    assert not [each for each in driver.sent if isinstance(each, LoadKvFromDisk)]
    assert [first.num_cached_tokens for first in driver.first_tokens] == [0, 16]
    stats = driver.scheduler.stats()
    assert stats.prefill_tokens == 5 + len(PROMPT) - 16
    assert stats.prefix_hits == 0, "they were on disk"
    assert (driver.totals().num_hit_tokens, driver.totals().num_loads) == (16, 1)
    replay(driver)


def test_a_prompt_in_front_of_a_request_neither_delays_its_read_nor_waits_for_it() -> None:
    driver = LoadingDriver(num_on_disk=4)
    driver.submit(0, [7] * 9)
    driver.submit(1, PROMPT)
    driver.submit(2, [8] * 9)
    while driver.step():
        pass
    load = driver.pop_load()
    assert len(driver.first_tokens) == 2
    driver.kv.on_message(KvFetched(load.fetch, True, 1000, 0.01))
    driver.run()
    assert [first.num_cached_tokens for first in driver.first_tokens] == [0, 0, 16]


def test_what_was_evicted_before_the_admission_is_read_again() -> None:
    driver = make_busy_driver()
    driver.submit(1, PROMPT)
    driver.step()
    driver.kv.on_message(KvFetched(driver.pop_load().fetch, True, 1000, 0.01))
    driver.scheduler.reset_prefix_cache()
    while not [each for each in driver.sent if isinstance(each, LoadKvFromDisk)]:
        driver.step()
    driver.kv.on_message(KvFetched(driver.pop_load().fetch, True, 1000, 0.01))
    driver.run()
    assert [first.num_cached_tokens for first in driver.first_tokens] == [0, 16]


def test_an_aborted_request_gives_back_what_is_read_ahead() -> None:
    driver = make_busy_driver()
    driver.submit(1, PROMPT)
    driver.step()
    load = driver.pop_load()
    driver.scheduler.abort([0, 1])
    driver.step()
    assert driver.sent == [CancelKvFetch(load.fetch)]
    assert driver.scheduler.stats().kv_usage > 0
    driver.kv.on_message(KvFetched(load.fetch, False, cause="the load was cancelled"))
    assert driver.scheduler.stats().kv_usage == 0
    assert driver.scheduler.stats().unfinished == 0


def test_a_failed_read_ahead_is_tried_once_more() -> None:
    driver = make_busy_driver()
    driver.submit(1, PROMPT)
    driver.step()
    driver.kv.on_message(KvFetched(driver.pop_load().fetch, False, cause="damaged"))
    while not [each for each in driver.sent if isinstance(each, LoadKvFromDisk)]:
        driver.step()
    driver.kv.on_message(KvFetched(driver.pop_load().fetch, False, cause="damaged"))
    driver.run()
    assert [first.num_cached_tokens for first in driver.first_tokens] == [0, 0]


def test_reads_ahead_are_bounded_and_parts_of_a_prompt_are_read() -> None:
    driver = make_busy_driver(5, num_blocks=24)
    prompts = [[number, *PROMPT[1:]] for number in range(10)]
    disk = driver.kv.disk
    assert disk is not None
    for prompt in prompts:
        disk._machines[0].blocks |= {block.key: block for block in make_records(prompt, 5)}
    disk._start_if_complete()
    for seq, prompt in enumerate(prompts, 1):
        driver.submit(seq, prompt)
    driver.sent.clear()
    driver.step()
    loads = [each for each in driver.sent if isinstance(each, LoadKvFromDisk)]
    assert [len(load.keys) for load in loads] == [5, 1]
    assert sum(len(load.keys) for load in loads) == int(READ_AHEAD_SHARE * 24)
    # Those of an aborted request have their blocks until they end.
    driver.scheduler.abort([1])
    driver.sent.clear()
    driver.step()
    assert driver.sent == [CancelKvFetch(loads[0].fetch)]
    driver.kv.on_message(KvFetched(loads[0].fetch, False, cause="the load was cancelled"))
    driver.step()
    assert len(driver.pop_load().keys) == 5


def test_a_decode_without_a_block_ends_reads_ahead() -> None:
    driver = LoadingDriver(4, 12, max_num_seqs=1, kv_threshold=0.0)
    driver.submit(0, [7] * 5, max_tokens=36)
    driver.step()
    driver.submit(1, PROMPT)
    driver.step()
    load = driver.pop_load()
    assert len(load.keys) == 3
    # The decode needs more than the other nine blocks.
    while driver.step():
        pass
    assert driver.sent == [CancelKvFetch(load.fetch)]
    driver.kv.on_message(KvFetched(load.fetch, False, cause="the load was cancelled"))
    driver.sent.clear()
    driver.run_with_loads()
    assert driver.scheduler.stats().preemptions == 0
    assert [first.num_cached_tokens for first in driver.first_tokens] == [0, 16]


@settings(max_examples=num_examples(12, 1500), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(12, 30),
    max_num_seqs=st.integers(1, 3),
    eviction=st.sampled_from(["lru", "return"]),
)
def test_requests_end_and_all_blocks_return_whatever_is_read(
    seed: int, num_blocks: int, max_num_seqs: int, eviction: str
) -> None:
    rng = Random(seed)
    driver = LoadingDriver(
        5,
        num_blocks,
        max_num_seqs=max_num_seqs,
        prefix_cache_eviction=eviction,
        kv_threshold=rng.choice([0.0, 0.1]),
    )
    kv_cache, num_requests = driver.scheduler.kv_cache, 0
    in_flight: list[LoadKvFromDisk] = []
    cancelled: set[int] = set()
    for turn in range(250):
        if rng.random() < 0.3 and turn < 80:
            prompt = PROMPT[: rng.randint(1, 23)] + [rng.randrange(3)] * rng.randint(0, 9)
            driver.submit(num_requests, prompt, rng.randint(1, 9))
            num_requests += 1
        if rng.random() < 0.05:
            driver.scheduler.abort([rng.randrange(num_requests + 1)])
        if rng.random() < 0.03:
            driver.scheduler.reset_prefix_cache()
        driver.step()
        in_flight += [each for each in driver.sent if isinstance(each, LoadKvFromDisk)]
        cancelled |= {each.fetch for each in driver.sent if isinstance(each, CancelKvFetch)}
        driver.sent.clear()
        targets = [block for load in in_flight for block in load.block_ids]
        assert len(set(targets)) == len(targets)
        loaded = [block for load in in_flight if load.fetch < 0 for block in load.block_ids]
        assert len(loaded) <= READ_AHEAD_SHARE * num_blocks
        assert len(kv_cache.running) <= max_num_seqs
        tables = {block for s in kv_cache.running.values() for block in s.block_ids}
        tables |= {block for s in kv_cache.loading.values() for block in s.block_ids}
        assert set(kv_cache.block_pool.describe().references) == tables
        assert tables >= set(targets), "nobody else may use what is written"
        for load in list(in_flight):
            if rng.random() < (1.0 if turn > 150 else 0.3):
                in_flight.remove(load)
                is_ok = load.fetch not in cancelled and rng.random() < 0.8
                driver.kv.on_message(KvFetched(load.fetch, is_ok, 1000, 0.01))
    assert driver.scheduler.stats().unfinished == 0
    assert driver.scheduler.stats().kv_usage == 0
    assert not kv_cache.loading
    assert not driver.scheduler.transfers.is_active
    replay(driver)
