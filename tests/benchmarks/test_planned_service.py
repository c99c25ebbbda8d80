"""Benchmark of a planned service: merged profiles, medians over rounds, and the verdicts."""

from typing import Any

import pytest

from benchmarks.planned_service.limits import (
    check_attainment,
    choose_limits,
    shifted_attainments,
)
from benchmarks.planned_service.page import (
    ATTAINMENT,
    FACTORS,
    TPOT,
    TTFT,
    compare_rounds,
    format_difference,
    format_page,
)
from benchmarks.planned_service.planning import merge_profiles, policy_of, select_engines
from benchmarks.planned_service.rounds import measure_steady_rate
from gllm.observability.latency import RequestTimeline, slo_attainment
from gllm.plan.serving_plan import EnginePlan, NodePlan, RouterPlan, ServingPlan, StagePlan
from gllm.scheduler.config import SchedulerConfig
from tests.sim.test_fitted import profile

pytestmark = pytest.mark.full

EXPECTED = {"requests/s": 5.0, ATTAINMENT: 0.95, TTFT: 0.1, TPOT: 0.05}


def make_round(**measured: float | None) -> dict[str, Any]:
    """Return a round as expected but for the figures named by their first word in lower case."""
    figures = {
        name: {"expected": value, "measured": measured.get(name.split()[0].lower(), value)}
        for name, value in EXPECTED.items()
    }
    return {
        "figures": figures, "failed": 0, "client_cores": 0.1, "median_ttft_ms": 101.0,
        "median_tpot_ms": 51.0,
    }  # fmt: skip


def make_setup(*rounds: dict[str, Any], step_seconds: float = 0.05) -> dict[str, Any]:
    return {
        "setup": "minimum step time", "step_seconds": step_seconds, "num_engines": 2,
        "capacity": 7.0, "rate": 5.0, "limits": "ttft=0.1,tpot=0.04", "shifted": [0.7, 0.9],
        "command": "gllm plan search", "scaling": [3.5, 7.0],
        "rounds": list(rounds), "foreign_cores": 0.0,
    }  # fmt: skip


def test_figures_are_medians_over_rounds() -> None:
    rounds = [make_round(ttft=0.1), make_round(ttft=0.3), make_round(ttft=0.11, slo=0.85)]
    figures = {each.name: each for each in compare_rounds(rounds)}
    assert list(figures) == list(FACTORS)
    assert figures[TTFT].measured == 0.11
    assert figures[TTFT].difference == pytest.approx(0.1)
    assert figures[ATTAINMENT].difference == 0
    unknown = compare_rounds([make_round(tpot=None)])[-1]
    assert (unknown.measured, unknown.difference, unknown.is_within) == (None, None, False)


@pytest.mark.parametrize(
    ("measured", "text", "verdict"),
    [
        ({"slo": 0.91}, "-4.0 points", f"- {ATTAINMENT}: -4.0 points (at most 5 points: met)."),
        ({"slo": 0.89}, "-6.0 points", "(at most 5 points: **missed**)"),
        ({"ttft": 0.114}, "+14.0%", f"- {TTFT}: +14.0% (at most 15%: met)."),
        ({"tpot": 0.042}, "-16.0%", f"- {TPOT}: -16.0% (at most 15%: **missed**)."),
    ],
)
def test_a_figure_is_met_within_its_limit(
    measured: dict[str, float], text: str, verdict: str
) -> None:
    rounds = [make_round(**measured)]
    assert text in map(format_difference, compare_rounds(rounds))
    page = format_page([make_setup(*rounds)])
    assert verdict in page
    assert page.count("**missed**") == ("missed" in verdict)


def make_lines(ttfts: list[float], gap: float) -> list[RequestTimeline]:
    return [RequestTimeline(0.0, [ttft, ttft + gap], 2) for ttft in ttfts]


def test_the_limit_of_ttft_is_the_percentile_that_most_requests_keep() -> None:
    lines = [
        *make_lines([0.001 * index for index in range(1, 91)], 0.03),
        *make_lines([0.001 * index for index in range(91, 101)], 0.2),
    ]
    limits = choose_limits(lines, 0.1)
    assert limits.tpot_seconds == 0.1
    assert limits.ttft_seconds == pytest.approx(0.081, abs=0.001)
    attained = slo_attainment(lines, limits)
    assert 0.8 <= attained < 0.82
    longer, shorter = shifted_attainments(lines, limits)
    assert longer == pytest.approx(attained - 0.01)
    assert attained <= shorter <= attained + 0.01


def test_limits_that_say_nothing_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"attainment is 1\.0, but has to be 0\.6 to 0\.95"):
        choose_limits(make_lines([0.1] * 50, 0.03), 0.1)
    with pytest.raises(RuntimeError, match="attainment is None"):
        check_attainment(None)


def test_the_page_has_the_limits_and_what_they_depend_on() -> None:
    page = format_page([make_setup(make_round())])
    assert "from a simulation at this rate: ttft=0.1,tpot=0.04" in page
    assert "1% longer or shorter change the expected attainment to 70% or 90%" in page


def test_two_engines_have_to_serve_twice_as_much() -> None:
    setup = make_setup(make_round())
    assert "2.00 times as many (1.9 to 2.1: met)" in format_page([setup])
    setup["scaling"] = [3.5, 6.0]
    assert "1.71 times as many (1.9 to 2.1: **missed**)" in format_page([setup])


def test_full_speed_is_not_judged() -> None:
    page = format_page([make_setup(make_round(ttft=0.9), step_seconds=0.0)])
    assert "+800.0%" in page
    assert "missed" not in page


def test_a_merged_profile_has_the_steps_of_all() -> None:
    first, second = profile([8]), profile([8], 2.0)
    merged = merge_profiles([first, second])
    assert merged.steps == first.steps + second.steps
    assert len(merged.spans) == 2 * len(first.spans)
    assert merged.layers == [8]


def test_selected_engines_have_a_router_on_free_ports() -> None:
    engines = {name: EnginePlan([StagePlan("here", 6)]) for name in ("a", "b")}
    nodes = {"here": NodePlan("127.0.0.1")}
    router = RouterPlan("here", port=1, policy="predict")
    single = select_engines(ServingPlan("demo", nodes, engines, router=router), 1)
    assert list(single.engines) == ["a"]
    assert single.router is not None
    assert single.router.policy == "predict"
    assert single.router.port != router.port


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({"policy": "vllm"}, "vllm"),
        ({"policy": "sarathi", "max_num_batched_tokens": 512}, "sarathi:512"),
        ({}, SchedulerConfig().policy),
    ],
)
def test_the_second_search_keeps_the_policy(scheduler: dict[str, Any], expected: str) -> None:
    engine = EnginePlan([StagePlan("here", 6)], scheduler=scheduler)
    assert (
        policy_of(ServingPlan("demo", {"here": NodePlan("127.0.0.1")}, {"a": engine})) == expected
    )


def test_the_steady_rate_ends_with_the_start_of_the_last_request() -> None:
    # Tokens from 1 to 4 and from 2 to 5; those after the last start, at 4, do not count.
    rate = measure_steady_rate([0.0, 0.0, 4.0], [1.0, 2.0, 1.0], [[1.0] * 3] * 3)
    assert rate == pytest.approx((3 + 3) / 3)
