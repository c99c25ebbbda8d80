"""Break-even of transfers against prefills, and deadlines of fetches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.kv_transfer.break_even import (
    RETRY_SECONDS,
    TRUSTED_FACTOR,
    FetchDeadline,
    FetchDecision,
    TransferEstimate,
    find_crossing_tokens,
    should_fetch,
)


@given(
    st.floats(1e5, 1e10),
    st.floats(0, 0.5),
    st.lists(st.integers(10**4, 10**8), min_size=3, max_size=30, unique=True),
)
def test_estimate_predicts_transfers_on_a_line(
    rate: float, fixed_seconds: float, sizes: list[int]
) -> None:
    estimate = TransferEstimate()
    for size in sizes:
        estimate.observe(size, fixed_seconds + size / rate)
    largest = max(sizes)
    predicted = estimate.predict(largest)
    assert predicted is not None
    mean = sum(sizes) / len(sizes)
    if max(abs(size - mean) for size in sizes[-3:]) > 0.5 * mean:
        assert predicted == pytest.approx(fixed_seconds + largest / rate, rel=0.5)
    assert predicted > 0


def test_estimate_finds_both_coefficients_and_follows_a_change() -> None:
    estimate = TransferEstimate()
    assert estimate.predict(1) is None
    for rate in (1e8, 1e6):
        for size in range(10**5, 10**7, 10**5):
            estimate.observe(size, 0.01 + size / rate)
        assert estimate.bytes_per_second == pytest.approx(rate, rel=0.05)
    estimate.observe(0, 1.0)
    assert estimate.bytes_per_second == pytest.approx(1e6, rel=0.05)


def test_equal_sizes_give_a_rate_without_a_fixed_part() -> None:
    estimate = TransferEstimate()
    for _ in range(5):
        estimate.observe(1000, 0.5)
    assert estimate.predict(1000) == pytest.approx(0.5)


@given(st.floats(1e5, 1e9), st.floats(1e-4, 1), st.integers(1, 10**6), st.floats(10, 1e5))
def test_crossing_is_where_the_cheaper_side_changes(
    rate: float, fixed_seconds: float, bytes_per_token: int, speed: float
) -> None:
    estimate = TransferEstimate(rate, fixed_seconds)
    crossing = find_crossing_tokens(estimate, bytes_per_token, speed)

    def is_cheaper(num_tokens: float) -> bool:
        seconds = fixed_seconds + num_tokens * bytes_per_token / rate
        return should_fetch(seconds, num_tokens / speed)

    if crossing is None:
        assert not is_cheaper(1e9)
    else:
        assert not is_cheaper(0.99 * crossing)
        assert is_cheaper(1.01 * crossing)


def test_unknown_rates_are_measured_by_fetching() -> None:
    assert should_fetch(None, 1.0)
    assert should_fetch(1.0, None)
    assert find_crossing_tokens(TransferEstimate(), 1, 1.0) is None


@given(
    st.lists(st.tuples(st.integers(1, 10**8), st.floats(1e-4, 100)), min_size=1, max_size=20),
    st.integers(1, 10**9),
    st.floats(1e-6, 1),
    st.floats(0, 2 * RETRY_SECONDS),
)
def test_only_what_was_measured_lately_is_a_reason_against_a_fetch(
    transfers: list[tuple[int, float]], num_bytes: int, compute_seconds: float, age: float
) -> None:
    decision = FetchDecision()
    assert decision.is_worth(num_bytes, compute_seconds, 0.0)
    for now, (size, seconds) in enumerate(transfers):
        decision.observe(size, seconds, float(now))
    is_worth = decision.is_worth(num_bytes, compute_seconds, len(transfers) - 1 + age)
    is_known = num_bytes <= TRUSTED_FACTOR * max(size for size, _ in transfers)
    if is_known and age < RETRY_SECONDS - 1e-3:
        assert is_worth == should_fetch(decision.estimate.predict(num_bytes), compute_seconds)
    elif not is_known or age > RETRY_SECONDS + 1e-3:
        assert is_worth


def test_a_link_that_has_become_fast_is_used_again() -> None:
    decision = FetchDecision()
    decision.observe(10**6, 10.0, now=0.0)
    asked = [now for now in range(1, 200) if decision.is_worth(10**6, 0.1, float(now))]
    assert asked[0] == RETRY_SECONDS + 1
    for now in range(31, 61):
        decision.observe(10**6, 0.01, float(now))
    assert decision.is_worth(10**6, 0.1, 61.0)


def test_deadline_is_extended_while_bytes_arrive() -> None:
    deadline = FetchDeadline(10.0, predicted_seconds=1.0)
    assert not deadline.is_late(15.0)
    assert deadline.is_late(15.1)
    deadline.on_bytes(14.0)
    assert not deadline.is_late(16.0)
    assert deadline.is_late(16.1)
    deadline.on_bytes(10.5)
    assert deadline.time == 15.0
