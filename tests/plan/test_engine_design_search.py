"""Searches for designs: the best of an exhaustive evaluation and Pareto sets (V13), objectives."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.commands.plan.search_report import pareto_set
from gllm.options.slo import parse_slo
from gllm.plan.best_first import SearchBudget
from gllm.plan.capacity import PLAN_RULES, JudgedSimulation
from gllm.plan.layout import Parallelism, place_engines
from gllm.plan.nodes import CORE, parse_nodes
from gllm.plan.prices import PRICE_TABLES
from gllm.plan.problem import ServiceProblem
from gllm.plan.search.designs import (
    DesignSpace,
    EngineDesign,
    parse_devices,
    parse_policies,
)
from gllm.plan.search.fleet import choose_fleet, forecast_closed, forecast_fleet
from gllm.plan.search.objectives import OBJECTIVES, TOO_LARGE, check_problem, max_engines
from gllm.plan.search.planner import LONG_PROMPT, LONG_STEP, DesignPlanner
from gllm.sim.capacity import CapacityRule, SearchEndedError
from gllm.sim.hardware.devices import LINKS
from gllm.sim.options import SimulationConfig
from tests.plan.test_limited_capacity import TickingClock
from tests.support.examples import num_examples

SHORT_RULE = replace(
    PLAN_RULES["vidur"], min_seconds=8.0, rate_step=1.05, max_p99_delay_seconds=0.5
)
PATIENT_RULE = replace(SHORT_RULE, max_p99_delay_seconds=5.0)
CONFIG = SimulationConfig(model="qwen2.5-32b", workload="fixed:3000,3", link="nvlink")
SPACE = DesignSpace(
    ("A100-80G", "H100"), (1, 2), (1, 2), parse_policies("vllm,sarathi:512,orca+"), (8,)
)


def make_planner(
    requests: int = 10,
    config: SimulationConfig = CONFIG,
    rule: CapacityRule = SHORT_RULE,
    **fields: object,
) -> DesignPlanner:
    """Return a search of at most 16 devices by QPS per dollar, with some fields replaced."""
    problem = ServiceProblem(
        config.model,
        config.workload,
        limits=parse_slo("ttft:p90=2,tbt:p99=1"),
        objective="qps-per-dollar",
        bounds={"devices": 16},
        prices=PRICE_TABLES["vidur"],
        num_requests=requests,
    )
    return DesignPlanner(replace(problem, **fields), config, rule)  # type: ignore[arg-type]


def compare_with_exhaustive(
    make: Callable[[], DesignPlanner], space: DesignSpace
) -> tuple[int, int]:
    """Return the numbers of designs that were simulated, by the search and exhaustively."""
    designs = list(space.designs(16))
    found = make().search(designs, SearchBudget())
    everything = make().search(designs, SearchBudget(), is_exhaustive=True)
    assert found.best
    assert everything.best
    assert len(everything.evaluated) == len(designs)
    assert found.best[1].score == everything.best[1].score
    assert found.best[0] == everything.best[0]
    return len(found.evaluated), len(everything.evaluated)


@pytest.mark.parametrize(
    ("objective", "rate"),
    [("qps-per-dollar", None), pytest.param("cost", 1.0, marks=pytest.mark.long)],
)
def test_the_search_finds_the_best_of_an_exhaustive_evaluation(
    objective: str, rate: float | None
) -> None:
    space = replace(SPACE, stages=(1,), policies=parse_policies("sarathi:512"))
    make = partial(make_planner, objective=objective, rate=rate)
    num_simulated, num_all = compare_with_exhaustive(make, space)
    assert num_all == 4
    assert num_simulated < num_all or rate is None


@pytest.mark.long
@pytest.mark.parametrize("objective", ["qps-per-dollar", "goodput-per-gpu", "cost", "power"])
def test_the_search_finds_the_best_of_24_designs(objective: str) -> None:
    """It is that of an exhaustive evaluation (V13)."""
    rate = 6.0 if OBJECTIVES[objective].needs_rate else None
    make = partial(make_planner, 100, objective=objective, rate=rate)
    assert compare_with_exhaustive(make, SPACE)[1] == 24


def test_makespan_of_an_offline_workload() -> None:
    planner = make_planner(64, objective="makespan", bounds={"devices": 4})
    cuts = Parallelism(1), Parallelism(1, 2), Parallelism(4)
    designs = [EngineDesign("H100", cut, "sarathi", 512, 32) for cut in cuts]
    outcome = planner.search(designs, SearchBudget(), is_exhaustive=True)
    engines = {design: result.num_engines for design, result in outcome.evaluated}
    assert [engines[design] for design in designs] == [4, 2, 1]
    assert outcome.best
    assert outcome.best[1].value == min(result.value for _, result in outcome.evaluated) > 0


def test_closed_forms_alone_are_near_the_simulation() -> None:
    rule = replace(PLAN_RULES["vidur"], min_seconds=30.0)
    planner = make_planner(60, rule=rule, limits=parse_slo(""))
    design = EngineDesign("H100", Parallelism(1, 1), "sarathi", 512, 32)
    simulated = planner.search([design], SearchBudget())
    estimated = planner.search([design], SearchBudget(), uses_closed_forms=True)
    assert simulated.best
    assert estimated.best
    assert estimated.best[1].capacity == pytest.approx(simulated.best[1].capacity, rel=0.35)


@pytest.mark.full
def test_engines_are_counted_for_a_rate() -> None:
    rule, limits = PATIENT_RULE, parse_slo("ttft=2")
    planner = make_planner(
        config=replace(CONFIG, workload="fixed:3000,1"),
        rule=rule,
        rate=4.5,
        objective="cost",
        bounds={"devices": 8},
        limits=limits,
    )
    design = EngineDesign("H100", Parallelism(1, 1), "vllm", None, 32)
    outcome = planner.search([design], SearchBudget())
    assert outcome.best
    best = outcome.best[1]
    # A prompt takes a third of a second.
    assert planner.min_engines(design) == best.num_engines == 2
    assert best.capacity == 4.5 / 2
    assert best.value == outcome.bound * -1 == 4.25 * 2
    judged = JudgedSimulation(design.configure(planner.config), rule, limits)
    assert not rule.is_sustained(judged(4.5))
    chosen, forecast = choose_fleet(planner, [best], "round-robin")
    assert chosen.num_engines == forecast.num_engines == 2
    assert forecast.is_within
    assert forecast.expected.rate == 4.5
    assert forecast.expected.capacity is None
    closed = forecast_closed(planner, planner.estimate(design))
    assert closed.expected.capacity is not None
    assert closed.expected.capacity >= 4.5


def test_hopeless_designs_are_named() -> None:
    design = EngineDesign("H100", Parallelism(1, 1), "sarathi", 512, 32)
    for text, reason in (("ttft:p90=0.001", LONG_PROMPT), ("tbt:p99=0.0001", LONG_STEP)):
        planner = make_planner(limits=parse_slo(text))
        assert planner.bound(design).reason == reason
    slow = make_planner(rate=1e6)
    assert "too slow" in slow.bound(design).reason


def test_a_model_that_fits_nowhere_names_the_binding_constraint() -> None:
    config = SimulationConfig(model="llama-2-70b", workload="fixed:100,10")
    designs = [EngineDesign("L20", Parallelism(ranks, 1), "sarathi", None, 8) for ranks in (1, 2)]
    planner = make_planner(config=config)
    with pytest.raises(ValueError, match=r"largest is 2 x L20.*69.0 on each device of stage 0"):
        planner.search(designs, SearchBudget())
    long = replace(config, workload="fixed:60000,2000", model="qwen2.5-32b")
    planner = make_planner(config=long)
    with pytest.raises(ValueError, match=r"KV cache has .* max_model_len 62000"):
        planner.search(
            [EngineDesign("A100-80G", Parallelism(1, 1), "sarathi", None, 8)], SearchBudget()
        )
    with pytest.raises(ValueError, match="no design is within --max-devices"):
        planner.search([], SearchBudget())


def test_objectives_need_their_facts() -> None:
    with pytest.raises(ValueError, match="--objective cost needs a rate"):
        check_problem(make_planner(objective="cost", devices=("H100",)).problem)
    with pytest.raises(ValueError, match="makespan has all requests at once"):
        check_problem(make_planner(objective="makespan", rate=1.0, devices=("H100",)).problem)
    with pytest.raises(ValueError, match="needs a price of L20: add --prices"):
        check_problem(make_planner(devices=("L20",)).problem)
    with pytest.raises(ValueError, match="power of a core"):
        check_problem(make_planner(objective="power", rate=1.0, devices=(CORE,)).problem)
    check_problem(
        make_planner(
            devices=(
                "H100",
                "A100-80G",
            )
        ).problem
    )


def test_scores_of_objectives() -> None:
    problem = ServiceProblem(
        "", "", rate=10.0, bounds={"devices": 8}, prices={"H100": 4.0}, num_requests=120
    )
    design = EngineDesign("H100", Parallelism(2), "vllm", None, 8)

    def score(name: str, capacity: float) -> float:
        return OBJECTIVES[name].score(capacity, problem, design)

    # Three engines of two devices serve the rate, whatever they could serve beyond it.
    assert score("qps-per-dollar", 4.0) == 10 / 24
    assert score("goodput-per-gpu", 4.0) == score("goodput-per-gpu", 3.5) == 10 / 6
    assert score("cost", 4.0) == -24.0
    assert score("power", 5.0) == -2800.0
    assert score("makespan", 4.0) == -7.5
    assert score("cost", 2.0) == -inf
    assert score("cost", 0.0) == score("cost", nan) == -inf


def test_without_a_rate_an_engine_is_worth_its_capacity() -> None:
    problem = ServiceProblem("", "", bounds={"devices": 8}, prices={"H100": 4.0})
    design = EngineDesign("H100", Parallelism(2), "vllm", None, 8)
    assert OBJECTIVES["qps-per-dollar"].score(4.0, problem, design) == 0.5
    assert OBJECTIVES["goodput-per-gpu"].score(4.0, problem, design) == 2.0


@pytest.mark.parametrize("objective", ["qps-per-dollar", "goodput-per-gpu", "cost", "power"])
def test_a_rate_is_served_by_the_cheapest_engines_on_every_objective(objective: str) -> None:
    """Four H100 have the higher throughput per dollar, but one request per second needs one."""
    planner = make_planner(rate=1.0, objective=objective, rule=PATIENT_RULE)
    designs = [EngineDesign("H100", Parallelism(tp), "sarathi", 512, 64) for tp in (4, 1)]
    outcome = planner.search(designs, SearchBudget(), uses_closed_forms=True)
    assert outcome.best
    assert outcome.best[0].num_devices == 1


def cheapest(rate: float, slo: str, max_devices: int = 16, is_simulated: bool = False) -> float:
    """Return the score of the best of few designs for a rate; -inf if none serves it."""
    planner = make_planner(
        config=replace(CONFIG, workload="fixed:3000,2"),
        rule=PATIENT_RULE,
        rate=rate,
        limits=parse_slo(slo),
        bounds={"devices": max_devices},
    )
    policies = "vllm" if is_simulated else "vllm,sarathi:512"
    space = replace(SPACE, policies=parse_policies(policies), stages=(1,))
    outcome = planner.search(
        list(space.designs(max_devices)), SearchBudget(), uses_closed_forms=not is_simulated
    )
    return outcome.best[1].score if outcome.best else -inf


@settings(max_examples=num_examples(8, 400), deadline=None)
@given(
    st.floats(0.5, 12),
    st.floats(1, 2),
    st.floats(0.4, 3),
    st.floats(0.08, 1),
    st.floats(1, 3),
    st.sampled_from([4, 16]),
)
def test_an_easier_problem_is_never_dearer(
    rate: float, less: float, ttft: float, tbt: float, looser: float, devices: int
) -> None:
    """A lower rate, looser limits and more hardware."""

    def slo(factor: float) -> str:
        return f"ttft:p90={ttft * factor},tbt:p99={tbt * factor}"

    hard = cheapest(rate, slo(1), devices)
    assert cheapest(rate, slo(looser), devices) >= hard
    assert cheapest(rate, slo(1), 2 * devices) >= hard
    # Price per request: the plan for the lower rate costs no more.
    assert rate / less / cheapest(rate / less, slo(1), devices) <= rate / hard * (1 + 1e-9) or (
        hard == -inf
    )


@pytest.mark.long
def test_a_looser_limit_is_never_dearer_when_simulated() -> None:
    scores = [cheapest(4.0, f"ttft={limit}", is_simulated=True) for limit in (0.5, 1.0, 4.0)]
    assert scores == sorted(scores)
    assert scores[-1] > -inf


@pytest.mark.parametrize(
    ("nodes", "network", "cut", "expected"),
    [
        ("a=x:2xA100-80G,b=y:4xH100", None, Parallelism(1), 2),
        ("a=x:3xA100-80G,b=y:3xA100-80G", None, Parallelism(2), 2),
        ("a=x:3xA100-80G,b=y:3xA100-80G", None, Parallelism(1, 2), 2),
        ("a=x:3xA100-80G,b=y:3xA100-80G", "network", Parallelism(1, 2), 3),
        ("a=x:3xA100-80G,b=y:3xA100-80G", "network", Parallelism(2, 3), 0),
        ("a=x:1xA100-80G,b=y:1xA100-80G", "network", Parallelism(2), 0),
        ("b=y:4xH100", None, Parallelism(1), 0),
    ],
)
def test_there_are_never_more_engines_than_the_nodes_hold(
    nodes: str, network: str | None, cut: Parallelism, expected: int
) -> None:
    cluster = replace(parse_nodes(nodes), network=LINKS[network] if network else None)
    planner = make_planner(cluster=cluster, devices=("A100-80G", "H100"))
    design = EngineDesign("A100-80G", cut, "sarathi", 512, 32)
    assert max_engines(planner.problem, design) == expected
    placed = place_engines(cluster, [(cut, [1] * cut.pp)] * expected, "A100-80G")
    assert len(placed) == expected
    # None shares an engine between nodes whose link is unknown.
    assert network or all(len({stage.devices[0] for stage in stages}) == 1 for stages in placed)
    if expected:
        assert planner.bound(design).reason == ""
    else:
        assert planner.bound(design).reason == TOO_LARGE


costs = st.lists(st.tuples(*[st.integers(0, 4).map(float)] * 3), max_size=12)


@settings(max_examples=num_examples(60, 2000), deadline=None)
@given(costs)
def test_the_pareto_set_is_that_of_all_pairs(items: list[tuple[float, ...]]) -> None:
    """It is what the search prints (V13)."""
    front = pareto_set(items, lambda item: item)

    def dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    expected = {b for b in items if not any(dominates(a, b) for a in items)}
    assert set(front) == expected
    assert len(front) == len(expected)
    assert front == sorted(front)


def test_the_space_is_the_product_of_its_values() -> None:
    designs = list(SPACE.designs(2))
    cuts = {(1, 1), (1, 2), (2, 1)}
    assert {(design.parallelism.pp, design.parallelism.tp) for design in designs} == cuts
    assert len(designs) == len(set(designs)) == 2 * 3 * 3
    assert all(design.num_devices <= 2 for design in designs)
    assert len({str(design) for design in designs}) == len(designs)
    assert sum(a * b <= 2 for a, b in product((1, 2), repeat=2)) == 3


def test_wrong_names_are_refused() -> None:
    for text in ("vlm", "sarathi:0", "sarathi:x", ""):
        with pytest.raises(ValueError, match="--policies"):
            parse_policies(text)
    with pytest.raises(ValueError, match="--devices H1000"):
        parse_devices("H1000")
    assert parse_policies("vllm, orca+:64") == (("vllm", None), ("orca+", 64))


@pytest.mark.parametrize("objective", ["qps-per-dollar", "makespan"])
def test_a_search_ends_within_its_budget_while_a_design_is_simulated(objective: str) -> None:
    """One simulation takes longer than the budget; the clock is read within simulations."""
    rule = replace(SHORT_RULE, usual_requests=2000)
    planner = make_planner(requests=2000, rule=rule, objective=objective)
    clock = TickingClock(1.0)
    budget = SearchBudget(40.0, clock=clock, reserve=0.2)
    num_ticks = 0

    def on_tick() -> None:
        nonlocal num_ticks
        num_ticks += 1

    outcome = planner.search(list(SPACE.designs(16)), budget, on_tick=on_tick)
    assert clock.now <= 1.1 * 40.0
    assert outcome.left_out["the budget of 40 s is spent"]
    assert num_ticks or objective == "makespan"
    best = outcome.best[1] if outcome.best else planner.estimate(next(SPACE.designs(16)))
    with pytest.raises(SearchEndedError):
        forecast_fleet(planner, best, "least-requests", budget.final_deadline)
    assert clock.now <= 1.2 * 40.0
