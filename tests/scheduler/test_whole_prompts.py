"""Policies that compute whole prompts: vllm, and the baselines of Vidur."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepPlan
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_traps import prompt
from tests.support.examples import further_runs, num_examples
from tests.support.scheduler.pipeline import RESERVING_POLICIES, Pipeline, generate

WHOLE_PROMPT_POLICIES = ("vllm", "orca+", "lightllm", "fastertransformer")


def pipeline(
    policy: str, num_blocks: int = 400, max_model_len: int = 400, stages: int = 1, **options: Any
) -> Pipeline:
    options = {"async_scheduling": False, "prefix_cache": False} | options
    config = SchedulerConfig(policy=policy, **options)
    return Pipeline(config.resolve(stages, num_blocks, max_model_len))


def run_all(pipe: Pipeline) -> list[StepPlan]:
    """Run until every sequence has ended; return the plans."""
    plans = []
    while pipe.alive:
        plan = pipe.schedule()
        if plan is None:
            pipe.commit()
        else:
            plans.append(plan)
    while pipe.plans:
        pipe.commit()
    return plans


def prefills(pipe: Pipeline, plan: StepPlan) -> list[int]:
    return [row.seq for row in plan.rows if row.start < len(pipe.requests[row.seq][1])]


def decodes(pipe: Pipeline, plan: StepPlan) -> list[int]:
    return [row.seq for row in plan.rows if row.start >= len(pipe.requests[row.seq][1])]


@further_runs(2)
@settings(max_examples=num_examples(4, 200), deadline=None, database=None)
@given(
    policy=st.sampled_from(WHOLE_PROMPT_POLICIES),
    stages=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([25, 60, 400]),
)
def test_prompts_are_computed_in_one_piece(
    run: int, policy: str, stages: int, seed: int, num_blocks: int
) -> None:
    """Only the first prompt of a micro-batch is split, where it meets the limit of tokens."""
    rng = Random(seed)
    pipe = pipeline(policy, num_blocks, 400, stages, max_num_batched_tokens=300, max_num_seqs=16)
    plans: list[StepPlan] = []
    for seq in range(20):
        tokens = rng.randint(1, 380)
        request = SchedulerRequest(
            seq, prompt(tokens, mark=seq), rng.randint(1, min(60, 400 - tokens))
        )
        pipe.add(request)
        for _ in range(rng.randint(0, 8)):
            plan = pipe.schedule()
            if plan is not None:
                plans.append(plan)
            elif pipe.plans:
                pipe.commit()
    plans += run_all(pipe)
    assert all(pipe.generated[seq] == generate(pipe.requests[seq]) for seq in range(20))
    num_preemptions = pipe.scheduler.stats().preemptions
    for plan in plans:
        rows = [row for row in plan.rows if row.seq in prefills(pipe, plan)]
        total = sum(row.num_tokens for row in plan.rows)
        split = [row for row in rows if row.num_tokens > 1 and not row.should_sample]
        # A split prompt is the last one of its micro-batch, and only there because it was the
        # first one, or because blocks were missing for the only sequence that could run.
        assert len(split) <= 1
        assert not split or split == rows
        if split and not num_preemptions and num_blocks == 400:
            assert total == 300
    if policy in RESERVING_POLICIES and stages == 1:
        assert not num_preemptions


def test_vllm_runs_whole_prompts_first_and_never_mixes() -> None:
    pipe = pipeline("vllm", max_num_batched_tokens=100)
    for seq in range(2):
        pipe.add(SchedulerRequest(seq, prompt(45, mark=seq), 10))
    pipe.add(SchedulerRequest(2, prompt(20, mark=2), 10))
    rows = []
    for step in range(8):
        if step == 5:
            pipe.add(SchedulerRequest(3, prompt(30, mark=3), 10))
        plan = pipe.schedule()
        assert plan is not None
        rows.append([(row.seq, row.num_tokens) for row in plan.rows])
        pipe.commit()
    decodes_of_all = [(0, 1), (1, 1), (2, 1)]
    assert rows == [
        [(0, 45), (1, 45)],
        [(2, 20)],
        *[decodes_of_all] * 3,
        [(3, 30)],
        *[[(0, 1), (1, 1), (2, 1), (3, 1)]] * 2,
    ]


def test_vllm_leaves_a_share_of_the_cache_free_and_restarts_the_newest() -> None:
    """200 blocks of one token: 2 stay free at an admission, though decodes may take them."""
    pipe = pipeline("vllm", 200, 190, block_size=1)
    pipe.add(SchedulerRequest(0, prompt(60), 20))
    pipe.add(SchedulerRequest(1, prompt(60, mark=2), 30))
    pipe.add(SchedulerRequest(2, prompt(78, mark=3), 30))
    pipe.add(SchedulerRequest(3, prompt(1, mark=4), 30))
    first = pipe.schedule()
    assert first is not None
    assert [row.seq for row in first.rows] == [0, 1, 2]
    pipe.commit()
    # The two free blocks are enough for two of three decodes; they fill the cache.
    rows = []
    for _ in range(2):
        plan = pipe.schedule()
        assert plan is not None
        rows.append([row.seq for row in plan.rows])
        pipe.commit()
    assert rows == [[0, 1], [0, 1]]
    assert pipe.scheduler.stats().preemptions == 1
    assert list(pipe.scheduler.kv_cache.running) == [0, 1]
    pipe.drain()
    assert list(pipe.ended) == [0, 1, 2, 3]


def test_an_admission_counts_the_blocks_that_a_prompt_shares() -> None:
    """20 blocks of one token: the second prompt shares 9 of its 10, so 3 others may follow."""
    pipe = pipeline("vllm", 20, 20, block_size=1, prefix_cache=True)
    for seq, tokens in enumerate((prompt(10), [*prompt(9), 99, 98])):
        pipe.add(SchedulerRequest(seq, tokens, 2))
        plan = pipe.schedule()
        assert plan is not None
        assert [row.seq for row in plan.rows] == [seq]
        if not seq:
            pipe.commit()
    assert pipe.scheduler.kv_cache.block_pool.num_free_blocks == 20 - 10 - 2
    pipe.drain()


@pytest.mark.parametrize("policy", ["orca+", "vllm", "lightllm"])
def test_a_micro_batch_has_its_share_of_the_decodes(policy: str) -> None:
    """At most max_num_seqs / stages of them, Vidur's limit."""
    pipe = pipeline(policy, stages=4, max_num_seqs=12)
    for seq in range(12):
        pipe.add(SchedulerRequest(seq, prompt(20, mark=seq), 40))
    plans = run_all(pipe)
    assert max(len(decodes(pipe, plan)) for plan in plans) == 3
    assert max(len(prefills(pipe, plan)) for plan in plans) == 12
