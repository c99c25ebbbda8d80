"""Deterministic simulation of an engine's whole life under faults.

The real supervisor, recovery, client with its journal, driver, scheduler and sessions run on a
virtual clock, over a simulated network, node and stages. The fake model's tokens are hashes of all
tokens before them, so that a token lost, doubled or misplaced changes the text.
"""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import num_examples
from tests.simulation.scenario import Limits, Scenario

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Keep thousands of recoveries out of the log."""
    logging.getLogger("gllm").setLevel(logging.CRITICAL)


@settings(max_examples=num_examples(12, 2000), deadline=None)
@given(SEEDS, st.integers(0, 8))
def test_requests_outlive_every_process(seed: int, num_faults: int) -> None:
    Scenario(seed, Limits(num_faults=num_faults)).play()


def test_without_faults_everything_ends_without_an_error() -> None:
    scenario = Scenario(1, Limits(num_faults=0, poison_share=0.0))
    scenario.play()
    assert not scenario.faults
    assert {end for reader in scenario.readers for end, _ in reader.ends.values()} <= {
        "stop",
        "length",
        "abort",
    }


def test_the_same_seed_is_the_same_life() -> None:
    first, second = (Scenario(7, Limits(num_faults=6)) for _ in range(2))
    first.play()
    second.play()
    assert first.faults == second.faults
    assert first.loop.num_events == second.loop.num_events
    assert [r.tokens for r in first.readers] == [r.tokens for r in second.readers]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_long_lives(seed: int) -> None:
    """At least 10^5 events each."""
    limits = Limits(num_requests=600, seconds=1500.0, num_faults=80, max_restarts=10**6)
    scenario = Scenario(seed, limits)
    scenario.play()
    assert scenario.supervisor.cause == "the engine was stopped"
    assert scenario.loop.num_events >= 10**5
