"""Predicted durations of transfers: the fit, outliers, changes of the link."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.transport.kv.transfer_estimate import (
    FORGET_SECONDS,
    NUM_LATE,
    SAMPLES_PER_SIZE,
    TransferEstimate,
    fit_line,
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
    for now, size in enumerate(sizes):
        estimate.observe(size, fixed_seconds + size / rate, float(now))
    for size in sizes:
        predicted = estimate.predict(size)
        assert predicted is not None
        if max(sizes) > 2 * min(sizes):
            # A class has sizes up to twice its least one.
            assert predicted == pytest.approx(fixed_seconds + size / rate, rel=1e-3)
        else:
            assert predicted == pytest.approx(fixed_seconds + size / rate, rel=0.6)


def test_line_has_the_least_errors_and_no_negative_coefficient() -> None:
    # 2 + 3 x, met exactly.
    assert fit_line([(1.0, 5.0, 1), (2.0, 8.0, 4), (10.0, 32.0, 1)]) == pytest.approx((2, 3))
    # Falling: a constant, the mean with weights 1 and 1/4.
    assert fit_line([(2.0, 1.0, 1), (1.0, 2.0, 0.25)]) == pytest.approx((1.2, 0))
    # Steeper than proportional: through the origin, (1 * 1 + 2 * 4 / 16) / (1 * 1 + 2 * 2 / 16).
    assert fit_line([(1.0, 1.0, 1), (2.0, 4.0, 1 / 16)]) == pytest.approx((0, 1.2))


def test_sizes_far_away_change_a_prediction_little() -> None:
    """A token bucket: up to 1 MB arrives at once, and what is beyond it at 1 MB/s."""
    estimate = TransferEstimate()
    for _ in range(SAMPLES_PER_SIZE):
        for size in (10**4, 10**5, 10**6, 2 * 10**6, 4 * 10**6, 8 * 10**6):
            estimate.observe(size, 0.001 + max(size - 10**6, 0) / 1e6, 0.0)
    assert estimate.predict(10**4) == pytest.approx(0.001, rel=0.1)
    assert estimate.predict(4 * 10**6) == pytest.approx(3.001, rel=0.25)
    assert estimate.predict(8 * 10**6) == pytest.approx(7.001, rel=0.1)


def test_estimate_finds_both_coefficients_and_follows_a_change() -> None:
    estimate = TransferEstimate()
    assert estimate.predict(1) is None
    now = 0.0
    for rate in (1e8, 1e6):
        for size in range(10**5, 10**7, 10**5):
            now += 1
            estimate.observe(size, 0.01 + size / rate, now)
        assert estimate.bytes_per_second == pytest.approx(rate, rel=0.05)
    estimate.observe(0, 1.0, now)
    assert estimate.bytes_per_second == pytest.approx(1e6, rel=0.05)


def _fitted() -> TransferEstimate:
    """Return an estimate whose line is 1 ms + x / 10 MB/s."""
    estimate = TransferEstimate()
    for _ in range(SAMPLES_PER_SIZE):
        estimate.observe(10**4, 0.002, 0.0)
        estimate.observe(10**6, 0.101, 0.0)
    assert estimate.fixed_seconds == pytest.approx(0.001)
    assert estimate.bytes_per_second == pytest.approx(1e7)
    return estimate


def test_delayed_transfers_change_nothing_as_long_as_most_of_their_size_are_not() -> None:
    estimate = _fitted()
    for _ in range(3):
        estimate.observe(10**6, 5.0, 0.0)
        estimate.observe(10**4, 0.002, 0.0)
    assert estimate.fixed_seconds == pytest.approx(0.001)
    assert estimate.bytes_per_second == pytest.approx(1e7)
    estimate.observe(10**6, 5.0, 0.0)
    # No line has these points: each size is predicted by its own transfers.
    assert estimate.predict(10**6) == pytest.approx(5.0)
    assert estimate.predict(10**4) == pytest.approx(0.002, rel=0.5)


def test_slow_transfers_in_a_row_show_a_slow_link() -> None:
    estimate = _fitted()
    for _ in range(NUM_LATE - 1):
        estimate.observe(10**6, 10.001, 0.0)
    assert estimate.predict(10**6) == pytest.approx(0.101)
    estimate.observe(10**6, 10.001, 0.0)
    # The fixed part is kept: 1 ms + x / 100 kB/s.
    assert estimate.predict(10**6) == pytest.approx(10.001)
    assert estimate.predict(10**5) == pytest.approx(1.001)


def test_one_fast_transfer_shows_a_fast_link() -> None:
    estimate = _fitted()
    estimate.observe(10**6, 0.011, 0.0)
    # 1 ms + x / 100 MB/s.
    assert estimate.predict(10**6) == pytest.approx(0.011)
    assert estimate.predict(10**5) == pytest.approx(0.002)


def test_old_transfers_of_other_sizes_are_forgotten() -> None:
    estimate = TransferEstimate()
    estimate.observe(10**6, 1.0, 0.0)
    estimate.observe(19 * 10**5, 1.0, FORGET_SECONDS)
    assert estimate.predict(10**5) == pytest.approx(1.0)
    estimate.observe(19 * 10**5, 1.0, FORGET_SECONDS + 1)
    # The small one had said that the size does not matter.
    assert estimate.predict(10**5) == pytest.approx(0.5 + 0.5 / 19)


def test_equal_sizes_give_a_rate_without_a_fixed_part() -> None:
    estimate = TransferEstimate()
    for _ in range(5):
        estimate.observe(1000, 0.5, 0.0)
    assert estimate.predict(1000) == pytest.approx(0.5)
