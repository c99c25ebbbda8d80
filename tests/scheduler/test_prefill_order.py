"""Order of prompts: fcfs, sjf and ljf in groups, and what may overtake a group."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_traps import prompt
from tests.support.examples import further_runs, num_examples
from tests.support.scheduler.pipeline import Pipeline, generate


def pipeline(order: str, group: int, num_blocks: int = 500, **options: Any) -> Pipeline:
    defaults: dict[str, Any] = {"policy": "tetri", "prefill_batch_tokens": 16, "block_size": 4}
    config = SchedulerConfig(
        prefill_order=order,
        prefill_group=group,
        async_scheduling=False,
        prefix_cache=False,
        **(defaults | options),
    )
    return Pipeline(config.resolve(1, num_blocks, 120))


def started(pipe: Pipeline, num_plans: int = 10_000) -> list[int]:
    """Run; return the sequences in the order of their first chunks."""
    seqs: dict[int, None] = {}
    for _ in range(num_plans):
        plan = pipe.schedule()
        if plan is not None:
            seqs.update((row.seq, None) for row in plan.rows)
        elif pipe.plans:
            pipe.commit()
        else:
            break
    return list(seqs)


@pytest.mark.parametrize(
    ("order", "seqs"),
    [
        ("fcfs", [0, 1, 2, 3, 4, 5, 6]),
        ("sjf", [1, 2, 0, 3, 5, 4, 6]),
        ("ljf", [0, 2, 1, 4, 5, 3, 6]),
    ],
)
def test_a_group_is_sorted_by_length_and_finished_before_the_next(
    order: str, seqs: list[int]
) -> None:
    """Groups of three: the shortest prompt of all is in the second, and the last one is alone."""
    pipe = pipeline(order, 3)
    for seq, length in enumerate([50, 10, 30, 5, 40, 20, 1]):
        pipe.add(SchedulerRequest(seq, prompt(length, mark=seq), 1))
    assert started(pipe) == seqs


def test_equal_lengths_keep_the_order_of_arrival() -> None:
    for order in ("sjf", "ljf"):
        pipe = pipeline(order, 8)
        for seq in range(8):
            pipe.add(SchedulerRequest(seq, prompt(9, mark=seq), 1))
        assert started(pipe) == list(range(8))


@further_runs(1)
@settings(max_examples=num_examples(6, 300), deadline=None, database=None)
@given(
    order=st.sampled_from(["sjf", "ljf"]),
    group=st.integers(1, 6),
    policy=st.sampled_from(["tetri", "sarathi", "distserve", "splitwise", "throttle"]),
    seed=st.integers(0, 2**32),
)
def test_no_request_is_delayed_beyond_its_group(
    run: int, order: str, group: int, policy: str, seed: int
) -> None:
    """T3: groups have consecutive arrivals, and those who came later overtake only within one."""
    rng = Random(seed)
    pipe = pipeline(order, group, policy=policy)
    first_chunks: dict[int, None] = {}
    while len(pipe.requests) < 20 or pipe.alive:
        if len(pipe.requests) < 20 and rng.random() < 0.4:
            seq = len(pipe.requests)
            pipe.add(SchedulerRequest(seq, prompt(rng.randint(1, 60), mark=seq), rng.randint(1, 5)))
        plan = pipe.schedule()
        if plan is not None:
            first_chunks.update((row.seq, None) for row in plan.rows)
        elif pipe.plans:
            pipe.commit()
    seqs = list(first_chunks)
    for place, seq in enumerate(seqs):
        overtaken_by = [other for other in seqs[:place] if other > seq]
        assert len(overtaken_by) < group
        # They are in one group, and so are all that arrived between them.
        assert all(other - seq < group for other in overtaken_by)


def test_an_urgent_prompt_precedes_the_group() -> None:
    pipe = pipeline("ljf", 4)
    for seq in range(4):
        pipe.add(SchedulerRequest(seq, prompt(20 + seq, mark=seq), 1))
    assert started(pipe, 1) == [3]
    pipe.add(SchedulerRequest(4, prompt(5, mark=4), 1, priority=-1))
    pipe.add(SchedulerRequest(5, prompt(90, mark=5), 1))
    pipe.commit()
    assert started(pipe) == [4, 3, 2, 1, 0, 5]


def test_a_preempted_sequence_returns_to_its_group() -> None:
    """The cache holds two texts until the younger decode loses its blocks; it is prefilled again
    before the later group, whose prompts are shorter."""
    pipe = pipeline("sjf", 2, 30, policy="sarathi", kv_admission="greedy")
    for seq, length in enumerate([50, 48, 42, 41]):
        pipe.add(SchedulerRequest(seq, prompt(length, mark=seq), 40))
    chunks = []
    while pipe.alive:
        plan = pipe.schedule()
        if plan is None:
            pipe.commit()
        else:
            chunks += [row.seq for row in plan.rows if row.start == 0]
    assert pipe.scheduler.stats().preemptions > 0
    assert chunks[:4] == [1, 0, 1, 3]
    assert all(pipe.generated[seq] == generate(pipe.requests[seq]) for seq in range(4))


def test_choices_join_the_group_of_their_prompt() -> None:
    """They share its blocks and have one token to compute; they do not wait for a later group."""
    pipe = pipeline("sjf", 2)
    pipe.add(SchedulerRequest(0, prompt(40, mark=0), 3, n=2))
    for seq in range(2, 6):
        pipe.add(SchedulerRequest(seq, prompt(30 + seq, mark=seq), 3))
    # The second choice exists once the prompt has been computed; 4 and 5 are the second group.
    assert started(pipe).index(1) < 4
