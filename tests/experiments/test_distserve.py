"""DistServe's evaluation: goodput of separated engines, Algorithm 1, and the page."""

from dataclasses import replace
from math import isinf

import pytest

from experiments.base import ExperimentOptions
from experiments.claims import ClaimVerdict
from experiments.distserve import run
from experiments.distserve_claims import gain_claims
from experiments.distserve_decode import decode_points
from experiments.distserve_queue import (
    ENGINES,
    QueueTask,
    closed_form,
    simulated_mean,
    stage_seconds,
)
from experiments.distserve_search import place_for_rate
from experiments.distserve_seeds import measure_seeds, seeds_table
from experiments.distserve_study import WorkloadResult, least_scale
from experiments.distserve_workloads import MOTIVATION, MOTIVATION_SLO, WORKLOADS
from gllm.options.slo import TARGET_ATTAINMENT, Slo
from gllm.plan.goodput.engines import DISTSERVE_COSTS
from gllm.plan.goodput.placement import PhaseGoodput
from gllm.plan.goodput.systems import (
    PARTS,
    PHASE_TARGET,
    GoodputTask,
    Outcome,
    System,
    measure_goodput,
    run_phase,
    run_system,
)
from gllm.plan.layout import Parallelism

FIXED = "fixed:512,64"
OPTIONS = ExperimentOptions(requests=8, quick=True, progress=False, jobs=1)


NUM_REQUESTS = 100
COLOCATED_LIMIT = 3.5
"""Requests per second per GPU above the goodput of colocated engines with the same coefficients."""


def attains(name: str, rate_per_gpu: float) -> bool:
    """Return True if a system of the paper's Figure 1 has a goodput of at least a rate per GPU."""
    system = MOTIVATION[name]
    outcome = run_system(system, FIXED, rate_per_gpu * system.num_gpus, 2 * NUM_REQUESTS)
    return outcome.attainment(*MOTIVATION_SLO) >= TARGET_ATTAINMENT


def test_two_prefills_and_a_decode_have_the_higher_goodput() -> None:
    """At least 1.4 times that of the same coefficients, and twice that of vLLM's."""
    assert attains("2P1D", 1.4 * COLOCATED_LIMIT)
    assert not attains("colocated", COLOCATED_LIMIT)
    assert not attains("vLLM", 1.4 * COLOCATED_LIMIT / 2)


def test_as_many_engines_as_a_rate_needs_attain_both_limits() -> None:
    """Algorithm 1: phases that attain 95 % each attain 90 % together."""
    engine = Parallelism(1)
    phases = {"prefill": PhaseGoodput(engine, 5.5), "decode": PhaseGoodput(engine, 12.0)}
    for phase, goodput in phases.items():
        system = System("phase", "opt-13b", DISTSERVE_COSTS, engine)
        outcome = run_phase(system, phase, FIXED, goodput.rate, NUM_REQUESTS)
        assert outcome.attainment(*MOTIVATION_SLO) >= PHASE_TARGET
    rate = 15.0
    sized = place_for_rate("opt-13b", rate, phases["prefill"], phases["decode"])
    assert (sized.num_prefill, sized.num_decode) == (3, 2)
    outcome = run_system(sized, FIXED, rate, NUM_REQUESTS)
    assert outcome.attainment(*MOTIVATION_SLO) >= TARGET_ATTAINMENT


def test_parts_add_up_to_the_latency() -> None:
    outcome = run_system(WORKLOADS[0].distserve, FIXED, 2.0, 20)
    assert len(outcome.parts) == len(PARTS)
    assert all(part >= 0 for part in outcome.parts)
    mean_latency = sum(
        first + 63 * each for first, each in zip(outcome.ttft, outcome.tpot, strict=True)
    ) / len(outcome.ttft)
    assert sum(outcome.parts) == pytest.approx(mean_latency)
    assert run_system(WORKLOADS[0].distserve, FIXED, 2.0, 20) == outcome


def test_a_decode_engine_that_is_full_delays_second_tokens() -> None:
    engine = System("phase", "opt-66b", DISTSERVE_COSTS, Parallelism(2))
    few, many = (run_phase(engine, "decode", FIXED, rate, 40) for rate in (0.05, 20.0))
    assert max(few.tpot) < 0.1
    assert max(many.tpot) > 2 * max(few.tpot)


def test_attainment_of_one_limit_or_both() -> None:
    outcome = Outcome((0.1, 0.3, 0.1), (0.05, 0.05, 0.2))
    assert outcome.attainment(0.2, 0.1) == pytest.approx(1 / 3)
    assert outcome.attainment(0.2, None) == outcome.attainment(None, 0.1) == pytest.approx(2 / 3)
    assert outcome.attainment(0.2, 0.1, scale=2) == 1
    assert least_scale(outcome, 0.2, 0.1, 1.0) == pytest.approx(2)
    assert least_scale(outcome, 0.2, 0.1, 0.6) == pytest.approx(1.5)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_prefill_engines_are_the_queues_of_the_closed_form(engine: Parallelism) -> None:
    rate = 0.5 / stage_seconds(engine)
    simulated = simulated_mean(QueueTask(engine, rate, 1000))
    assert simulated == pytest.approx(closed_form(engine, rate), rel=0.1)


def test_ranks_shorten_a_decode_step_and_stages_raise_the_throughput() -> None:
    points = {point.engine: point for point in decode_points()}
    one, two, four = (points[Parallelism(tp)] for tp in (1, 2, 4))
    assert four.step_seconds < two.step_seconds < one.step_seconds
    assert one.step_seconds / two.step_seconds < 2
    assert two.step_seconds / four.step_seconds < one.step_seconds / two.step_seconds
    for stages in (2, 4):
        many = points[Parallelism(1, stages)]
        assert 0.75 * stages < many.tokens_per_second / one.tokens_per_second < stages


def test_a_system_counts_its_devices() -> None:
    system = replace(WORKLOADS[1].distserve, num_prefill=2)
    assert system.num_gpus == 2 * 4 + 4
    assert system.placement == "2 x TP 4 PP 1, TP 2 PP 2"


@pytest.mark.long
def test_the_quick_page_has_its_tables_and_claims() -> None:
    result = run(OPTIONS)
    assert "## Breakdown of latency" in result.text
    assert any(claim.ours is None or isinf(claim.ours) for claim in result.claims)
    assert set(result.plots) == {"distserve.svg"}


def test_a_baseline_that_attains_nothing_is_judged() -> None:
    result = WorkloadResult(WORKLOADS[0])
    result.add_goodput(replace(result.workload.distserve, name="DistServe"), 6.75)
    result.add_goodput(replace(result.workload.distserve, name="vLLM"), 0.0)
    goodput, limits = gain_claims(result)
    assert goodput.verdict == ClaimVerdict(True, False, False)
    assert goodput.shown == "inf x (vLLM attains it at no rate)"
    assert limits.verdict == ClaimVerdict(), "no outcome has been added"
    result.goodputs["DistServe"] = 0.0
    assert gain_claims(result)[0].verdict == ClaimVerdict()


@pytest.mark.full
def test_goodputs_by_seed_are_those_of_searches_with_these_seeds() -> None:
    workload = WORKLOADS[0]
    result = WorkloadResult(workload)
    result.add_goodput(workload.distserve, 1.0)
    by_seed = measure_seeds(result, OPTIONS, ("DistServe",), range(3))
    limits = workload.ttft, workload.tpot
    task = GoodputTask(workload.distserve, workload.lengths, Slo(*limits), OPTIONS.requests, seed=2)
    assert by_seed["DistServe"][2] == measure_goodput(task) / workload.distserve.num_gpus
    assert len(set(by_seed["DistServe"])) > 1
    assert "| 1.00 to 1.00 " in seeds_table(result, by_seed)
