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
from gllm.plan.capacity import PLAN_RULES
from gllm.plan.layout import Parallelism
from gllm.plan.nodes import CORE
from gllm.plan.prices import PRICE_TABLES
from gllm.plan.problem import ServiceProblem
from gllm.plan.search.designs import (
    DesignSpace,
    EngineDesign,
    parse_devices,
    parse_policies,
)
from gllm.plan.search.objectives import OBJECTIVES, check_problem
from gllm.plan.search.planner import (
    LONG_PROMPT,
    LONG_STEP,
    DesignPlanner,
    forecast_closed,
    forecast_fleet,
)
from gllm.sim.capacity import CapacityRule, SearchEndedError
from gllm.sim.options import SimulationConfig
from tests.plan.test_limited_capacity import TickingClock
from tests.support.examples import num_examples

SHORT_RULE = replace(
    PLAN_RULES["vidur"], min_seconds=8.0, rate_step=1.05, max_p99_delay_seconds=0.5
)
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
    [("qps-per-dollar", None), pytest.param("cost", 1.0, marks=pytest.mark.full)],
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


def test_engines_are_counted_for_a_rate() -> None:
    planner = make_planner(rate=12.0, objective="cost", bounds={"devices": 8})
    outcome = planner.search(
        [EngineDesign("H100", Parallelism(1, 1), "sarathi", 512, 32)], SearchBudget()
    )
    assert outcome.best
    best = outcome.best[1]
    assert best.num_engines == -(-12 // best.capacity)
    assert best.value == 4.25 * best.num_engines
    forecast = forecast_fleet(planner, best, "round-robin")
    assert forecast.num_engines >= best.num_engines
    assert forecast.is_within
    assert forecast.expected.rate == 12
    closed = forecast_closed(planner, best)
    assert closed.expected.capacity == best.num_engines * best.capacity


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

    assert score("qps-per-dollar", 4.0) == 0.5
    assert score("goodput-per-gpu", 4.0) == 2.0
    assert score("cost", 4.0) == -24.0
    assert score("power", 5.0) == -2800.0
    assert score("makespan", 3.0) == -10.0
    assert score("cost", 2.0) == -inf
    assert score("cost", 0.0) == score("cost", nan) == -inf


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
