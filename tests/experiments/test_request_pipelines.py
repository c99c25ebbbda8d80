"""Requests that travel by themselves: nothing waits for another request's round."""

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.request_pipelines import MAX_PROMPT_TOKENS, RequestPipelines
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import ConstantCostModel, TransferCost
from gllm.sim.workloads.requests import WorkloadRequest
from tests.support.examples import num_examples
from tests.support.sim.requests import to_scheduler_requests

RATE = 12.5e6
"""100 Mbit/s in bytes per second."""
DELAY, STAGE = 0.03, 0.01
TOKEN_BYTES = 14_336
NUM_STAGES = 3


class WeakLinkCost(ConstantCostModel):
    """Stages of 10 ms, links of 100 Mbit/s and 30 ms; keeps the work of the first stage."""

    def __init__(self) -> None:
        super().__init__(STAGE)
        self.works: list[StageWork] = []

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the constant."""
        if stage == 0:
            self.works.append(work)
        return STAGE

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of the activations."""
        size = TOKEN_BYTES * work.num_tokens
        return TransferCost(size / RATE, DELAY, size)


class Recorder:
    """Arrivals and tokens of each sequence."""

    def __init__(self) -> None:
        self.arrivals: dict[int, float] = {}
        self.times: dict[int, list[float]] = defaultdict(list)

    def on_added(self, request: SchedulerRequest, now: float) -> None:
        """Keep the time."""
        self.arrivals[request.seq] = now

    def on_token(self, seq: int, now: float) -> None:
        """Keep the time."""
        self.times[seq].append(now)


def run(jobs: list[WorkloadRequest], num_kv_tokens: int = 100_000) -> tuple[Recorder, WeakLinkCost]:
    recorder, cost = Recorder(), WeakLinkCost()
    pipelines = RequestPipelines(
        NUM_STAGES, num_kv_tokens, cost, recorder.on_added, recorder.on_token
    )
    pipelines.submit_each(to_scheduler_requests(jobs))
    pipelines.loop.run()
    return recorder, cost


LENGTHS = st.tuples(st.floats(0, 3), st.integers(1, 300), st.integers(1, 20))


@given(st.lists(LENGTHS, min_size=1, max_size=12))
@settings(max_examples=num_examples(20, 200), deadline=None)
def test_each_token_comes_once_and_no_faster_than_the_pipeline(
    lengths: list[tuple[float, int, int]],
) -> None:
    jobs = [WorkloadRequest(*each) for each in sorted(lengths)]
    recorder, cost = run(jobs)
    least = NUM_STAGES * STAGE + (NUM_STAGES - 1) * (DELAY + TOKEN_BYTES / RATE)
    for seq, job in enumerate(jobs):
        times = recorder.times[seq]
        assert len(times) == job.num_output_tokens
        assert all(after - before >= least - 1e-6 for before, after in pairwise(times))
        prompt = (NUM_STAGES - 1) * TOKEN_BYTES * (job.num_prompt_tokens - 1) / RATE
        assert times[0] - recorder.arrivals[seq] >= least + prompt - 1e-6
    tokens = Counter(n for work in cost.works for _, n in work.prefill_chunks)
    assert tokens == Counter(j.num_prompt_tokens for j in jobs if j.num_prompt_tokens > 1)


def test_a_decode_starts_when_its_own_token_is_back() -> None:
    """The rounds of two requests are not tied to each other: both keep the least time."""
    recorder, _ = run([WorkloadRequest(0.0, 1, 30), WorkloadRequest(0.05, 1, 30)])
    least = NUM_STAGES * STAGE + (NUM_STAGES - 1) * (DELAY + TOKEN_BYTES / RATE)
    for times in recorder.times.values():
        gaps = [after - before for before, after in pairwise(times)]
        assert gaps == pytest.approx([least] * len(gaps), abs=1e-6)


def test_whole_prompts_go_first_then_the_decodes_that_had_arrived() -> None:
    jobs = [WorkloadRequest(0.0, 1, 3), *[WorkloadRequest(0.001, 2000, 1)] * 3]
    _, cost = run(jobs)
    first, second, third = cost.works[:3]
    assert (first.num_decodes, first.prefill_chunks) == (1, ())
    # Three prompts exceed the limit of a batch.
    assert second.prefill_chunks == ((0, 2000), (0, 2000))
    assert second.num_tokens <= MAX_PROMPT_TOKENS
    assert third.prefill_chunks == ((0, 2000),)


def test_a_decode_waits_behind_a_whole_prompt_on_the_link() -> None:
    recorder, _ = run([WorkloadRequest(0.0, 1, 60), WorkloadRequest(1.0, 2000, 1)])
    gaps = [after - before for before, after in pairwise(recorder.times[0])]
    assert max(gaps) > 2000 * TOKEN_BYTES / RATE


def test_requests_wait_for_the_kv_cache_and_too_large_ones_are_refused() -> None:
    jobs = [WorkloadRequest(0.0, 100, 10), WorkloadRequest(0.0, 100, 10)]
    recorder, _ = run(jobs, num_kv_tokens=200)
    assert recorder.times[1][0] > recorder.times[0][-1]
    with pytest.raises(ValueError, match="a request of 110 tokens never fits into a KV cache of"):
        run(jobs, num_kv_tokens=100)
