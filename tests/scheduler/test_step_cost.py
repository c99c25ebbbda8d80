"""The online fit, and the policy that weighs by it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.scheduler.balance_policy import BalancePolicy
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, ScheduledRow, StepPlan, StepResult, StepTime
from gllm.scheduler.policy_registry import POLICIES
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork, compute_stage_work, count_query_key_pairs
from gllm.scheduler.step_cost import (
    REFIT_INTERVAL_STEPS,
    OnlineStepCostFit,
    StepCostCoefficients,
    solve_nonnegative,
)
from tests.scheduler.test_policy import load
from tests.support.examples import num_examples

TRUTH = StepCostCoefficients(step=2e-3, token=5e-5, pair=3e-8, decode=1e-5, context_token=4e-8)


def random_work(rng: random.Random, step: int) -> StageWork:
    chunks = tuple((rng.randint(0, 8000), rng.randint(2, 500)) for _ in range(rng.randint(0, 2)))
    decodes = rng.randint(0, 64)
    context = sum(rng.randint(1, 6000) for _ in range(decodes))
    tokens = decodes + sum(tokens for _, tokens in chunks)
    return StageWork(step, tokens, chunks, decodes, context, decodes)


def fitted(noise: float) -> StepCostCoefficients:
    rng, fit = random.Random(1), OnlineStepCostFit()
    for step in range(3000):
        work = random_work(rng, step)
        fit.observe_step(work, TRUTH.predict_seconds(work) * rng.lognormvariate(0, noise))
    assert fit.coefficients is not None
    return fit.coefficients


def test_the_fit_finds_what_made_the_times() -> None:
    # A decode's own part is a tenth of its token's, so it is told less well.
    tolerances = (0.02, 0.02, 0.02, 0.1, 0.02)
    for found, true, tolerance in zip(fitted(0.0), TRUTH, tolerances, strict=True):
        assert found == pytest.approx(true, rel=tolerance)


def test_the_fit_stands_noise_and_predicts() -> None:
    found, rng = fitted(0.2), random.Random(2)
    for step in range(50):
        work = random_work(rng, step)
        if work.num_tokens:
            assert found.predict_seconds(work) == pytest.approx(
                TRUTH.predict_seconds(work), rel=0.1
            )


def test_the_fit_follows_a_change() -> None:
    rng, fit = random.Random(3), OnlineStepCostFit()
    for step in range(6000):
        work = random_work(rng, step)
        factor = 1.0 if step < 3000 else 3.0
        fit.observe_step(work, factor * TRUTH.predict_seconds(work))
    assert fit.coefficients is not None
    assert fit.coefficients.token == pytest.approx(3 * TRUTH.token, rel=0.05)


@settings(max_examples=num_examples(20, 300))
@given(
    st.lists(st.tuples(st.integers(1, 4000), st.floats(1e-6, 10)), min_size=REFIT_INTERVAL_STEPS)
)
def test_no_coefficient_is_ever_negative(steps: list[tuple[int, float]]) -> None:
    fit = OnlineStepCostFit()
    for number, (tokens, seconds) in enumerate(steps):
        fit.observe_step(StageWork(number, tokens, ((0, tokens),), 0, 0, 1), seconds)
    assert fit.coefficients is None or min(fit.coefficients) >= 0


def test_coordinate_descent_solves_by_hand() -> None:
    # Minimum of (x - 3)^2 + (y + 1)^2 over x, y >= 0 is at (3, 0).
    assert solve_nonnegative([[2.0, 0.0], [0.0, 2.0]], [6.0, -2.0], [0.0, 0.0]) == [3.0, 0.0]


def test_work_of_a_plan() -> None:
    rows = [ScheduledRow(1, 0, 99, 1, [], [7], True), ScheduledRow(2, 0, 10, 5, [], [], False)]
    assert compute_stage_work(4, rows) == StageWork(4, 6, ((10, 5),), 1, 100, 1)
    assert compute_stage_work(4, rows).num_query_key_pairs == 11 + 12 + 13 + 14 + 15
    assert count_query_key_pairs(10, 5) == 65


def learnt() -> BalancePolicy:
    policy = BalancePolicy(SchedulerConfig().resolve(4, 1000, 16000))
    rng = random.Random(4)
    for step in range(500):
        work = random_work(rng, step)
        policy.observe_step(work, TRUTH.predict_seconds(work))
    return policy


def test_before_the_fit_balance_is_throttle() -> None:
    config = SchedulerConfig().resolve(4, 1000, 16000)
    balance, throttle = BalancePolicy(config), POLICIES["throttle"](config)
    for waiting in (10, 3000, 40_000):
        given_load = load(waiting)
        assert balance.prefill_budget(given_load) == throttle.prefill_budget(given_load)
        assert balance.size_chunk(500, 10_000, 300) == throttle.size_chunk(500, 10_000, 300)


def test_later_chunks_of_a_prompt_are_smaller_and_take_as_long() -> None:
    policy = learnt()
    sizes = [policy.size_chunk(start, 10_000, 1000)[0] for start in (0, 4000, 12_000)]
    assert sizes[0] > sizes[1] > sizes[2]
    seconds = [
        TRUTH.predict_chunk_seconds(start, tokens)
        for start, tokens in zip((0, 4000, 12_000), sizes, strict=True)
    ]
    assert max(seconds) / min(seconds) < 1.05


@settings(deadline=None)
@given(st.integers(0, 10**5), st.integers(1, 10**5), st.floats(0.01, 1e5))
def test_a_chunk_uses_its_budget(start: int, most: int, budget: float) -> None:
    tokens, cost = learnt_once().size_chunk(start, most, budget)
    assert 1 <= tokens <= most
    if 1 < tokens < most:
        fewer_tokens, below = learnt_once().size_chunk(start, tokens - 1, budget)
        assert fewer_tokens == tokens - 1
        assert below < budget <= cost + 1e-6


_LEARNT: list[BalancePolicy] = []


def learnt_once() -> BalancePolicy:
    if not _LEARNT:
        _LEARNT.append(learnt())
    return _LEARNT[0]


def test_decodes_with_long_contexts_count_for_more() -> None:
    policy = learnt()
    short, long = policy.decode_cost(10), policy.decode_cost(6000)
    assert long / short == pytest.approx(
        (TRUTH.token + TRUTH.decode + 6000 * TRUTH.context_token) / (TRUTH.token + TRUTH.decode),
        rel=0.1,
    )


def test_times_reach_the_policy_once_all_stages_and_the_result_have_arrived() -> None:
    config = SchedulerConfig(policy="balance").resolve(2, 100, 1600)
    heard: list[tuple[int, float]] = []

    class Listening(BalancePolicy):
        def observe_step(self, work: StageWork, seconds: float) -> None:
            heard.append((work.step, seconds))

    scheduler = Scheduler(config, Listening(config))
    scheduler.add(SchedulerRequest(0, list(range(40)), 4), 0.0)
    plan = scheduler.schedule(0.0)
    assert isinstance(plan, StepPlan)
    scheduler.record_step_times(1, [StepTime(plan.step, 5.0, 8.0), StepTime(99, 0.0, 1.0)])
    assert heard == []
    scheduler.record_step_times(0, [StepTime(plan.step, 1.0, 2.0)])
    assert heard == []
    scheduler.commit(StepResult(plan.step, [SampledToken(0, 0, 1)]))
    scheduler.schedule(8.5)
    assert heard == [(plan.step, (8.5 - 0.0) / 2)]
