"""Which fetches the driver makes, and which it declines because a prefill takes less time."""

import time
from types import SimpleNamespace
from typing import Any, cast

from gllm.messages.handoff import KvSource
from gllm.messages.kv_transfer import CancelKvFetch, FetchKv, KvCommand, KvFetched
from gllm.messages.requests import SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.driver.driver_kv import MIN_PREFILL_TOKENS, DriverKv
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_transfers import KvFetch
from gllm.scheduler.plan import SampledToken, SchedulerStats, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.step_cost import StepCostCoefficients

NUM_TOKENS = 100


class Fetching:
    """A driver's transfers, over a scheduler that wants to fetch every sequence."""

    def __init__(self, token_seconds: float, num_computed: int = MIN_PREFILL_TOKENS) -> None:
        self.ended: list[bool] = []
        self._sent: list[KvCommand] = []
        self._fetches: dict[int, KvFetch] = {}
        self._num_seqs = 0
        transfers = SimpleNamespace(
            fetches=self._fetches,
            start_fetches=lambda now: list(self._fetches.values()),
            finish_fetch=self._finish,
            pop_readable=list,
            tickets=(),
        )
        scheduler = SimpleNamespace(
            config=SchedulerConfig(),
            transfers=transfers,
            stats=lambda: SchedulerStats(prefill_tokens=num_computed),
        )
        self.kv = DriverKv(cast(Scheduler, scheduler), lambda report: None)
        self.kv.connect(self._sent.append)
        self.kv.coefficients = StepCostCoefficients(token=token_seconds)

    def run(self, engine: str = "P") -> bool:
        """Submit a request whose KV another engine has; return True if it is fetched."""
        self._num_seqs += 1
        seq, prompt = self._num_seqs, [7] * (NUM_TOKENS + 1)
        source = KvSource(engine, 1, 1, NUM_TOKENS, b"")
        sampling = SequenceSamplingParams()
        message = SubmitRequest(seq, prompt, sampling, 4, [], kv_source=source)
        request = self.kv.add_transfer_fields(SchedulerRequest(seq, prompt, 4), message)
        fetch = KvFetch(seq, 0, request.kv_source_tokens, [1], request.kv_source)
        self._fetches[seq] = fetch
        self.kv.start_fetches()
        sent: list[Any] = self._sent.copy()
        self._sent.clear()
        for command in sent:
            assert isinstance(command, FetchKv)
            self.kv.on_message(KvFetched(command.fetch, True, NUM_TOKENS * 64, 0.01))
        assert self.ended.pop() == bool(sent)
        return bool(sent)

    def _finish(self, seq: int, is_ok: bool) -> None:
        del self._fetches[seq]
        self.ended.append(is_ok)


def test_a_fetch_that_takes_longer_than_the_prefill_is_declined() -> None:
    fast, slow = Fetching(0.0), Fetching(10.0)
    # The first one measures the rate.
    assert [fast.run() for _ in range(4)] == [True, False, False, False]
    assert fast.run("other"), "the rate to each engine is its own"
    assert all(slow.run() for _ in range(4))
    fast.kv.fetch_choice, slow.kv.fetch_choice = "always", "never"
    assert fast.run()
    assert not slow.run()


def test_a_victim_fetches_again_from_the_source_that_it_had() -> None:
    config = SchedulerConfig(block_size=4, expected_output_tokens=0, async_scheduling=False)
    scheduler, sent = Scheduler(config.resolve(1, 8, 32)), list[KvCommand]()
    kv = DriverKv(scheduler, lambda report: None)
    kv.connect(sent.append)

    def step() -> None:
        """Run a turn of the driver and the step that it schedules, if there is one."""
        kv.start_fetches()
        plan = scheduler.schedule(time.monotonic())
        kv.report_transfers()
        if plan is not None:
            sampled = [SampledToken(row.seq, row.num_preemptions, 1) for row in plan.rows]
            scheduler.commit(StepResult(plan.step, sampled))

    scheduler.add(SchedulerRequest(0, list(range(7)), 12), time.monotonic())
    step()
    source = KvSource("P", 1, 77, 15, b"endpoint")
    message = SubmitRequest(
        1, list(range(20, 35)), SequenceSamplingParams(), 4, [], outputs=[[1]], kv_source=source
    )
    request = SchedulerRequest(1, message.prompt, 4, outputs=message.outputs)
    scheduler.add(kv.add_transfer_fields(request, message), time.monotonic())
    while not any(isinstance(each, CancelKvFetch) for each in sent):
        step()
    first, cancellation = sent
    assert isinstance(first, FetchKv)
    assert cancellation == CancelKvFetch(first.fetch)
    sent.clear()
    kv.on_message(KvFetched(first.fetch, False, cause="the fetch was cancelled"))
    while not sent:
        step()
    (second,) = sent
    assert isinstance(second, FetchKv)
    assert (second.ticket, second.endpoint, second.num_tokens) == (77, b"endpoint", 15)
    kv.on_message(KvFetched(second.fetch, True, 15 * 64))
    while scheduler.stats().unfinished:
        step()
    assert scheduler.stats().prefill_tokens == 7
    assert not kv.is_active


def test_an_engine_that_only_decodes_does_not_know_the_cost_of_a_prefill() -> None:
    fetching = Fetching(0.0, num_computed=MIN_PREFILL_TOKENS - 1)
    assert all(fetching.run() for _ in range(4))
