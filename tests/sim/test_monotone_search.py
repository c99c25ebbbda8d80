"""Search for the last integer at which a predicate holds."""

from hypothesis import given
from hypothesis import strategies as st

from gllm.sim.monotone_search import bisect_last, find_last


@given(
    threshold=st.integers(-200, 200),
    start=st.integers(-50, 50),
    step=st.integers(1, 40),
    reach=st.integers(0, 150),
)
def test_the_last_integer_is_found_in_few_calls_within_the_range(
    threshold: int, start: int, step: int, reach: int
) -> None:
    called: list[int] = []

    def holds(index: int, *_: int) -> bool:
        called.append(index)
        return index <= threshold

    least, most = start - reach, start + reach
    found = find_last(holds, start, step, least, most)
    assert found == (None if threshold < least else min(threshold, most))
    assert len(set(called)) == len(called) <= 20
    assert all(least <= index <= most for index in called)


def test_calls_name_the_integers_that_may_follow() -> None:
    calls: list[tuple[int, ...]] = []

    def holds(*indices: int) -> bool:
        calls.append(indices)
        return indices[0] <= 5

    assert find_last(holds, 0, 4, -100, 100) == 5
    assert calls == [(0, 4, -4), (4, 12), (12, 28), (8, 10, 6), (6, 7, 5), (5, 5, 4)]


def test_the_ends_of_a_bisection_are_not_called() -> None:
    assert bisect_last(lambda index, *_: index < 3, 0, 8) == 2
    assert bisect_last(lambda *_: 1 / 0 > 0, 3, 4) == 3
