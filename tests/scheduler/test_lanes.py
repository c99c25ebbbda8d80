"""Two lanes: outputs, blocks and sequences are safe however the lanes overtake each other."""

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.lanes import DECODE_LANE, MAX_OVERTAKES, PREFILL_LANE, LaneOrder
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_properties import check_outputs, configs, drive
from tests.scheduler.test_traps import policy_cases
from tests.support.examples import further_runs, num_examples
from tests.support.scheduler.lane_pipeline import LanePipeline
from tests.support.scheduler.pipeline import EVERY_POLICY, Pipeline, generate

EXAMPLES = num_examples(10, 300)
STEPS = 200
PURE_POLICIES = {
    "prefill-first",
    "vllm",
    "distserve",
    "tetri",
    "lightllm",
    "fastertransformer",
}
"""Policies whose micro-batches have one phase."""


@st.composite
def lane_pipelines(draw: st.DrawFn) -> LanePipeline:
    """A pipeline of two lanes, which may mix decodes and prefill now and then."""
    rng = Random(draw(st.integers(0, 2**32)))
    return LanePipeline(draw(configs(lanes="2")), rng, draw(st.booleans()), draw(st.booleans()))


@further_runs(2)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(pipeline=lane_pipelines(), seed=st.integers(0, 2**32))
def test_every_request_ends_with_the_tokens_it_would_get_alone(
    run: int, pipeline: LanePipeline, seed: int
) -> None:
    drive(pipeline, Random(seed), STEPS)
    pipeline.drain()
    check_outputs(pipeline)


@further_runs(2)
@settings(
    max_examples=num_examples(6, 200),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(pipeline=lane_pipelines(), seed=st.integers(0, 2**32))
def test_failures_harm_no_other_sequence(run: int, pipeline: LanePipeline, seed: int) -> None:
    """Steps that raise, rows that are NaN and sampling that fails, among steps that overtake."""
    rng, seq = Random(seed), 0
    for _ in range(STEPS):
        if rng.random() < 0.1 and len(pipeline.alive) < 20:
            longest = pipeline.config.max_model_len
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, longest - 1))]
            max_tokens = rng.randint(1, longest - len(prompt))
            pipeline.add(SchedulerRequest(seq, prompt, max_tokens, n=rng.choice([1, 2])))
            seq += pipeline.requests[seq].n
        if pipeline.plans and rng.random() < 0.5:
            errors = {seq: "sampling failed" for seq in pipeline.alive if rng.random() < 0.02}
            pipeline.commit(errors)
        else:
            faulty = [seq for seq in pipeline.alive if rng.random() < 0.01]
            pipeline.schedule(fails=rng.random() < 0.03, faulty=faulty)
    pipeline.drain()
    for each, request in pipeline.requests.items():
        alone = generate(request, pipeline.forces)
        if pipeline.ended[each] == "error":
            assert pipeline.generated[each] == alone[: len(pipeline.generated[each])]
        else:
            assert pipeline.generated[each] == alone


@policy_cases(EVERY_POLICY)
def test_steps_overtake_under_every_policy(policy: str) -> None:
    config = SchedulerConfig(
        policy=policy, lanes="2", max_num_batched_tokens=16, max_num_seqs=6, max_in_flight=3
    )
    pipeline = LanePipeline(config.resolve(2, 400, 100), Random(7))
    for seq in range(12):
        pipeline.add(SchedulerRequest(seq, [seq] * 40, 5 + seq % 5 * 10))
    pipeline.drain()
    check_outputs(pipeline)
    assert all(pipeline.num_turns)
    assert pipeline.num_overtakes


@policy_cases(EVERY_POLICY)
def test_decodes_and_prefill_are_mixed_and_separated(policy: str) -> None:
    config = SchedulerConfig(
        policy=policy, lanes="2", max_num_batched_tokens=16, max_num_seqs=6, max_in_flight=3
    )
    pipeline = LanePipeline(config.resolve(2, 400, 100), Random(7), changes_mix=True)
    for seq in range(30):
        pipeline.add(SchedulerRequest(seq, [seq] * 40, 5 + seq % 5 * 10))
    pipeline.drain()
    check_outputs(pipeline)
    assert all(pipeline.num_turns)
    is_pure = policy in PURE_POLICIES
    assert bool(pipeline.num_mixed) != is_pure


def test_mixed_plans_are_in_the_lane_of_the_chunks_before_them() -> None:
    """Chunks of a prompt stay in order when decodes and prefill are mixed and separated again."""
    scheduler = two_lanes(policy="throttle-paper", max_prefill_tokens=32)
    scheduler.add(SchedulerRequest(0, [1], 50), 0.0)
    commit(scheduler, next_plan(scheduler))
    scheduler.add(SchedulerRequest(1, [2] * 150, 50), 0.0)
    decode, prefill, more = (next_plan(scheduler) for _ in range(3))
    assert [plan.lane for plan in (decode, prefill, more)] == [0, 1, 1]
    scheduler.set_depth(2, is_mixed=True)
    commit(scheduler, decode)
    assert scheduler.schedule(0.0) is None, "the prefill lane is full"
    commit(scheduler, prefill)
    mixed = next_plan(scheduler)
    assert (mixed.lane, [row.seq for row in mixed.rows]) == (PREFILL_LANE, [0, 1])
    scheduler.set_depth(2)
    assert scheduler.schedule(0.0) is None, "the only decode is in flight"
    commit(scheduler, more)
    assert next_plan(scheduler).lane == PREFILL_LANE
    commit(scheduler, mixed)
    assert [next_plan(scheduler).lane for _ in range(2)] == [DECODE_LANE, PREFILL_LANE]


@settings(max_examples=num_examples(8, 100), deadline=None, database=None)
@given(config=configs(), seed=st.integers(0, 2**32))
def test_with_one_lane_turns_are_steps(config: SchedulerConfig, seed: int) -> None:
    class Checked(Pipeline):
        def schedule(self, fails: bool = False, faulty: Iterable[int] = ()) -> StepPlan | None:
            plan = super().schedule(fails, faulty)
            assert plan is None or (plan.lane, plan.turn) == (0, plan.step)
            return plan

    pipeline = Checked(config)
    drive(pipeline, Random(seed), 100)


def two_lanes(limit: int = 2, num_blocks: int = 64, **options: object) -> Scheduler:
    config = SchedulerConfig(lanes="2", max_in_flight=limit, **options)  # type: ignore[arg-type]
    return Scheduler(config.resolve(2, num_blocks, 200))


def next_plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan


def commit(scheduler: Scheduler, plan: StepPlan) -> None:
    sampled = [
        SampledToken(row.seq, row.num_preemptions, 1) for row in plan.rows if row.should_sample
    ]
    scheduler.commit(StepResult(plan.step, sampled))


def test_each_lane_has_the_limit_of_plans_in_flight() -> None:
    scheduler = two_lanes(policy="throttle", max_prefill_tokens=32)
    scheduler.add(SchedulerRequest(0, [1], 50), 0.0)
    scheduler.add(SchedulerRequest(1, [1], 50), 0.0)
    commit(scheduler, next_plan(scheduler))
    scheduler.add(SchedulerRequest(2, [1] * 150, 50), 0.0)
    plans = [next_plan(scheduler) for _ in range(4)]
    assert [(plan.lane, plan.turn) for plan in plans] == [(0, 0), (0, 1), (1, 1), (1, 2)]
    assert [plan.step for plan in plans] == [1, 2, 3, 4]
    assert scheduler.schedule(0.0) is None
    assert scheduler.stats().in_flight == 4
    commit(scheduler, plans[0])
    assert next_plan(scheduler).lane == DECODE_LANE
    assert scheduler.schedule(0.0) is None
    commit(scheduler, plans[2])
    assert next_plan(scheduler).lane == PREFILL_LANE


def test_results_of_a_lane_come_in_order() -> None:
    scheduler = two_lanes(policy="throttle", max_prefill_tokens=32)
    scheduler.add(SchedulerRequest(0, [1] * 100, 50), 0.0)
    plans = [next_plan(scheduler) for _ in range(2)]
    with pytest.raises(ValueError, match="result of step 1 came, but step 0 is next"):
        commit(scheduler, plans[1])
    for plan in plans:
        commit(scheduler, plan)
    with pytest.raises(ValueError, match="result of step 1 came, but step None is next"):
        commit(scheduler, plans[1])


def test_freed_blocks_go_to_the_decode_that_waits_for_them() -> None:
    """Prefill takes none while a decode lacks a block, though the decode lane is full."""
    scheduler = two_lanes(1, 15, policy="throttle", block_size=16, expected_output_tokens=0)
    scheduler.add(SchedulerRequest(0, [1] * 32, 1, kv_ticket=7), 0.0)
    commit(scheduler, next_plan(scheduler))
    for seq in (1, 2):
        # As prompts that the fleet hands off they leave the hold to the decode.
        scheduler.add(SchedulerRequest(seq, [seq + 1] * 96, 50, kv_ticket=7 + seq), 0.0)
    plans: list[StepPlan] = []
    while not scheduler.transfers.pop_revocations(0.0):
        plan = scheduler.schedule(0.0)
        if plan is None:
            commit(scheduler, plans.pop(0))
        else:
            plans.append(plan)
    # The other decode lacks a block, which another engine may still read.
    (plan,) = plans
    assert (plan.lane, len(plan.rows)) == (DECODE_LANE, 1)
    scheduler.transfers.confirm_revocation(7)
    scheduler.add(SchedulerRequest(3, [4] * 16, 1), 0.0)
    assert scheduler.schedule(0.0) is None
    commit(scheduler, plan)
    assert [next_plan(scheduler).lane for _ in range(2)] == [DECODE_LANE, PREFILL_LANE]


@pytest.mark.parametrize(
    ("lanes", "stages", "has_tcp_edges", "expected"),
    [
        ("auto", 2, False, 1),
        ("auto", 2, True, 2),
        ("1", 2, True, 1),
        ("2", 2, False, 2),
        ("2", 1, False, 1),
    ],
)
def test_number_of_lanes(lanes: str, stages: int, has_tcp_edges: bool, expected: int) -> None:
    config = SchedulerConfig(lanes=lanes).resolve(stages, 64, 200, has_tcp_edges)
    assert config.num_lanes == expected


def test_unknown_number_of_lanes_is_refused() -> None:
    with pytest.raises(ValueError, match="lanes"):
        SchedulerConfig(lanes="3")


def test_prefill_waits_for_a_bounded_number_of_decode_steps() -> None:
    order = LaneOrder()
    assert order.choose(False, False) is None
    assert [order.choose(True, False) for _ in range(100)] == [DECODE_LANE] * 100
    for _ in range(3):
        lanes = [order.choose(True, True) for _ in range(MAX_OVERTAKES + 1)]
        assert lanes == [DECODE_LANE] * MAX_OVERTAKES + [PREFILL_LANE]
    assert order.choose(True, True) == DECODE_LANE
    assert order.choose(False, True) == PREFILL_LANE
    assert [order.choose(True, True) for _ in range(MAX_OVERTAKES)] == [DECODE_LANE] * MAX_OVERTAKES
