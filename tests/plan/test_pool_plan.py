"""Planner of prompt and token pools: exhaustive optima, binding SLOs, layout, command."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.commands.plan.command import main
from gllm.commands.plan.pools import report_search
from gllm.plan.attainment import Attainment, AttainmentTest, AttainmentVerdict
from gllm.plan.best_first import SearchBudget
from gllm.plan.engine_checks import check_engines
from gllm.plan.pools.clusters import (
    FIRST_SECONDS,
    MAX_REQUESTS,
    MAX_SECONDS,
    MIN_REQUESTS,
    MODEL,
    RATE_STEP,
    ClusterPoint,
    PointVerdict,
    SampleSize,
    build_machine,
    fluid_rate,
    fluid_rates,
    judge_point,
    simulate_point,
)
from gllm.plan.pools.design_search import BUDGETS, MAX_DOUBLINGS, maximal_designs
from gllm.plan.pools.planner import (
    MIN_BORDER,
    POLICY,
    THROUGHPUT,
    PoolPlan,
    PoolSearch,
    best_plan,
    lay_out_pools,
    max_machine_counts,
)
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import PlanError, check_plan, read_plan
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.capacity import SearchEndedError
from gllm.sim.hardware.machines import ClusterDesign, machine_pair, read_machine_types
from gllm.sim.metrics.slowdowns import SloMargin
from tests.plan.test_limited_capacity import TickingClock
from tests.support.examples import num_examples

PAIR = machine_pair("HA")
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

    def __call__(
        self, point: ClusterPoint, check: Callable[[], None] | None = None
    ) -> PointVerdict:
        """Return the verdict by one slowdown beside its limit."""
        margin = SloMargin("tbt", 90, point.rate / self.throughput(point.design), 1.0)
        return PointVerdict(margin.is_met, margin)


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
    # Rates above the closed form of the real machines are not simulated.
    prompt, token = map(min, slos.rates, fluid_rates(pair, "code", MODEL))
    best = max(
        min(each.num_prompt * prompt, each.num_token * token)
        for each in maximal_designs(pair, "power", problem.bounds["power"])
    )
    # Rates are searched in steps, so that neighbours may be equal; a fifth has few splits.
    steps = 2 if scale == 1 else 4
    assert best / RATE_STEP**steps <= plan.rate <= best * (1 + 1e-9)


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
        assert plan.num_points <= 8 + 3


def test_a_spent_budget_leaves_the_best_cluster_so_far() -> None:
    problem = make_problem("code", bounds={"machines": 20})
    slos = FluidSlos(1.0, 1.0)
    plan = PoolSearch(problem, SearchBudget(max_evaluations=10), slos).plan("HH")
    assert plan is not None
    assert not plan.is_complete
    assert plan.rate <= slos.throughput(plan.cluster)
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


def test_the_report_names_every_design_and_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    problem = make_problem("code", bounds={"cost": 4.0}, max_request_tokens=2048)
    search = PoolSearch(problem, SearchBudget(), FluidSlos(1.0, 4.0))
    plan = report_search(search, ["AA", "HH"])
    text = capsys.readouterr().out
    assert str(plan.cluster) in text
    assert "HH: a cost budget of 4: choose a budget" in text
    assert "bound: no cluster of these designs serves more than" in text
    assert " of 2000 requests were cut" in text
    problem = replace(problem, max_request_tokens=None, objective="cost", bounds={}, rate=2.0)
    report_search(PoolSearch(problem, SearchBudget(), FluidSlos(1.0, 4.0)), ["AA"])
    assert "no plan can be written: cut them" in capsys.readouterr().out


def test_engines_accept_the_requests_they_were_planned_for() -> None:
    plan = PoolPlan("HA", ClusterDesign(*PAIR, 1, 1), 7.0, 4, True)
    with pytest.raises(PlanError, match=r"context of bloom-176b is 2048.*cut the requests"):
        check_engines(lay_out_pools(plan, make_problem("code")))
    serving = check_engines(lay_out_pools(plan, make_problem("code", max_request_tokens=2000)))
    assert "max-model-len" not in serving.engines["prefill-0"].flags


def test_cut_requests_are_those_that_are_judged() -> None:
    point = ClusterPoint(ClusterDesign(*PAIR, 1, 1), "code", 2.0, SampleSize(8))
    cut = replace(point, max_request_tokens=600)
    assert max(job.num_prompt_tokens + job.num_output_tokens for job in cut.jobs(100)) == 600
    assert cut.jobs(100)[:8] == cut.jobs(8)
    assert simulate_point(cut).busy_seconds < simulate_point(point).busy_seconds
    assert fluid_rate(cut.design, "code", MODEL, 600) > 2 * fluid_rate(cut.design, "code", MODEL)
    bound = PoolSearch(make_problem("code", bounds={"cost": 9.0}), SearchBudget()).bound(PAIR)
    problem = make_problem("code", bounds={"cost": 9.0}, max_request_tokens=600)
    assert PoolSearch(problem, SearchBudget()).bound(PAIR) > bound


@pytest.mark.full
def test_the_command_writes_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    flags = ["--designs", "HH", "--workload", "code", "--max-request-tokens", "2048"]
    limit = ["--max-machines", "2"]
    assert main(["pools", *flags, *limit, "--output", str(path)]) == 0
    plan = read_plan(path)
    assert [engine.role for engine in plan.engines.values()] == ["prefill", "decode"]
    assert plan.router is not None
    assert plan.router.preset == "splitwise"
    text = capsys.readouterr().out
    assert "1P/1T" in text
    assert not plan.simulated_only


def test_flags_that_do_not_fit_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    flags, limit = ["--designs", "HH", "--workload", "code"], ["--max-machines", "2"]
    for wrong in ([], ["--rate", "3"], [*limit, "--objective", "cost"]):
        assert main(["pools", *flags, *wrong]) == 2
    assert main(["pools", *flags, *limit, "--designs", "XY"]) == 2
    assert main(["pools", *flags, "--max-machines", "1"]) == 1
    assert "choose a budget" in capsys.readouterr().err


def test_the_slo_that_binds_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    # Decodes of BLOOM-176B on H100s keep no limit of a DGX-A100 if requests arrive all at once.
    search = PoolSearch(
        make_problem("code", bounds={"machines": 2}),
        SearchBudget(),
        lambda point, check: PointVerdict(False, SloMargin("ttft", 99, 9.0, 6.0)),
    )
    assert search.plan("HH") is None
    (margin,) = search.worst.values()
    assert (margin.metric, margin.percent) == ("ttft", 99)


@pytest.mark.parametrize("name", ["AA", "HA"])
def test_a_fraction_of_the_size_does_not_make_the_cluster_larger(name: str) -> None:
    """At a fifth of the rate, each pool needs at least one machine, and five are a fifth of 21."""
    slos = FluidSlos(4.0, 2.0)
    problem = make_problem("conversation", objective="cost", rate=21.0)
    plans = [PoolSearch(problem, SearchBudget(), slos, scale).plan(name) for scale in (1, 5)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].cluster == plans[1].cluster
    assert plans[0].bound is not None
    assert plans[0].bound <= plans[0].cluster.cost


def test_the_first_cluster_is_close_to_the_best() -> None:
    """A search that ends early has a cluster that is little larger than needed."""
    rates = fluid_rates(PAIR, "conversation", MODEL)
    slos, clusters = FluidSlos(0.8 * rates[0], 0.9 * rates[1]), []
    problem = make_problem("conversation", objective="machines", rate=50.0)
    search = PoolSearch(
        problem, SearchBudget(), slos, on_best=lambda plan: clusters.append(plan.cluster)
    )
    assert search.plan("HA") is not None
    assert clusters[0].num_machines <= 1.15 * clusters[-1].num_machines
    search = PoolSearch(problem, SearchBudget(max_evaluations=3), slos)
    plan = search.plan("HA")
    assert plan is not None
    assert plan.cluster == clusters[0]


def test_one_refused_design_refuses_no_other() -> None:
    slos = FluidSlos(4.0, 2.0)
    search = PoolSearch(make_problem("code", bounds={"cost": 4.0}), SearchBudget(), slos)
    plans = search.plan_all(["AA", "HH"])
    assert [plan.name for plan in plans] == ["AA"]
    assert "cost budget of 4" in search.refused["HH"]
    search = PoolSearch(
        make_problem("code", bounds={"cost": 9.0}), SearchBudget(max_evaluations=3), slos
    )
    plans = search.plan_all(["AA", "HH", "HA"])
    assert [plan.is_complete for plan in plans] == [False]
    assert sum("not tried" in reason for reason in search.refused.values()) == 2


def test_small_clusters_of_all_designs_come_before_large_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A budget that ends in between leaves a plan of each design, and says what it is worth."""
    slos, points = FluidSlos(1.0, 2.0), []

    def judge(point: ClusterPoint, check: Callable[[], None] | None = None) -> PointVerdict:
        points.append((point.design.prompt.name, point.rate))
        return slos(point)

    problem = make_problem("conversation", objective="cost", rate=20.0)
    whole = PoolSearch(problem, SearchBudget(), judge, 5)
    (best, *_) = sorted(whole.plan_all(["AA", "HH"]), key=lambda plan: plan.cluster.cost)
    assert [plan.scale for plan in whole.plan_all(["AA", "HH"])] == [1, 1]
    num_small = points.index((best.cluster.prompt.name, 20.0))
    assert set(points[:num_small]) == {("DGX-A100", 4.0), ("DGX-H100", 4.0)}
    search = PoolSearch(problem, SearchBudget(max_evaluations=num_small), judge, 5)
    plans = search.plan_all(["AA", "HH"])
    assert [(plan.scale, plan.is_complete) for plan in plans] == [(5, False)] * 2
    report_search(PoolSearch(problem, SearchBudget(max_evaluations=num_small), judge, 5), ["AA"])
    assert "undecided" not in capsys.readouterr().out
    search = PoolSearch(problem, SearchBudget(max_evaluations=num_small), judge, 5)
    report_search(search, ["AA", "HH"])
    assert "was simulated at 1/5 of its size alone: raise --budget" in capsys.readouterr().out


def test_the_engines_of_the_plan_are_those_that_were_simulated() -> None:
    problem = make_problem("conversation", model="llama-2-70b")
    serving = lay_out_pools(PoolPlan("HA", ClusterDesign(*PAIR, 1, 1), 7.0, 4, True), problem)
    assert serving.router is not None
    for name, engine in serving.engines.items():
        config = SchedulerConfig(preset=serving.router.preset, **engine.scheduler)
        simulated = build_machine(PAIR[0], POLICY, model="llama-2-70b").scheduler
        emitted = config.resolve(1, simulated.num_blocks, engine.flags["max-model-len"])
        # Transfers are no part of the simulated machines.
        assert replace(emitted, preset=None, kv_push="off") == simulated, name


@pytest.mark.full
def test_a_claimed_rate_is_below_saturation_in_a_longer_run_with_another_seed() -> None:
    problem = make_problem("code", bounds={"machines": 2}, num_requests=300)
    plan = PoolSearch(problem, SearchBudget()).plan("HH")
    assert plan is not None
    assert plan.bound is not None
    assert plan.rate <= fluid_rate(plan.cluster, "code", MODEL) <= plan.bound
    size = SampleSize(2000)
    point = ClusterPoint(plan.cluster, "code", plan.rate, size, policy=POLICY, seed=7)
    verdict = judge_point(point)
    assert verdict.attainment is not None
    assert verdict.attainment.verdict is not AttainmentVerdict.OVERLOADED


@pytest.mark.parametrize(
    ("verdict", "words"), [(AttainmentVerdict.UNDECIDED, "\nundecided: AA"), ("met", "; met: ")]
)
def test_an_answer_whose_intervals_do_not_decide_says_so(
    verdict: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slos = FluidSlos(1.0, 1.0)

    def judge(point: ClusterPoint, check: Callable[[], None] | None = None) -> PointVerdict:
        attainment = Attainment(AttainmentVerdict(verdict), 0.995, 0.98, 1.0, 2000, goal=0.99)
        return slos(point)._replace(attainment=attainment)

    problem = make_problem("code", bounds={"cost": 4.0})
    report_search(PoolSearch(problem, SearchBudget(), judge), ["AA"])
    text = capsys.readouterr().out
    assert words in text
    assert ("undecided" in text) == (verdict == "undecided")


def test_a_run_lasts_until_a_cluster_is_full_whatever_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tests: list[tuple[int, int]] = []

    def record(test: AttainmentTest, simulate: object) -> Attainment:
        tests.append((test.min_requests, test.max_requests))
        raise SearchEndedError("the lengths are known")

    monkeypatch.setattr(AttainmentTest, "run", record)
    for rate in (0.5, 50.0):
        with pytest.raises(SearchEndedError):
            judge_point(ClusterPoint(ClusterDesign(*PAIR, 1, 1), "code", rate, SampleSize(8, 0.0)))
    assert tests == [(MIN_REQUESTS, MAX_REQUESTS), (50 * FIRST_SECONDS, 50 * MAX_SECONDS)]


def test_few_requests_do_not_decide() -> None:
    """Beyond saturation the percentiles of a short run may hold: a cluster fills slowly."""
    design = ClusterDesign(*machine_pair("HH"), 2, 1)
    rate = 1.05 * fluid_rate(design, "code", MODEL)
    verdict = judge_point(ClusterPoint(design, "code", rate, SampleSize(8, 0.0)))
    assert not verdict.is_served
    assert verdict.attainment is not None
    assert verdict.attainment.num_requests >= 500


def test_few_token_machines_do_not_bound_a_search_of_prompts() -> None:
    """Code has outputs so short that the closed form needs hardly one token machine."""
    prompt, token = max_machine_counts(machine_pair("HH"), 20.0, "code")
    assert token == MIN_BORDER <= prompt
    larger = max_machine_counts(machine_pair("HH"), 2000.0, "code")
    assert larger[0] > prompt
    assert larger[1] > token
