"""The comparison of routing policies, in simulated time and small."""

import argparse

import pytest

from benchmarks.router import decision_seconds
from benchmarks.routing import Figures, count_wins, format_page, measure_simulated

pytestmark = pytest.mark.full


def test_page_has_a_row_per_policy_and_the_aim() -> None:
    options = argparse.Namespace(
        policies=["predict", "round-robin"], pools=["equal", "unequal"], rounds=2, requests=40
    )
    figures, capacities = measure_simulated(options)
    assert measure_simulated(options) == (figures, capacities)
    page = format_page(figures, capacities, "Made by a test.")
    assert page.startswith("Made by a test. Conversations")
    rows = [line for line in page.splitlines() if line.startswith(("| predict", "| round-robin"))]
    assert len(rows) == 4
    assert all(sum(each.requests) == 40 for rounds in figures["equal"].values() for each in rounds)
    assert "`predict` has the lowest mean TTFT in 2 of 2 rounds" in page


def test_only_the_lowest_mean_of_a_round_wins() -> None:
    rounds = {
        "predict": [Figures(ttft, 1, 1, 1, 0, []) for ttft in (1.0, 3.0, 2.0)],
        "random": [Figures(ttft, 1, 1, 1, 0, []) for ttft in (2.0, 2.0, 2.0)],
    }
    assert count_wins(rounds, "predict") == 2
    assert count_wins(rounds, "random") == 2


def test_a_decision_is_timed() -> None:
    assert 0 < decision_seconds("predict", 3, 5) < 1
