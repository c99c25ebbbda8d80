"""Detector of lasting shifts: stationary traces never shift, doubled lengths do once (D15)."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.routing.scaling.workload_shifts import (
    QUANTITIES,
    RequestSample,
    ShiftDetector,
    ShiftRule,
    WindowMeans,
    WorkloadShift,
    measure_means,
)
from gllm.sim.workloads.requests import make_workload
from tests.support.examples import num_examples

WORKLOADS = st.sampled_from(["sharegpt", "azure-conv", "azure-code", "longbench"])
SEEDS = st.integers(0, 10**6)


def make_trace(workload: str, seed: int, count: int, rate: float = 5.0) -> list[RequestSample]:
    """Return a stationary trace."""
    jobs = make_workload(workload, count, rate, seed=seed)
    return [RequestSample(*job[:3]) for job in jobs]


def find_shifts(trace: Iterable[RequestSample]) -> list[WorkloadShift]:
    """Return all shifts of a trace."""
    detector = ShiftDetector()
    return [shift for sample in trace if (shift := detector.observe(sample))]


def join(first: Sequence[RequestSample], second: Sequence[RequestSample]) -> list[RequestSample]:
    """Return a trace that goes on with another one."""
    end = first[-1].arrival_seconds
    later = [RequestSample(end + each[0], *each[1:]) for each in second]
    return [*first, *later]


@given(WORKLOADS, SEEDS)
@settings(max_examples=num_examples(4, 100), deadline=None)
def test_a_stationary_trace_has_no_shift(workload: str, seed: int) -> None:
    assert not find_shifts(make_trace(workload, seed, 6000))


@given(WORKLOADS, SEEDS, st.integers(1500, 2600))
@settings(max_examples=num_examples(4, 100), deadline=None)
def test_doubled_lengths_are_one_shift(workload: str, seed: int, begin: int) -> None:
    trace = make_trace(workload, seed, begin + 4000)
    doubled = [
        each
        if index < begin
        else RequestSample(
            each.arrival_seconds, 2 * each.num_prompt_tokens, 2 * each.num_output_tokens
        )
        for index, each in enumerate(trace)
    ]
    (shift,) = find_shifts(doubled)
    assert set(shift.quantities) <= set(QUANTITIES[:2])
    for before, after in zip(shift.before.means[:2], shift.after.means[:2], strict=True):
        assert 1.25 * before < after


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_new_rate_is_one_shift(factor: float) -> None:
    trace = join(make_trace("sharegpt", 1, 2000), make_trace("sharegpt", 2, 4000, 5.0 * factor))
    (shift,) = find_shifts(trace)
    assert shift.quantities == QUANTITIES[2:]
    assert shift.after.rate / shift.before.rate == pytest.approx(factor, rel=0.25)


def test_a_rate_that_changes_after_a_reset_is_the_profile() -> None:
    trace = join(make_trace("sharegpt", 1, 2000), make_trace("sharegpt", 2, 4000, 10.0))
    detector = ShiftDetector()
    for index, sample in enumerate(trace):
        if index == 2000:
            detector.reset()
        assert detector.observe(sample) is None
    assert detector.profile is not None
    assert detector.profile.rate == pytest.approx(10.0, rel=0.1)


@given(WORKLOADS, SEEDS, st.lists(st.sampled_from([0.5, 2.0, 4.0]), min_size=1, max_size=3))
@settings(max_examples=num_examples(3, 50), deadline=None)
def test_the_profile_stays_until_a_plan_is_adopted(
    workload: str, seed: int, factors: list[float]
) -> None:
    """Shifts of the rate, one after the other, change no profile; each one is reported."""
    trace = make_trace(workload, seed, 2000)
    for factor in factors:
        trace = join(trace, make_trace(workload, seed + 1, 3000, 5.0 * factor))
    detector = ShiftDetector()
    shifts: list[WorkloadShift] = []
    profiles: list[WindowMeans] = []
    for sample in trace:
        if shift := detector.observe(sample):
            shifts.append(shift)
        if detector.profile is not None and detector.profile not in profiles:
            profiles.append(detector.profile)
    assert shifts
    assert profiles == [shifts[0].before]
    detector.reset()
    assert detector.profile is None


def test_a_short_burst_is_no_shift() -> None:
    trace = make_trace("sharegpt", 3, 4000)
    burst = [
        RequestSample(each.arrival_seconds, 4 * each.num_prompt_tokens, each.num_output_tokens)
        if 1300 <= index < 1500
        else each
        for index, each in enumerate(trace)
    ]
    assert not find_shifts(burst)


def test_arrivals_without_lengths_count_for_the_rate() -> None:
    samples = [RequestSample(0.0, 1, 1), RequestSample(2.0, 1, 1), RequestSample(6.0, 1, 1, 10)]
    # One gap of 2 s, and 10 of 0.4 s.
    assert measure_means(samples).rate == pytest.approx(11 / 6)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="window 1"):
        ShiftRule(window=1)
    with pytest.raises(ValueError, match="relative_change 0"):
        ShiftRule(relative_change=0)
