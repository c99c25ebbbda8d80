"""Prefill batches as large as saturates the stages: by measured step times, or as configured."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.scheduler.config import PREFILL_BATCH_TOKENS, SchedulerConfig
from gllm.scheduler.policy_registry import create_policy
from gllm.scheduler.prefill_size import (
    GROWTH_LIMIT,
    MIN_BATCH_TOKENS,
    SATURATION,
    PrefillBatchSize,
    count_saturating_tokens,
)
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import StepTimeCurve


def config_of(policy: str, tokens: int | None, most: int = 8192) -> SchedulerConfig:
    config = SchedulerConfig(
        policy=policy, prefill_batch_tokens=tokens, max_num_batched_tokens=most
    )
    return config.resolve(1, 4096, 16384)


def prefill(num_tokens: int) -> StageWork:
    return StageWork(1, num_tokens, ((0, num_tokens),), 0, 0, 1)


@given(
    ridge=st.floats(1, 5000), seconds=st.floats(1e-5, 1), largest=st.floats(1, 1e5),
    most=st.integers(1, 16384),
)  # fmt: skip
def test_a_saturated_step_is_mostly_arithmetic(
    ridge: float, seconds: float, largest: float, most: int
) -> None:
    curve = StepTimeCurve.from_ridge(ridge, seconds)
    tokens = count_saturating_tokens(curve, largest, most)
    assert min(most, MIN_BATCH_TOKENS) <= tokens <= most
    if MIN_BATCH_TOKENS < tokens < math.floor(min(most, GROWTH_LIMIT * largest)):
        arithmetic = seconds / ridge * tokens
        assert arithmetic / curve.seconds(tokens) == pytest.approx(SATURATION, abs=0.01)


def test_the_papers_number_is_that_of_the_papers_device() -> None:
    curve = StepTimeCurve.from_ridge(168)
    assert count_saturating_tokens(curve, 4096, 8192) == pytest.approx(512, rel=0.02)


@pytest.mark.parametrize("policy", PREFILL_BATCH_TOKENS)
@pytest.mark.parametrize("ridge", [40, 150, 600])
def test_policies_measure_their_size_if_it_is_not_configured(policy: str, ridge: int) -> None:
    measured = create_policy(config_of(policy, 0))
    assert measured.learns_step_times
    assert measured.prefill_batch_tokens == PREFILL_BATCH_TOKENS[policy]
    for number in range(2000):
        # Batches are full, or smaller where fewer tokens wait.
        tokens = max(1, measured.prefill_batch_tokens >> (number % 4))
        measured.observe_step(prefill(tokens), 1e-3 * math.hypot(1, tokens / ridge))
    saturating = ridge * SATURATION / math.sqrt(1 - SATURATION**2)
    assert measured.prefill_batch_tokens == pytest.approx(saturating, rel=0.15)
    for configured, expected in ((None, PREFILL_BATCH_TOKENS[policy]), (77, 77)):
        fixed = create_policy(config_of(policy, configured))
        assert not fixed.learns_step_times
        fixed.observe_step(prefill(10), 1.0)
        assert fixed.prefill_batch_tokens == expected


def test_policies_without_such_a_number_have_none() -> None:
    assert config_of("sarathi", 0).prefill_batch_tokens == 8192
    assert create_policy(config_of("sarathi", 0)).prefill_batch_tokens == 0
    assert create_policy(config_of("throttle", None)).prefill_batch_tokens == 0


def test_a_size_is_within_the_limit_of_a_micro_batch() -> None:
    size = PrefillBatchSize(config_of("distserve", 0, most=100))
    assert size.num_tokens == 100
    for number in range(500):
        size.observe_step(prefill(1 + number % 100), 1e-3 * math.hypot(1, number % 100 / 900))
    assert size.num_tokens == 100
    size.observe_step(prefill(50), 0.0)
