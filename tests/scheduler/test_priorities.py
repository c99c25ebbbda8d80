"""How long a request waits for those of a worse priority."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepPlan
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_traps import POLICIES, policy_cases, prompt
from tests.support.examples import further_runs, num_examples
from tests.support.scheduler.pipeline import RESERVING_POLICIES, Pipeline, generate


def pipeline(num_blocks: int, max_model_len: int, stages: int = 1, **options) -> Pipeline:
    config = SchedulerConfig(**options)
    return Pipeline(config.resolve(stages, num_blocks, max_model_len))


def advance(pipe: Pipeline) -> StepPlan | None:
    """The next plan, a result first where there is none."""
    plan = pipe.schedule()
    if plan is None and pipe.plans:
        pipe.commit()
    return plan


def decode_tokens_before(pipe: Pipeline, seq: int) -> int:
    """Decode tokens that are planned before a sequence's prompt is planned to its end."""
    before = pipe.scheduler.stats().decode_tokens
    while True:
        plan = advance(pipe)
        if plan is not None and any(row.seq == seq and row.should_sample for row in plan.rows):
            return pipe.scheduler.stats().decode_tokens - before


def test_half_prefilled_prompts_of_worse_rank_give_way_at_once() -> None:
    """Beside a decode of the same priority, whose end nobody should have to wait for."""
    options = {"max_num_batched_tokens": 80, "expected_output_tokens": 0}
    pipe = pipeline(40, 600, **options)
    pipe.add(SchedulerRequest(0, prompt(32), 400, priority=0))
    advance(pipe)
    pipe.add(SchedulerRequest(1, prompt(580, mark=2), 8, priority=1))
    for _ in range(12):
        advance(pipe)
    assert pipe.scheduler.table.sequences[1].is_prefilling
    pipe.add(SchedulerRequest(2, prompt(300, mark=3), 8, priority=0))
    assert decode_tokens_before(pipe, 2) < 12
    pipe.drain()
    assert all(pipe.generated[seq] == generate(pipe.requests[seq]) for seq in range(3))


URGENT_POLICIES = [name for name in POLICIES if name not in RESERVING_POLICIES]
"""Policies under which an urgent prompt runs at once; the others finish what they have begun."""


@policy_cases(URGENT_POLICIES)
def test_a_seat_is_taken_from_a_decode_of_worse_priority(policy: str) -> None:
    pipe = pipeline(200, 400, 2, policy=policy, max_num_seqs=2)
    for seq in range(2):
        pipe.add(SchedulerRequest(seq, prompt(20, mark=seq), 60, priority=1))
    while pipe.scheduler.stats().decoding < 2:
        advance(pipe)
    pipe.add(SchedulerRequest(2, prompt(20, mark=3), 8, priority=0))
    assert decode_tokens_before(pipe, 2) < 12
    pipe.drain()
    assert next(iter(pipe.ended)) == 2
    assert pipe.scheduler.stats().preemptions == 1


def test_a_later_arrival_takes_no_seat() -> None:
    """Among equals who came first runs to its end, or everything would be computed again."""
    pipe = pipeline(200, 400, max_num_seqs=2)
    for seq in range(4):
        pipe.add(SchedulerRequest(seq, prompt(20, mark=seq), 50))
    pipe.drain()
    assert list(pipe.ended) == [0, 1, 2, 3]
    assert pipe.scheduler.stats().preemptions == 0


def test_nobody_gives_way_where_that_would_not_help() -> None:
    """The cache is held by decodes of the same priority; the worse ones hold too little."""
    pipe = pipeline(30, 480)
    pipe.add(SchedulerRequest(0, prompt(200), 100))
    pipe.add(SchedulerRequest(1, prompt(60, mark=2), 100, priority=1))
    for _ in range(6):
        advance(pipe)
    pipe.add(SchedulerRequest(2, prompt(400, mark=3), 8))
    while 0 not in pipe.ended:
        advance(pipe)
        assert pipe.scheduler.stats().preemptions == 0
    pipe.drain()
    assert set(pipe.ended) == {0, 1, 2}


@further_runs(2)
@settings(max_examples=num_examples(4, 150), deadline=None, database=None)
@given(
    policy=st.sampled_from(URGENT_POLICIES),
    stages=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    phase_pure=st.booleans(),
    threshold=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_an_urgent_prompt_waits_a_bounded_number_of_plans(
    run: int, policy: str, stages: int, seed: int, phase_pure: bool, threshold: float
) -> None:
    """Twice the plans in flight pass without it, and one beside each of its own."""
    rng = Random(seed)
    pipe = pipeline(
        rng.randint(32, 90),
        500,
        stages,
        policy=policy,
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=128,
        max_prefill_tokens=64,
        kv_threshold=threshold,
        phase_pure=phase_pure,
        expected_output_tokens=rng.choice([0, 256]),
    )
    for seq in range(12):
        tokens = rng.randint(1, 300)
        max_tokens, priority = rng.randint(1, 100), rng.randint(1, 3)
        pipe.add(SchedulerRequest(seq, prompt(tokens, mark=seq), max_tokens, priority=priority))
        for _ in range(rng.randint(0, 20)):
            advance(pipe)
    urgent = SchedulerRequest(12, prompt(rng.randint(1, 400), mark=99), 8, priority=0)
    pipe.add(urgent)
    own = others = 0
    while True:
        plan = advance(pipe)
        if plan is None:
            continue
        if any(row.seq == 12 for row in plan.rows):
            own += 1
        else:
            others += 1
        assert others <= 2 * pipe.config.max_in_flight + own + 1
        if any(row.seq == 12 and row.should_sample for row in plan.rows):
            break
    pipe.drain()
    assert all(pipe.generated[seq] == generate(pipe.requests[seq]) for seq in pipe.requests)
