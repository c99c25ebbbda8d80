"""Rates of load reports over readings at given times."""

import pytest

from gllm.frontend.load_window import LoadReading, LoadWindow
from tests.support.work import held_bytes


def test_rates_cover_the_time_since_the_first_reading():
    window = LoadWindow()
    assert window.add(LoadReading(100.0, 50, 10, 5)) == (0.0, 0.0)
    assert window.add(LoadReading(102.0, 90, 20, 14)) == (20.0, 0.9)
    assert window.add(LoadReading(104.0, 90, 20, 14)) == (10.0, 0.9)


def test_one_token_is_enough_for_a_hit_rate():
    window = LoadWindow()
    window.add(LoadReading(0.0, 0, 7, 3))
    assert window.add(LoadReading(1.0, 0, 8, 4)) == (0.0, 1.0)


def test_rates_forget_what_is_older_than_the_window():
    window = LoadWindow()
    rates = [
        window.add(LoadReading(float(second), 1000 if second else 0, 0, 0)) for second in range(30)
    ]
    assert rates[1].tokens_per_second == 1000
    assert rates[11].tokens_per_second == pytest.approx(0, abs=1e-9)


def test_many_readings_at_once_keep_their_window():
    window = LoadWindow()
    sizes = []
    for step in range(30_000):
        rates = window.add(LoadReading(step / 1000, step, 0, 0))
        if step % 1000 == 0:
            sizes.append(held_bytes(window))
    assert rates.tokens_per_second == pytest.approx(1000)
    # Those of ten seconds, ten a second.
    assert max(sizes) < 1.1 * sizes[10] < 3 * sizes[5]


def test_another_scheduler_counts_anew():
    window = LoadWindow()
    window.add(LoadReading(0.0, 500, 0, 0))
    assert window.add(LoadReading(1.0, 7, 0, 0)) == (0.0, 0.0)
    assert window.add(LoadReading(2.0, 17, 0, 0)).tokens_per_second == 10
