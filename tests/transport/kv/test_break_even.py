"""Break-even of transfers against prefills, and deadlines of fetches."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.transport.kv.break_even import (
    RETRY_SECONDS,
    TRUSTED_FACTOR,
    UNSURE_FACTOR,
    FetchDeadline,
    FetchDecision,
)
from gllm.transport.kv.transfer_estimate import SAMPLES_PER_SIZE, size_class


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
    predicted = decision.estimate.predict(num_bytes)
    assert predicted is not None
    same_size = [
        now for now, (size, _) in enumerate(transfers) if size_class(size) == size_class(num_bytes)
    ]
    is_recent = bool(same_size) and len(transfers) - 1 + age - same_size[-1] < RETRY_SECONDS - 1e-3
    if predicted < compute_seconds or not is_known or age > RETRY_SECONDS + 1e-3:
        assert is_worth
    elif is_recent or predicted > 1.001 * UNSURE_FACTOR * compute_seconds:
        assert not is_worth or age > RETRY_SECONDS - 1e-3


def test_prefills_of_unknown_speed_are_no_reason_against_a_fetch() -> None:
    decision = FetchDecision()
    decision.observe(10**6, 10.0, now=0.0)
    assert decision.is_worth(10**6, None, 1.0)
    assert not decision.is_worth(10**6, 0.1, 1.0)


def test_a_link_that_has_become_fast_is_used_again() -> None:
    decision = FetchDecision()
    decision.observe(10**6, 10.0, now=0.0)
    asked = [now for now in range(1, 200) if decision.is_worth(10**6, 0.1, float(now))]
    assert asked[0] == RETRY_SECONDS + 1
    for now in range(31, 61):
        decision.observe(10**6, 0.01, float(now))
    assert decision.is_worth(10**6, 0.1, 61.0)


def test_a_size_that_is_not_fetched_is_measured_again_while_others_are_fetched() -> None:
    decision, compute_seconds = FetchDecision(), 0.010
    # Four of seven small transfers wait for a busy core: 11 ms instead of 6.
    for number in range(SAMPLES_PER_SIZE):
        decision.observe(10**6, 0.1, 0.0)
        decision.observe(10**4, 0.011 if number < 4 else 0.006, 0.0)
    fetches = []
    for now in range(1, 101):
        decision.observe(10**6, 0.1, float(now))
        if decision.is_worth(10**4, compute_seconds, float(now)):
            fetches.append(now)
            decision.observe(10**4, 0.006, float(now))
    assert fetches[:3] == [31, 32, 33]
    assert fetches[-1] == 100


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gigabytes", [0.12, 0.2, 0.4, 1.6])
def test_decisions_change_where_transfers_get_cheaper_although_some_are_delayed(
    gigabytes: float, seed: int
) -> None:
    """The lengths and times of `python -m benchmarks.disaggregation`, simulated.

    A transfer takes 3.7 ms and its bytes' time, up to a third more, and every twentieth 10 ms more.
    """
    rng, decision, now = Random(seed), FetchDecision(), 0.0
    lengths = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768)

    def compute_seconds(num_tokens: int) -> float:
        return 55e-6 * num_tokens + 7e-8 * num_tokens * (num_tokens + 1) / 2

    def transfer_seconds(num_tokens: int) -> float:
        return 0.0037 + num_tokens * 3072 / (gigabytes * 1e9)

    def hand_off(num_tokens: int) -> bool:
        nonlocal now
        now += 0.1
        is_worth = decision.is_worth(num_tokens * 3072, compute_seconds(num_tokens), now)
        if is_worth:
            seconds = transfer_seconds(num_tokens) * (1 + min(abs(rng.gauss(0, 0.1)), 0.33))
            delay = rng.expovariate(100) if rng.random() < 0.05 else 0.0
            decision.observe(num_tokens * 3072, seconds + delay, now)
        return is_worth

    for _ in range(60):
        hand_off(rng.choice(lengths))
    low, high = lengths[0], lengths[-1]
    while high > 1.03 * low and (middle := round((low * high) ** 0.5)) not in (low, high):
        votes = sum((hand_off(high), hand_off(middle))[1] for _ in range(3))
        low, high = (low, middle) if votes >= 2 else (middle, high)
    # The median of the transfers is 1.07 times their least duration.
    exact = next(n for n in range(1, 1000) if 1.07 * transfer_seconds(n) < compute_seconds(n))
    assert low == pytest.approx(exact, rel=0.2)


def test_deadline_is_extended_while_bytes_arrive() -> None:
    deadline = FetchDeadline(10.0, predicted_seconds=1.0)
    assert not deadline.is_late(15.0)
    assert deadline.is_late(15.1)
    deadline.last_arrival = 14.0
    assert not deadline.is_late(16.0)
    assert deadline.is_late(16.1)
    deadline.last_arrival = 10.5
    assert not deadline.is_late(15.0)
    assert deadline.is_late(15.1)
