"""Deterministic simulation of a fleet's whole life under faults.

The real backend of routers with its client, dispatcher and links, and the real engines from their
attachment down to the scheduler, run on a virtual clock. Only sockets, processes and the model are
simulated.
"""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import further_runs, num_examples
from tests.support.simulation.fleet_scenario import FleetLimits, FleetScenario

SEEDS = st.integers(0, 2**32 - 1)


def ends(scenario: FleetScenario) -> set[str]:
    return {end for reader in scenario.readers for end, _ in reader.ends.values()}


@further_runs(2)
@settings(max_examples=num_examples(2, 1000), deadline=None)
@given(seed=SEEDS, num_faults=st.integers(0, 10))
def test_requests_outlive_every_engine(run: int, seed: int, num_faults: int) -> None:
    FleetScenario(seed, FleetLimits(num_faults=num_faults)).play()


@pytest.mark.full
def test_without_faults_everything_ends_without_an_error() -> None:
    scenario = FleetScenario(1, FleetLimits(num_faults=0, has_bad_requests=False))
    scenario.play()
    assert not scenario.faults
    assert ends(scenario) <= {"stop", "length", "abort"}


def test_a_rolling_restart_of_the_fleet_costs_no_request() -> None:
    limits = FleetLimits(
        num_requests=40,
        seconds=30.0,
        num_engines=3,
        has_bad_requests=False,
        is_rolling_restart=True,
    )
    scenario = FleetScenario(6, limits)
    scenario.play()
    assert scenario.faults == {"restarted": 3}
    assert len(scenario.starts) == 6
    assert ends(scenario) <= {"stop", "length", "abort"}
    assert len(scenario.readers) > limits.num_requests / 2


@pytest.mark.parametrize(
    "seeds",
    [
        [11, 23],
        *(pytest.param(range(at, at + 20), marks=pytest.mark.full) for at in range(0, 200, 20)),
    ],
)
def test_no_flap_of_any_engines_ends_a_request(seeds: Iterable[int]) -> None:
    for seed in seeds:
        limits = FleetLimits(
            num_requests=25,
            seconds=40.0,
            num_faults=8,
            num_engines=2 + seed % 3,
            has_bad_requests=False,
            has_flaps_only=True,
        )
        scenario = FleetScenario(seed, limits)
        scenario.play()
        assert ends(scenario) <= {"stop", "length", "abort"}, f"seed {seed}: {scenario.faults}"


@pytest.mark.full
def test_no_request_is_blamed_for_the_end_of_a_machine() -> None:
    """A request that moves from one dying engine to the next is at all three of them."""
    limits = FleetLimits(
        num_requests=400,
        seconds=10.0,
        num_engines=4,
        has_bad_requests=False,
        is_machine_lost=True,
    )
    scenario = FleetScenario(9, limits)
    scenario.play()
    assert scenario.faults == {"engine killed": 3}
    assert not any("poison" in reader.errors for reader in scenario.readers)


@pytest.mark.full
def test_the_same_seed_is_the_same_life() -> None:
    first, second = (FleetScenario(7, FleetLimits(num_requests=10, num_faults=6)) for _ in range(2))
    first.play()
    second.play()
    assert first.faults == second.faults
    assert first.loop.num_events == second.loop.num_events
    assert [r.tokens for r in first.readers] == [r.tokens for r in second.readers]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_long_lives(seed: int) -> None:
    """At least 10^5 events each."""
    scenario = FleetScenario(seed, FleetLimits(num_requests=3000, seconds=1500.0, num_faults=120))
    scenario.play()
    assert scenario.loop.num_events >= 10**5
