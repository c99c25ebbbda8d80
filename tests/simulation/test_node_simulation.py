"""Deterministic simulation of engines on several machines under faults.

The real agents, the hub of the nodes and all between them run on the virtual clock, beside what
runs in the simulation of one machine.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import further_runs, num_examples
from tests.support.simulation.node_scenario import NodeLimits, NodeScenario


def play(seed: int = 3, **options: object) -> NodeScenario:
    """Play a life of four stages on three nodes, two of them other machines."""
    limits = {
        "num_nodes": 3,
        "degrees": (1, 1, 1, 1),
        "num_requests": 20,
        "seconds": 60.0,
        "num_faults": 0,
        "max_restarts": 3,
        "poison_share": 0.0,
        "slowdown": (1.0,) * 4,
        "num_standbys": 0,
    }
    scenario = NodeScenario(seed, NodeLimits(**{**limits, **options}))  # type: ignore[arg-type]
    scenario.world.slowness = (1.0,)
    scenario.play()
    return scenario


def ends(scenario: NodeScenario) -> set[str]:
    return {end for reader in scenario.readers for end, _ in reader.ends.values()}


@pytest.mark.full
def test_without_faults_everything_ends_without_an_error() -> None:
    scenario = play()
    assert ends(scenario) <= {"stop", "length", "abort"}
    assert scenario.nodes_used == [["local", "local", "node-1", "node-2"]]


BEFORE = ["local", "local", "node-1", "node-2"]


def check_served(scenario: NodeScenario) -> None:
    """Check that no request was lost, and that requests ran throughout."""
    assert ends(scenario) <= {"stop", "length", "abort"}
    assert len(scenario.readers) > 7
    assert scenario.supervisor.cause == "the engine was stopped"


@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.long)])
def test_a_machine_that_loses_power_returns_in_time(seed: int) -> None:
    scenario = play(seed, node_strikes=((20.0, "power", 0, 4.0),))
    check_served(scenario)
    assert scenario.nodes_used == [BEFORE, BEFORE]
    assert scenario.num_served_deaths == scenario.num_start_deaths + 1, (
        "survivors keep their processes"
    )
    assert dict(scenario.supervisor.deaths.recoveries) == {"node": 1}


def test_layers_are_cut_anew_over_the_machines_left() -> None:
    scenario = play(node_strikes=((20.0, "power", 0, 500.0),))
    check_served(scenario)
    assert scenario.nodes_used == [BEFORE, ["local", "local", "node-2"]]
    assert len(scenario.supervisor.planner.layers) == 3
    assert scenario.num_served_deaths == scenario.num_start_deaths + 1


@pytest.mark.full
def test_the_head_has_all_layers_once_both_other_machines_are_lost() -> None:
    strikes = ((20.0, "power", 0, 500.0), (40.0, "power", 1, 500.0))
    scenario = play(node_strikes=strikes)
    check_served(scenario)
    assert scenario.nodes_used[-1] == ["local", "local"]


@pytest.mark.full
def test_without_memory_for_it_the_engine_waits_for_the_machine() -> None:
    scenario = play(can_repartition=False, node_strikes=((20.0, "power", 1, 40.0),))
    check_served(scenario)
    assert scenario.nodes_used == [BEFORE, BEFORE]


def test_layers_that_do_not_fit_after_a_recut_wait_for_the_machine() -> None:
    scenario = play(short_num_stages=3, node_strikes=((20.0, "power", 0, 40.0),))
    check_served(scenario)
    assert scenario.nodes_used == [BEFORE, ["local", "local", "node-2"], BEFORE]
    assert "waiting for node-1 or for another machine" in scenario.supervisor.deaths.cause


# Under other seeds several such requests come before a step commits, and use up the restarts.
@pytest.mark.parametrize(
    "seed", [7, *(pytest.param(i, marks=pytest.mark.long) for i in (2, 4, *range(10, 20)))]
)
def test_a_request_that_powers_off_machines_ends_after_three_deaths(seed: int) -> None:
    scenario = play(seed, has_bombs=True, poison_share=1.0)
    bombs = [each for each in scenario.readers if each.is_poison]
    assert all(each.errors == {"poison"} or each.is_aborted for each in bombs)
    # Other seeds may draw no such request.
    assert bombs or seed != 7
    others = {
        end for each in scenario.readers if each not in bombs for end, _ in each.ends.values()
    }
    assert others <= {"stop", "length", "abort"}
    assert scenario.faults["bomb"] <= 3 * len(bombs)
    assert scenario.supervisor.cause == "the engine was stopped"


def test_a_spare_takes_the_stages_at_once() -> None:
    strikes = ((20.0, "power", 1, 25.0), (60.0, "power", 2, 500.0))
    scenario = play(num_spares=1, can_repartition=False, seconds=90.0, node_strikes=strikes)
    check_served(scenario)
    # The machine that has returned is the spare of the spare.
    assert scenario.nodes_used == [BEFORE, [*BEFORE[:3], "spare-0"], BEFORE]


def test_a_short_cut_of_the_network_is_no_event() -> None:
    scenario = play(node_strikes=((20.0, "network", 0, 3.0),))
    check_served(scenario)
    assert scenario.nodes_used == [BEFORE]


@pytest.mark.parametrize("seed", [3, *(pytest.param(i, marks=pytest.mark.long) for i in (4, 5))])
def test_a_cut_of_the_network_costs_no_process(seed: int) -> None:
    scenario = play(seed, node_strikes=((20.0, "network", 0, 8.0),))
    check_served(scenario)
    assert scenario.nodes_used == [BEFORE, BEFORE]
    assert scenario.num_served_deaths == scenario.num_start_deaths


@pytest.mark.full
def test_two_machines_are_lost_at_once() -> None:
    strikes = ((20.0, "power", 0, 4.0), (20.5, "network", 1, 8.0))
    scenario = play(node_strikes=strikes)
    check_served(scenario)
    assert scenario.nodes_used[-1] == BEFORE


@pytest.mark.parametrize(
    "seed", [3, *(pytest.param(i, marks=pytest.mark.long) for i in range(20, 40))]
)
def test_a_machine_is_drained_and_joins_again(seed: int) -> None:
    scenario = play(seed, max_restarts=0, node_strikes=((20.0, "drain", 0, 15.0),))
    check_served(scenario)
    assert scenario.drained == ["node-1"]
    # Its stages go to others, and it gets a stage again, behind those that are left.
    assert scenario.nodes_used == [
        BEFORE,
        ["local", "local", "node-2"],
        ["local", "local", "node-2", "node-1"],
    ]
    assert dict(scenario.supervisor.deaths.recoveries) == {"drained": 1, "joined": 1}


@pytest.mark.full
@pytest.mark.parametrize(
    "seed", [3, *(pytest.param(i, marks=pytest.mark.long) for i in range(20, 40))]
)
def test_a_spare_takes_the_stages_of_a_drained_machine(seed: int) -> None:
    strikes = ((20.0, "drain", 1, 500.0),)
    scenario = play(seed, num_spares=1, max_restarts=0, node_strikes=strikes)
    check_served(scenario)
    assert scenario.nodes_used == [BEFORE, [*BEFORE[:3], "spare-0"]]
    assert scenario.drained == ["node-2"]


@pytest.mark.full
def test_a_machine_that_is_lost_while_it_is_drained_is_not_awaited() -> None:
    strikes = ((20.0, "drain", 0, 500.0), (20.01, "power", 0, 500.0))
    scenario = play(node_strikes=strikes)
    check_served(scenario)
    assert scenario.nodes_used[-1] == ["local", "local", "node-2"]


@pytest.mark.full
def test_a_machine_is_not_drained_if_nobody_has_memory_for_its_layers() -> None:
    scenario = play(can_repartition=False, node_strikes=((20.0, "drain", 0, 5.0),))
    check_served(scenario)
    assert scenario.nodes_used == [BEFORE]
    assert scenario.drained == []


@further_runs(2)
@settings(max_examples=num_examples(3, 1500), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_faults=st.integers(0, 4),
    num_node_faults=st.integers(0, 6),
    num_nodes=st.integers(2, 4),
    num_spares=st.integers(0, 2),
    can_repartition=st.booleans(),
    has_bombs=st.booleans(),
)
def test_requests_outlive_every_machine_but_the_head(
    run: int,
    seed: int,
    num_faults: int,
    num_node_faults: int,
    num_nodes: int,
    num_spares: int,
    can_repartition: bool,
    has_bombs: bool,
) -> None:
    limits = NodeLimits(
        num_faults=num_faults,
        num_node_faults=num_node_faults,
        num_nodes=num_nodes,
        num_spares=num_spares,
        can_repartition=can_repartition,
        has_bombs=has_bombs,
    )
    NodeScenario(seed, limits).play()


@pytest.mark.full
def test_the_same_seed_is_the_same_life() -> None:
    first, second = (
        NodeScenario(11, NodeLimits(num_nodes=3, num_spares=1, num_faults=3, num_node_faults=4))
        for _ in range(2)
    )
    first.play()
    second.play()
    assert first.faults == second.faults
    assert first.loop.num_events == second.loop.num_events
    assert [r.tokens for r in first.readers] == [r.tokens for r in second.readers]
