"""Searches for clusters against exhaustive ones, and the check of nine SLOs."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.observability.latency import RequestTimeline
from gllm.plan.pools.design_search import (
    BUDGETS,
    choose_cheapest,
    find_cheapest_cluster,
    find_smallest_clusters,
    maximal_designs,
    maximize_throughput,
)
from gllm.sim.hardware.machines import (
    ClusterDesign,
    count_affordable,
    machine_pair,
    read_machine_types,
)
from gllm.sim.metrics.slowdowns import (
    SPLITWISE_SLOS,
    RequestLatencies,
    check_slos,
    measure_latencies,
    worst_margin,
)

PAIRS = ("AA", "HH", "HA", "HHcap")


def throughput(prompt_rate: float, token_rate: float) -> Callable[[ClusterDesign], float]:
    """Return the throughput of clusters whose machines serve these rates in their phase."""
    return lambda design: min(design.num_prompt * prompt_rate, design.num_token * token_rate)


def test_forty_h100_admit_seventy_a100_at_the_same_power() -> None:
    machines = read_machine_types()
    budget = 40 * machines["DGX-H100"].power
    assert count_affordable(budget, machines["DGX-A100"].power) == 70
    sizes = {design.num_machines for design in maximal_designs(machine_pair("AA"), "power", budget)}
    assert sizes == {70}
    sizes = {design.num_machines for design in maximal_designs(machine_pair("HH"), "power", budget)}
    assert sizes == {40}


@given(
    st.sampled_from(PAIRS),
    st.sampled_from(sorted(BUDGETS)),
    st.floats(6, 24),
    st.floats(0.3, 5),
    st.floats(0.3, 5),
)
def test_the_throughput_is_that_of_an_exhaustive_search(
    name: str, constraint: str, budget: float, prompt_rate: float, token_rate: float
) -> None:
    pair, evaluate = machine_pair(name), throughput(prompt_rate, token_rate)
    result = maximize_throughput(pair, constraint, budget, evaluate)
    unit = BUDGETS[constraint]
    grid = [
        ClusterDesign(*pair, num_prompt, num_token)
        for num_prompt in range(1, 26)
        for num_token in range(1, 26)
    ]
    admitted = [design for design in grid if unit(design) <= budget + 1e-9]
    assert unit(result.design) <= budget + 1e-9
    assert result.value == evaluate(result.design) == max(map(evaluate, admitted))


@given(
    st.sampled_from(PAIRS),
    st.sampled_from(sorted(BUDGETS)),
    st.floats(0.3, 5),
    st.floats(0.3, 5),
    st.floats(1, 40),
)
def test_the_price_of_a_throughput_is_that_of_an_exhaustive_search(
    name: str, objective: str, prompt_rate: float, token_rate: float, rate: float
) -> None:
    pair, evaluate, limit = machine_pair(name), throughput(prompt_rate, token_rate), (30, 30)
    grid = [ClusterDesign(*pair, p, t) for p in range(1, 31) for t in range(1, 31)]
    able = [design for design in grid if evaluate(design) >= rate]

    def serves(design: ClusterDesign) -> bool:
        return evaluate(design) >= rate

    if not able:
        with pytest.raises(ValueError, match="raise the limit"):
            find_smallest_clusters(pair, serves, limit, num_doublings=0)
        return
    border, num_evaluations = find_smallest_clusters(pair, serves, limit, num_doublings=0)
    cheapest = choose_cheapest(border, objective)
    assert serves(cheapest)
    assert BUDGETS[objective](cheapest) == pytest.approx(min(map(BUDGETS[objective], able)))
    assert num_evaluations <= sum(limit)


@given(
    st.sampled_from(PAIRS),
    st.sampled_from(sorted(BUDGETS)),
    st.floats(0.3, 5),
    st.floats(0.3, 5),
    st.floats(1, 40),
    st.integers(0, 12),
    st.booleans(),
)
def test_the_cheapest_cluster_is_that_of_an_exhaustive_search(
    name: str,
    objective: str,
    prompt_rate: float,
    token_rate: float,
    rate: float,
    spare: int,
    has_start: bool,
) -> None:
    """Clusters need spare machines of either kind in addition to those of the load."""
    pair, evaluate, calls = machine_pair(name), throughput(prompt_rate, token_rate), []

    def serves(design: ClusterDesign) -> bool:
        calls.append(design)
        more = design.num_machines - rate / prompt_rate - rate / token_rate
        return evaluate(design) >= rate and more >= spare

    grid = [ClusterDesign(*pair, p, t) for p in range(1, 31) for t in range(1, 31)]
    able = [design for design in grid if serves(design)]
    prompt, token = (max(1, math.ceil(rate / each - 1e-9)) for each in (prompt_rate, token_rate))
    calls.clear()
    start = able[-1] if able and has_start else None
    found = find_cheapest_cluster(pair, serves, objective, (prompt, token), (30, 30), start)
    if not able:
        assert found is None
        return
    assert found is not None
    cheapest = min(map(BUDGETS[objective], able))
    assert BUDGETS[objective](found) == pytest.approx(cheapest)
    assert len(calls) <= 60


def test_a_limit_that_is_too_low_is_doubled() -> None:
    pair, evaluate = machine_pair("AA"), throughput(1.0, 1.0)
    border, num_evaluations = find_smallest_clusters(
        pair, lambda design: evaluate(design) >= 11, (3, 3)
    )
    assert [tuple(design[2:]) for design in border] == [(12, 11), (11, 11)]
    assert num_evaluations <= 12 + 12 + 3
    with pytest.raises(ValueError, match="12 prompt and 12 token machines do not serve"):
        find_smallest_clusters(pair, lambda design: evaluate(design) >= 13, (3, 3))


def test_a_search_of_seventy_machines_makes_few_evaluations() -> None:
    result = maximize_throughput(machine_pair("AA"), "power", 70, throughput(1.0, 3.7))
    assert result.design[2:] == (55, 15)
    assert result.num_evaluations <= 10


def test_a_budget_for_one_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"power budget of 1\.5"):
        maximize_throughput(machine_pair("HH"), "power", 1.5, throughput(1, 1))


ALONE = RequestLatencies(0.1, 0.02, 2.0)


def slowed(ttft: float, tbt: float, e2e: float) -> RequestLatencies:
    """Return latencies that are slower than the reference by factors."""
    return RequestLatencies(ALONE.ttft * ttft, 0.02 * tbt, ALONE.e2e * e2e)


@pytest.mark.parametrize("metric", range(3))
@pytest.mark.parametrize("percentile", range(3))
def test_one_percentile_above_its_limit_fails(metric: int, percentile: int) -> None:
    """Each of the nine limits, and only it, is exceeded by a set of requests of its own."""
    limits = [each.limit for each in SPLITWISE_SLOS][3 * metric : 3 * metric + 3]
    # 100 requests: up to the percentile all are at the limit below, from there on at its own.
    counts = (60, 35, 5)
    factors = [1.0, 1.0, 1.0]
    factors[percentile] = limits[percentile] * 1.02
    if percentile == 0:
        factors[1] = factors[2] = factors[0]
    elif percentile == 1:
        factors[2] = factors[1]

    def pairs(scale: float) -> list[tuple[RequestLatencies, RequestLatencies]]:
        rows = []
        for factor, count in zip(factors, counts, strict=True):
            each = [1.0, 1.0, 1.0]
            each[metric] = max(1.0, factor * scale)
            rows += [(slowed(*each), ALONE)] * count
        return rows

    failed = [margin for margin in check_slos(pairs(1.0)) if not margin.is_met]
    expected = (("ttft", "tbt", "e2e")[metric], (50, 90, 99)[percentile])
    assert [(margin.metric, margin.percent) for margin in failed] == [expected]
    assert all(margin.is_met for margin in check_slos(pairs(1 / 1.03)))
    worst = worst_margin(check_slos(pairs(1.0)))
    assert (worst.metric, worst.percent) == expected


def test_requests_of_one_token_have_no_time_between_tokens() -> None:
    line = RequestTimeline(1.0)
    assert measure_latencies(line) is None
    line.record_output(1.5, 1)
    latencies = measure_latencies(line)
    assert latencies == RequestLatencies(0.5, None, 0.5)
    margins = check_slos([(latencies, ALONE)])
    assert [margin.slowdown for margin in margins if margin.metric == "tbt"] == [0, 0, 0]
    assert not all(margin.is_met for margin in margins)
