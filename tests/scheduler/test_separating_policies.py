"""Policies distserve, splitwise and tetri: batches of prompts, ageing decodes, fixed chunks."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import ScheduledRow, StepPlan
from gllm.scheduler.policies.splitwise import MAX_PREEMPTIONS
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_traps import prompt
from tests.support.examples import further_runs, num_examples
from tests.support.scheduler.pipeline import Pipeline, generate

LONGEST = 100


def pipeline(policy: str, stages: int = 1, num_blocks: int = 4000, **options: Any) -> Pipeline:
    options = {"prefix_cache": False, "async_scheduling": False, "block_size": 4} | options
    config = SchedulerConfig(policy=policy, **options)
    return Pipeline(config.resolve(stages, num_blocks, LONGEST))


def split_rows(pipe: Pipeline, plan: StepPlan) -> tuple[list[ScheduledRow], list[ScheduledRow]]:
    """Return the prefill rows and the decode rows of a plan."""
    prefills = [r for r in plan.rows if r.start < len(pipe.requests[r.seq].prompt_token_ids)]
    return prefills, [row for row in plan.rows if row not in prefills]


def play(pipe: Pipeline, rng: Random, num_requests: int, output: int = 12) -> list[StepPlan]:
    """Serve requests that arrive one by one; return all plans."""
    plans = []
    while len(pipe.requests) < num_requests or pipe.alive:
        if len(pipe.requests) < num_requests and rng.random() < 0.5:
            seq = len(pipe.requests)
            tokens = rng.choice([rng.randint(1, 30), rng.randint(1, LONGEST - output)])
            request = SchedulerRequest(seq, prompt(tokens, mark=seq), rng.randint(1, output))
            pipe.add(request)
        plan = pipe.schedule()
        if plan is not None:
            plans.append(plan)
        elif pipe.plans:
            pipe.commit()
    assert all(pipe.generated[seq] == generate(pipe.requests[seq]) for seq in pipe.requests)
    return plans


@further_runs(1)
@settings(max_examples=num_examples(5, 300), deadline=None, database=None)
@given(
    policy=st.sampled_from(["distserve", "splitwise"]),
    limit=st.integers(1, 80),
    stages=st.integers(1, 4),
    prefix_cache=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_several_prompts_have_at_most_the_limit_of_tokens(
    run: int, policy: str, limit: int, stages: int, prefix_cache: bool, seed: int
) -> None:
    """D10, S4: only a prompt that is alone exceeds it; prompts keep the order of arrival."""
    pipe = pipeline(policy, stages, prefill_batch_tokens=limit, prefix_cache=prefix_cache)
    plans = play(pipe, Random(seed), 16)
    order: dict[int, None] = {}
    for plan in plans:
        prefills, decodes = split_rows(pipe, plan)
        if len(prefills) > 1:
            assert sum(row.num_tokens for row in prefills) <= limit
        assert all(row.should_sample for row in prefills), "prompts are whole"
        assert not (policy == "distserve" and prefills and decodes)
        order.update((row.seq, None) for row in prefills)
    assert list(order) == sorted(order)


@pytest.mark.parametrize(("policy", "limit"), [("distserve", 512), ("splitwise", 2048)])
def test_the_papers_limits_are_the_defaults(policy: str, limit: int) -> None:
    """Prompts of a sixth of the limit: six run together, and one longer than the limit alone."""
    config = SchedulerConfig(policy=policy, prefix_cache=False, async_scheduling=False)
    pipe = Pipeline(config.resolve(1, 2000, 4096))
    lengths = [limit // 6] * 8 + [limit + 1, 10]
    for seq, length in enumerate(lengths):
        pipe.add(SchedulerRequest(seq, prompt(length, mark=seq), 1))
    plans = []
    while (plan := pipe.schedule()) is not None:
        plans.append([row.seq for row in plan.rows])
        pipe.commit()
    assert plans == [[0, 1, 2, 3, 4, 5], [6, 7], [8], [9]]


def test_distserve_decodes_in_batches_up_to_a_maximum() -> None:
    """Two stages have two disjoint batches of at most max_num_seqs / 2."""
    pipe = pipeline("distserve", 2, max_num_seqs=10)
    for seq in range(10):
        pipe.add(SchedulerRequest(seq, prompt(8, mark=seq), 20))
    batches = []
    while pipe.alive:
        plan = pipe.schedule()
        if plan is None:
            pipe.commit()
        elif decodes := split_rows(pipe, plan)[1]:
            batches.append({row.seq for row in decodes})
    assert max(map(len, batches)) == 5
    for first, second in zip(batches[:20:2], batches[1:20:2], strict=True):
        assert not first & second


def count_displacements(pipe: Pipeline, plan: StepPlan, counts: dict[int, int]) -> None:
    """Count the decodes that a plan with prompts leaves out; nothing else is in flight."""
    prefills, _ = split_rows(pipe, plan)
    if prefills:
        scheduled = {row.seq for row in plan.rows}
        for seq in pipe.alive:
            if len(pipe.generated[seq]) and seq not in scheduled:
                counts[seq] = counts.get(seq, 0) + 1


@further_runs(1)
@settings(max_examples=num_examples(3, 100), deadline=None, database=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from([100, 4000]))
def test_no_decode_is_preempted_more_than_four_times_under_continuous_prompts(
    run: int, seed: int, num_blocks: int
) -> None:
    """S5: each step another prompt arrives that fills a micro-batch; all requests complete."""
    rng = Random(seed)
    pipe = pipeline("splitwise", num_blocks=num_blocks, prefill_batch_tokens=24)
    counts: dict[int, int] = {}
    for seq in range(90):
        pipe.add(SchedulerRequest(seq, prompt(rng.randint(20, 28), mark=seq), rng.randint(2, 12)))
        plan = pipe.schedule()
        assert plan is not None
        count_displacements(pipe, plan, counts)
        pipe.commit()
        if num_blocks == 4000 and seq >= 60:
            # While prompts keep coming, early requests end: twelve tokens and four displacements.
            assert not pipe.alive & set(range(seq - 50))
    while pipe.alive:
        plan = pipe.schedule()
        assert plan is not None
        count_displacements(pipe, plan, counts)
        pipe.commit()
    assert max(counts.values()) == MAX_PREEMPTIONS
    assert pipe.scheduler.stats().preemptions == 0
    assert all(pipe.generated[seq] == generate(pipe.requests[seq]) for seq in range(90))


def test_splitwise_orders_aged_decodes_prompts_displaced_running_and_new_ones() -> None:
    """Twelve tokens in a micro-batch; prompts leave two places at first, then none."""
    pipe = pipeline("splitwise", prefill_batch_tokens=12)

    def add(seq: int, tokens: int) -> None:
        pipe.add(SchedulerRequest(seq, prompt(tokens, mark=seq), 60))

    def step() -> list[int]:
        plan = pipe.schedule()
        assert plan is not None
        pipe.commit()
        return [row.seq for row in plan.rows]

    add(0, 4)
    add(1, 4)
    add(2, 4)
    assert step() == [0, 1, 2]
    add(3, 10)
    assert step() == [0, 1, 3], "two places for decodes; 2 is displaced"
    add(4, 10)
    assert step() == [2, 0, 4], "the displaced one, a running one, but not the new one"
    for seq in range(5, 9):
        add(seq, 12)
    assert [step() for _ in range(3)] == [[5], [6], [7]]
    # All of 0, 1, 2 have been displaced at most four times: 1 and 2 now, 0 next time.
    displaced = {s.seq: s.num_displacements for s in pipe.scheduler.table.sequences.values()}
    assert displaced == {0: 3, 1: 4, 2: 4, 3: 4, 4: 3, 5: 2, 6: 1, 7: 0, 8: 0}
    assert step() == [1, 3, 2, 8], "aged decodes precede a prompt longer than what they leave"
    assert len(step()) == 9, "without prompts all decodes run"


@further_runs(1)
@settings(max_examples=num_examples(5, 200), deadline=None, database=None)
@given(
    size=st.integers(4, 64),
    order=st.sampled_from(["fcfs", "sjf", "ljf"]),
    stages=st.integers(1, 4),
    output=st.sampled_from([1, 12]),
    seed=st.integers(0, 2**32),
)
def test_chunks_are_full_and_have_no_decodes(
    run: int, size: int, order: str, stages: int, output: int, seed: int
) -> None:
    """T1: a chunk has fewer tokens than its size only if no prompt token waits behind it."""
    pipe = pipeline(
        "tetri", stages, prefill_batch_tokens=size, prefill_order=order, prefill_group=4
    )
    rng, num_chunks = Random(seed), 0
    while len(pipe.requests) < 12 or pipe.alive:
        if len(pipe.requests) < 12 and rng.random() < 0.5:
            seq = len(pipe.requests)
            tokens = rng.randint(1, LONGEST - output)
            pipe.add(SchedulerRequest(seq, prompt(tokens, mark=seq), output))
        plan = pipe.schedule()
        if plan is None:
            if pipe.plans:
                pipe.commit()
            continue
        prefills, decodes = split_rows(pipe, plan)
        if not prefills:
            continue
        assert not decodes
        num_chunks += 1
        num_tokens = sum(row.num_tokens for row in prefills)
        is_last = not pipe.scheduler.describe().waiting_seqs
        assert num_tokens == size or (is_last and num_tokens < size)
    assert num_chunks >= sum(len(r.prompt_token_ids) for r in pipe.requests.values()) // size


@further_runs(1)
@settings(max_examples=num_examples(5, 200), deadline=None, database=None)
@given(
    policy=st.sampled_from(["distserve", "splitwise", "tetri"]),
    stages=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([25, 40, 80]),
    has_async=st.booleans(),
)
def test_every_request_gets_its_tokens_in_a_small_cache(
    run: int, policy: str, stages: int, seed: int, num_blocks: int, has_async: bool
) -> None:
    options = {"prefill_batch_tokens": 40, "max_num_batched_tokens": 100, "max_num_seqs": 8}
    options |= {"async_scheduling": has_async, "prefix_cache": True}
    pipe = pipeline(policy, stages, num_blocks, **options)
    play(pipe, Random(seed), 20, output=30)
    assert pipe.scheduler.kv_cache.free_share == 1


def test_presets_are_the_papers_set_ups() -> None:
    """The order and the admission may be chosen otherwise, the policy not."""
    options = [SchedulerConfig(preset=name) for name in ("distserve", "splitwise", "tetri")]
    assert [(option.policy, option.prefill_order, option.kv_admission) for option in options] == [
        ("distserve", "fcfs", "distserve"),
        ("splitwise", "fcfs", "greedy"),
        ("tetri", "sjf", "reserve-dynamic"),
    ]
    chosen = SchedulerConfig(preset="tetri", prefill_order="fcfs", kv_admission="greedy")
    assert (chosen.prefill_order, chosen.kv_admission) == ("fcfs", "greedy")
    assert chosen.resolve(1, 64, 128).prefill_batch_tokens == 512
    assert SchedulerConfig().prefill_order == "fcfs"
    with pytest.raises(ValueError, match="policy is throttle, but preset tetri sets policy tetri"):
        SchedulerConfig(preset="tetri", policy="throttle")
