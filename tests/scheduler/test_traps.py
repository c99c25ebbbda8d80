"""Loads that are known to hang, starve or leak in systems of this kind, one by one."""

from collections.abc import Sequence
from typing import Any

import pytest

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepResult
from gllm.scheduler.sequence import SchedulerRequest
from tests.support.scheduler.pipeline import EVERY_POLICY, Pipeline, generate

POLICIES = [name for name in EVERY_POLICY if name != "auto"]
VARIANTS = ("throttle-paper", "throttle-no-wt", "throttle-no-ut")
"""Policies that differ from `throttle` in a budget: their cases are `full`."""


def policy_cases(names: Sequence[str] = POLICIES) -> pytest.MarkDecorator:
    """Parametrize a test by policies."""
    marks = {name: [pytest.mark.full] if name in VARIANTS else [] for name in names}
    return pytest.mark.parametrize(
        "policy", [pytest.param(name, marks=marks[name]) for name in names]
    )


def prompt(tokens: int, mark: int = 1) -> list[int]:
    """A prompt that shares no block with one of another mark."""
    return [mark, *range(tokens - 1)]


def pipeline(
    stages: int, num_blocks: int, max_model_len: int, policy: str = "throttle", **options: Any
) -> Pipeline:
    config = SchedulerConfig(policy=policy, **options)
    return Pipeline(config.resolve(stages, num_blocks, max_model_len))


@policy_cases()
def test_one_prompt_may_fill_the_cache_when_nothing_decodes(policy: str) -> None:
    """97 of 100 blocks: below the threshold prefill is suspended only for the sake of decodes."""
    pipe = pipeline(4, 100, 1600, policy)
    pipe.add(SchedulerRequest(0, prompt(97 * 16), 16))
    pipe.drain(5000)
    assert pipe.ended == {0: "length"}
    assert pipe.scheduler.stats().preemptions == 0


@policy_cases()
def test_a_warm_prefix_cache_that_fills_all_blocks_counts_as_free(policy: str) -> None:
    pipe = pipeline(2, 20, 320, policy)
    pipe.add(SchedulerRequest(0, prompt(300), 4))
    pipe.drain(5000)
    assert len(pipe.scheduler.kv_cache.block_pool.describe().evictable) >= 18
    pipe.add(SchedulerRequest(1, prompt(310, mark=2), 4))
    pipe.drain(5000)
    assert pipe.ended[1] == "length"
    assert pipe.scheduler.stats().preemptions == 0


@policy_cases()
def test_half_prefilled_holders_make_way_for_a_priority_arrival(policy: str) -> None:
    chunks = {"max_prefill_tokens": 64, "min_prefill_tokens": 64, "max_num_batched_tokens": 64}
    pipe = pipeline(4, 40, 512, policy, **chunks)
    pipe.add(SchedulerRequest(0, prompt(500), 8, priority=1))
    for _ in range(3):
        pipe.schedule()
    pipe.add(SchedulerRequest(1, prompt(480, mark=2), 8, priority=1))
    pipe.add(SchedulerRequest(2, prompt(490, mark=3), 8, priority=0))
    pipe.drain(5000)
    assert list(pipe.ended) == [2, 0, 1]
    assert all(pipe.generated[seq] == generate(pipe.requests[seq]) for seq in pipe.ended)


@policy_cases()
def test_requests_of_half_the_cache_each_all_end(policy: str) -> None:
    """60 blocks, 4 stages, requests up to 31 blocks: two never fit at the same time."""
    pipe = pipeline(4, 60, 31 * 16, policy)
    for seq in range(8):
        pipe.add(SchedulerRequest(seq, prompt(30 * 16 - 8 * seq, mark=seq), 16))
    pipe.drain(20_000)
    assert set(pipe.ended) == set(range(8))


def test_a_full_hit_computes_the_last_token_only_in_its_last_block() -> None:
    pipe = pipeline(1, 50, 200)
    pipe.add(SchedulerRequest(0, prompt(64), 1))
    pipe.drain()
    pipe.add(SchedulerRequest(1, prompt(64), 1))
    plan = pipe.schedule()
    assert plan is not None
    assert [(row.start, row.num_tokens, row.should_sample) for row in plan.rows] == [(48, 16, True)]


def test_a_salt_separates_tenants() -> None:
    pipe = pipeline(1, 50, 200)
    for seq, salt in enumerate(["a", "b", "a"]):
        pipe.add(SchedulerRequest(seq, prompt(64), 1, cache_salt=salt))
        pipe.drain()
    hits = {s: pipe.requests[s].cache_salt for s in pipe.ended}
    assert hits == {0: "a", 1: "b", 2: "a"}
    assert pipe.scheduler.stats().prefix_hits == 48


def test_a_prompt_that_has_to_be_computed_reads_no_cache() -> None:
    """Its blocks are offered to others all the same, and its other choices share them."""
    pipe = pipeline(1, 50, 200)
    pipe.add(SchedulerRequest(0, prompt(64), 1))
    pipe.drain()
    pipe.add(SchedulerRequest(1, prompt(64), 1, n=2, reads_prefix_cache=False))
    plan = pipe.schedule()
    assert plan is not None
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(0, 64)]
    pipe.drain()
    stats = pipe.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (128, 48)
    pipe.add(SchedulerRequest(3, prompt(64), 1))
    pipe.drain()
    assert pipe.scheduler.stats().prefix_hits == 96


def test_chunks_of_one_prompt_are_in_flight_together() -> None:
    pipe = pipeline(4, 100, 1000, max_prefill_tokens=100, min_prefill_tokens=100)
    pipe.add(SchedulerRequest(0, prompt(400), 1))
    starts = [plan.rows[0].start for _ in range(4) if (plan := pipe.schedule())]
    assert starts == [0, 100, 200, 300]
    assert pipe.schedule() is None


def test_choices_share_the_full_blocks_of_the_prompt_without_a_prefix_cache() -> None:
    config = SchedulerConfig(prefix_cache=False).resolve(1, 100, 200)
    pipe = Pipeline(config)
    pipe.add(SchedulerRequest(0, prompt(100), 8, n=4))
    pipe.schedule()
    pipe.commit()
    plan = pipe.schedule()
    assert plan is not None
    chunks = [(row.seq, row.start, row.num_tokens) for row in plan.rows if row.num_tokens > 1]
    assert chunks == [(1, 96, 4), (2, 96, 4), (3, 96, 4)]
    pipe.drain()
    assert len(pipe.ended) == 4


def test_an_aborted_sequence_in_flight_keeps_its_blocks_until_its_commit() -> None:
    pipe = pipeline(2, 20, 200)
    pipe.add(SchedulerRequest(0, prompt(60), 10))
    pipe.schedule()
    before = pipe.scheduler.kv_cache.block_pool.num_free_blocks
    pipe.abort([0])
    assert pipe.scheduler.kv_cache.block_pool.num_free_blocks == before
    pipe.commit()
    assert pipe.scheduler.stats().kv_usage == 0


def test_a_choice_that_failed_ends_alone() -> None:
    pipe = pipeline(2, 50, 200)
    pipe.add(SchedulerRequest(0, prompt(20), 5))
    pipe.add(SchedulerRequest(1, prompt(20, mark=2), 5))
    pipe.schedule()
    outcome = pipe.commit(errors={0: "logits are not finite"})
    assert [(end.seq, end.finish_reason, end.error) for end in outcome.finished] == [
        (0, "error", "logits are not finite")
    ]
    pipe.drain()
    assert pipe.ended == {0: "error", 1: "length"}


def test_a_failed_step_ends_its_sequences_and_publishes_nothing() -> None:
    pipe = pipeline(1, 50, 200)
    pipe.add(SchedulerRequest(0, prompt(64), 5))
    plan = pipe.scheduler.schedule(0.0)
    assert plan is not None
    outcome = pipe.scheduler.commit(StepResult(plan.step, [], "broken"))
    assert [end.error for end in outcome.finished] == ["broken"]
    assert not pipe.scheduler.kv_cache.block_pool.digests


def test_results_out_of_order_are_refused() -> None:
    pipe = pipeline(2, 50, 200)
    pipe.add(SchedulerRequest(0, prompt(64), 5))
    pipe.schedule()
    with pytest.raises(ValueError, match="step 0 is next"):
        pipe.scheduler.commit(StepResult(7, []))


def test_what_can_never_run_is_refused() -> None:
    pipe = pipeline(2, 50, 200)
    with pytest.raises(ValueError, match="at most 200"):
        pipe.add(SchedulerRequest(0, prompt(200), 1))
    with pytest.raises(ValueError, match="raise --kv-cache-memory or lower --max-model-len"):
        pipeline(2, 12, 200)


def test_phase_pure_steps_never_mix() -> None:
    pipe = pipeline(2, 200, 200, phase_pure=True)
    for seq in range(8):
        pipe.add(SchedulerRequest(seq, prompt(100, mark=seq), 20))
    while pipe.alive:
        plan = pipe.schedule()
        if plan is None:
            pipe.commit()
            continue
        phases = {row.start >= len(pipe.requests[row.seq].prompt_token_ids) for row in plan.rows}
        assert len(phases) == 1
