"""Deterministic simulation of an engine's whole life under faults.

The real supervisor, recovery, client with its journal, driver, scheduler and sessions run on a
virtual clock, over a simulated network, node and stages. The fake model's tokens are hashes of all
tokens before them, so that a token lost, doubled or misplaced changes the text.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import further_runs, num_examples
from tests.support.simulation.scenario import Limits, Scenario

SEEDS = st.integers(0, 2**32 - 1)
SLOW_STAGE = Limits(
    num_requests=120,
    seconds=60.0,
    num_faults=0,
    degrees=(1, 1),
    poison_share=0.0,
    slowdown=(1.0, 3.0),
)
"""Two stages, of which the second is slowed to a third of its speed."""


@further_runs(2)
@settings(max_examples=num_examples(7, 2000), deadline=None)
@given(seed=SEEDS, num_faults=st.integers(0, 8))
def test_requests_outlive_every_process(run: int, seed: int, num_faults: int) -> None:
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


STRIKES = {
    "spawn": (("spawn", 2, "kill"),),
    "connected": (("connected", 1, "kill"),),
    "loading": (("loading", 3, "kill"),),
    "initialize": (("initialize", 2, "kill"),),
    "ready": (("ready", 1, "kill"),),
    "prefill": (("prefill", 7, "kill"),),
    "decode": (("decode", 40, "kill"),),
    "closing": (("decode", 40, "kill"), ("closing", 1, "kill")),
    "closed": (("decode", 40, "kill"), ("closed", 1, "kill")),
    "spawn of a recovery": (("prefill", 9, "kill"), ("spawn", 4, "kill")),
    "loading of a recovery": (("decode", 20, "kill"), ("loading", 8, "kill")),
    "initialize of a recovery": (("decode", 20, "kill"), ("initialize", 4, "kill")),
    "ready after a recovery": (("decode", 20, "kill"), ("ready", 2, "kill")),
    "two in one step": (("decode", 40, "kill"), ("decode", 41, "kill")),
}
"""Deaths at each moment of a life; with the same number of strikes as processes that end."""


def strike_cases() -> Iterator[Any]:
    """Each moment with a death or a stop, of stages or of ranks in turn; all others are `full`."""
    for number, name in enumerate(STRIKES):
        for place, (kind, degrees) in enumerate(product(["kill", "stop"], [(1, 1, 1), (3,)])):
            marks = [] if place == number % 4 else [pytest.mark.full]
            yield pytest.param(name, kind, degrees, marks=marks, id=f"{name}-{kind}-{degrees}")


@pytest.mark.parametrize(("name", "kind", "degrees"), list(strike_cases()))
def test_a_death_at_each_moment_costs_that_process_and_a_pause(
    name: str, kind: str, degrees: tuple[int, ...]
) -> None:
    strikes = tuple((moment, number, kind) for moment, number, _ in STRIKES[name])
    scenario = Scenario(
        3,
        Limits(
            num_requests=8,
            seconds=20.0,
            max_restarts=3,
            degrees=degrees,
            poison_share=0.0,
            num_faults=0,
            strikes=strikes,
        ),
    )
    scenario.play()
    assert scenario.faults.total() == len(strikes), scenario.faults
    # Survivors keep their processes.
    assert scenario.num_served_deaths == len(strikes)
    ends = {end for reader in scenario.readers for end, _ in reader.ends.values()}
    assert ends <= {"stop", "length", "abort"}
    assert len(scenario.readers) > 1


@pytest.mark.parametrize("layers", ["auto", pytest.param("even", marks=pytest.mark.full)])
def test_a_slow_stage_gets_fewer_layers_and_no_request_notices(layers: str) -> None:
    """Before the first request by measuring, or later by the times of steps."""
    limits = replace(SLOW_STAGE, max_restarts=0, layers=layers)
    scenario = Scenario(5, limits)
    scenario.world.slowness = (1.0,)
    scenario.play()
    assert not scenario.faults
    first, last = scenario.supervisor.planner.layers
    assert len(first) == 6
    assert len(last) == 2
    changes = scenario.supervisor.deaths.recoveries
    assert dict(changes) == ({} if layers == "auto" else {"rebalanced": 1})
    ends = {end for reader in scenario.readers for end, _ in reader.ends.values()}
    assert ends <= {"stop", "length", "abort"}
    assert len(scenario.readers) > 50


STRIKES_MEASURING = {
    "first worker": (("measuring", 1, "kill"),),
    "second worker": (("measuring", 2, "kill"),),
    "stopped worker": (("measuring", 2, "stop"),),
    "spawn afterwards": (("measuring", 2, "kill"), ("spawn", 3, "kill")),
}


@pytest.mark.parametrize("name", STRIKES_MEASURING)
def test_a_death_while_workers_measure_costs_no_request(name: str) -> None:
    limits = Limits(
        num_requests=8,
        seconds=20.0,
        num_faults=0,
        max_restarts=3,
        degrees=(1, 1),
        poison_share=0.0,
        slowdown=(1.0, 3.0),
        strikes=STRIKES_MEASURING[name],
    )
    scenario = Scenario(4, limits)
    scenario.play()
    ends = {end for reader in scenario.readers for end, _ in reader.ends.values()}
    assert ends <= {"stop", "length", "abort"}
    assert scenario.readers


@pytest.mark.parametrize("moment", ["closing", pytest.param("closed", marks=pytest.mark.full)])
def test_a_death_during_a_change_of_layers_costs_no_request(moment: str) -> None:
    strikes = ((moment, 1, "kill"),)
    limits = replace(SLOW_STAGE, max_restarts=3, layers="even", strikes=strikes)
    scenario = Scenario(5, limits)
    scenario.world.slowness = (1.0,)
    scenario.play()
    assert scenario.faults.total() == 1
    assert scenario.supervisor.deaths.recoveries["rebalanced"] >= 1
    assert [len(part) for part in scenario.supervisor.planner.layers] == [6, 2]
    ends = {end for reader in scenario.readers for end, _ in reader.ends.values()}
    assert ends <= {"stop", "length", "abort"}


def test_the_same_seed_is_the_same_life() -> None:
    first, second = (
        Scenario(7, Limits(num_faults=6, max_restarts=50, seconds=30.0)) for _ in range(2)
    )
    first.play()
    second.play()
    assert first.faults == second.faults
    assert first.loop.num_events == second.loop.num_events
    assert [r.tokens for r in first.readers] == [r.tokens for r in second.readers]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_long_lives(seed: int) -> None:
    """At least 10^5 events each."""
    limits = Limits(num_requests=1500, seconds=2500.0, num_faults=80, max_restarts=10**6)
    scenario = Scenario(seed, limits)
    scenario.play()
    assert scenario.supervisor.cause == "the engine was stopped"
    assert scenario.loop.num_events >= 10**5
