"""Planner of prompt and token pools: exhaustive optima, binding SLOs, layout, command."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.commands.plan.command import main
from gllm.plan.best_first import SearchBudget
from gllm.plan.pools.clusters import MODEL, RATE_STEP, ClusterPoint, fluid_rate
from gllm.plan.pools.design_search import BUDGETS, MAX_DOUBLINGS
from gllm.plan.pools.planner import (
    MIN_BORDER,
    THROUGHPUT,
    PoolPlan,
    PoolSearch,
    best_plan,
    lay_out_pools,
    max_machine_counts,
)
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import check_plan, read_plan
from gllm.sim.hardware.machines import ClusterDesign, machine_pair, read_machine_types
from gllm.sim.metrics.slowdowns import SloMargin
from tests.plan.test_limited_capacity import TickingClock
from tests.support.examples import num_examples

NAMES = st.sampled_from(("AA", "HH", "HA", "HHcap"))
H100_POWER = 40 * read_machine_types()["DGX-H100"].power
"""Power of the paper's forty machines, in DGX-A100s."""


def make_problem(workload: str, **fields: object) -> ServiceProblem:
    """Return the problem of the most throughput of the paper's model, some fields replaced."""
    problem = ServiceProblem(MODEL, workload, objective=THROUGHPUT, num_requests=8)
    return replace(problem, **fields)  # type: ignore[arg-type]


class FluidSlos:
    """Clusters whose pools serve rates in proportion to their machines."""

    def __init__(self, prompt_rate: float, token_rate: float) -> None:
        self.rates = prompt_rate, token_rate

    def throughput(self, design: ClusterDesign) -> float:
        """Return the highest rate of a cluster."""
        return min(design.num_prompt * self.rates[0], design.num_token * self.rates[1])

    def __call__(self, point: ClusterPoint) -> list[SloMargin]:
        """Return one slowdown beside its limit."""
        return [SloMargin("tbt", 90, point.rate / self.throughput(point.design), 1.0)]


@given(NAMES, st.floats(1, 3), st.floats(1, 3), st.sampled_from((1, 5)))
@settings(max_examples=num_examples(8, 60), deadline=None)
def test_throughput_is_that_of_an_exhaustive_search(
    name: str, prompt_rate: float, token_rate: float, scale: int
) -> None:
    slos = FluidSlos(prompt_rate, token_rate)
    problem = make_problem("code", bounds={"power": 14.0 * scale})
    plan = PoolSearch(problem, SearchBudget(), slos, scale).plan(name)
    assert plan is not None
    assert plan.is_complete
    assert plan.cluster.power <= problem.bounds["power"] + 1e-9
    pair = machine_pair(name)
    grid = [ClusterDesign(*pair, p, t) for p in range(1, 15) for t in range(1, 15)]
    best = max(slos.throughput(each) for each in grid if each.power <= 14.0 + 1e-9)
    # Rates are searched in steps, so that neighbours may be equal.
    assert best / RATE_STEP**2 <= plan.rate / scale <= best * (1 + 1e-9)


@given(NAMES, st.sampled_from(sorted(BUDGETS)), st.floats(0.5, 3), st.floats(0.5, 3))
@settings(max_examples=num_examples(15, 100), deadline=None)
def test_the_least_of_a_quantity_is_that_of_an_exhaustive_search(
    name: str, objective: str, prompt_rate: float, token_rate: float
) -> None:
    slos = FluidSlos(prompt_rate, token_rate)
    problem = make_problem("conversation", objective=objective, rate=6.0)
    plan = PoolSearch(problem, SearchBudget(), slos).plan(name)
    pair = machine_pair(name)

    def serves(cluster: ClusterDesign) -> bool:
        # Clusters that the closed form of the real machines refuses are not simulated.
        real = fluid_rate(cluster, problem.workload, problem.model)
        return min(slos.throughput(cluster), real) >= 6.0

    most = max_machine_counts(pair, 6.0, problem.workload, problem.model)
    for _ in range(MAX_DOUBLINGS):
        if not serves(ClusterDesign(*pair, *most)):
            most = 2 * most[0], 2 * most[1]
    grid = product(range(1, most[0] + 1), range(1, most[1] + 1))
    able = [each for counts in grid if serves(each := ClusterDesign(*pair, *counts))]
    if not able:
        assert plan is None
        return
    assert plan is not None
    assert slos.throughput(plan.cluster) >= 6.0
    least = min(BUDGETS[objective](each) for each in able)
    assert BUDGETS[objective](plan.cluster) == pytest.approx(least)


def test_forty_h100_and_seventy_a100_are_searched_at_a_fifth() -> None:
    slos = FluidSlos(1.0, 3.7)
    for name, machines in (("HH", 40), ("AA", 70)):
        problem = make_problem("code", bounds={"power": H100_POWER})
        plan = PoolSearch(problem, SearchBudget(), slos, scale=5).plan(name)
        assert plan is not None
        assert plan.cluster.num_machines == machines
        assert plan.num_points <= 8


def test_a_spent_budget_leaves_the_best_cluster_so_far() -> None:
    problem = make_problem("code", bounds={"machines": 20})
    slos = FluidSlos(1.0, 1.0)
    plan = PoolSearch(problem, SearchBudget(max_evaluations=2), slos).plan("HH")
    assert plan is not None
    assert (plan.num_points, plan.is_complete) == (2, False)
    assert PoolSearch(problem, SearchBudget(max_evaluations=0), slos).plan("HH") is None


@pytest.mark.parametrize(
    "fields", [{"bounds": {"machines": 20}}, {"objective": "cost", "rate": 60.0}]
)
def test_a_running_simulation_is_cut_off_at_the_budget(fields: dict[str, Any]) -> None:
    clock = TickingClock(1.0)
    search = PoolSearch(make_problem("code", **fields), SearchBudget(20.0, clock=clock))
    plan = search.plan("HH")
    assert plan is None or not plan.is_complete
    assert clock.now <= 20.0 + 5


def test_the_best_of_several_designs() -> None:
    machines = {name: ClusterDesign(*machine_pair(name), 2, 1) for name in ("AA", "HH")}
    plans = [PoolPlan("AA", machines["AA"], 3.0, 1, True)]
    plans.append(PoolPlan("HH", machines["HH"], 5.0, 1, True))
    assert best_plan(plans, THROUGHPUT).name == "HH"
    assert best_plan(plans, "cost").name == "AA"


def test_every_machine_is_a_node_with_one_engine() -> None:
    problem = make_problem("conversation", model="llama-2-70b")
    plan = PoolPlan("HA", ClusterDesign(*machine_pair("HA"), 3, 2), 7.0, 4, True)
    serving = lay_out_pools(plan, problem)
    check_plan(serving)
    roles = [engine.role for engine in serving.engines.values()]
    assert roles == ["prefill"] * 3 + ["decode"] * 2
    assert serving.nodes["prefill-0"].devices == ["H100"] * 8
    assert serving.nodes["decode-1"].devices == ["A100-80G"] * 8
    assert all(engine.num_devices == 8 for engine in serving.engines.values())


def test_the_command_writes_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    flags = ["--designs", "HH", "--workload", "code", "--requests", "8", "--seconds", "0"]
    limit = ["--max-machines", "2"]
    assert main(["pools", *flags, *limit, "--output", str(path)]) == 0
    plan = read_plan(path)
    assert [engine.role for engine in plan.engines.values()] == ["prefill", "decode"]
    assert plan.router is not None
    assert plan.router.preset == "splitwise"
    text = capsys.readouterr().out
    assert "1P/1T" in text
    assert f"simulated only: {plan.simulated_only}" in text
    assert "the stages are on GPUs" in plan.simulated_only
    for wrong in ([], ["--rate", "3"], [*limit, "--objective", "cost"]):
        assert main(["pools", *flags, *wrong]) == 2
    assert main(["pools", *flags, *limit, "--designs", "XY"]) == 2
    assert main(["pools", *flags, "--max-machines", "1"]) == 2
    assert "choose a budget" in capsys.readouterr().err


def test_the_slo_that_binds_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    # Decodes of BLOOM-176B on H100s keep no limit of a DGX-A100 if requests arrive all at once.
    search = PoolSearch(
        make_problem("code", bounds={"machines": 2}),
        SearchBudget(),
        lambda point: [SloMargin("ttft", 99, 9.0, 6.0)],
    )
    assert search.plan("HH") is None
    (margin,) = search.worst.values()
    assert (margin.metric, margin.percent) == ("ttft", 99)


def test_few_token_machines_do_not_bound_a_search_of_prompts() -> None:
    """Code has outputs so short that the closed form needs hardly one token machine."""
    prompt, token = max_machine_counts(machine_pair("HH"), 20.0, "code")
    assert token == MIN_BORDER <= prompt
    larger = max_machine_counts(machine_pair("HH"), 2000.0, "code")
    assert larger[0] > prompt
    assert larger[1] > token
