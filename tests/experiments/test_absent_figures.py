"""Figures of the papers with pages of their own: costs of searches."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.distserve_planning import (
    ALGORITHMS,
    SearchCost,
    SearchKey,
    list_candidates,
    measure_ours,
)
from experiments.vidur_pareto import CapacityCost, CostEstimate, limits_slo
from gllm.options.slo import parse_slo


@given(st.lists(st.floats(0.1, 1e4), min_size=2, max_size=9), st.integers(2, 400))
def test_the_cost_of_all_designs_is_that_of_a_sample_in_proportion(
    seconds: list[float], num_designs: int
) -> None:
    costs = CostEstimate(num_designs, [CapacityCost(each, 2 * each, 1) for each in seconds])
    total, half = costs.total("cpu_seconds")
    assert total == pytest.approx(num_designs * sum(seconds) / len(seconds))
    assert costs.total("gpu_seconds") == pytest.approx((2 * total, 2 * half))
    alone = CostEstimate(num_designs, costs.sample[:1])
    assert alone.total("cpu_seconds")[1] == math.inf


def test_one_limit_replaces_the_papers() -> None:
    assert limits_slo("tbt", 0.05) == "ttft:p90=2,tbt:p99=0.05"
    assert parse_slo(limits_slo("ttft", 0.5)).limit_of("ttft") == (0.5, 90)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=30), st.integers(1, 40))
def test_candidates_on_several_cores_take_no_less_than_their_share(
    seconds: list[float], num_cores: int
) -> None:
    cost = SearchCost(len(seconds), seconds)
    least = max(max(seconds), cost.total / num_cores)
    assert cost.on_cores(num_cores) >= least * (1 - 1e-9)
    assert cost.on_cores(num_cores) <= cost.total / num_cores + max(seconds) + 1e-9
    assert cost.on_cores(1) == pytest.approx(cost.total)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fewer_gpus_have_some_of_the_candidates(algorithm: str) -> None:
    few, many = (list_candidates(SearchKey("opt-13b", algorithm, count)) for count in (4, 8))
    assert few[0] < many[0]
    assert 0 < len(few[1]) < len(many[1]) <= many[0]
    assert set(few[1]) <= set(many[1])


@pytest.mark.full
def test_our_search_simulates_some_of_the_candidates() -> None:
    keys = [SearchKey("opt-13b", ALGORITHMS[0], count) for count in (2, 4)]
    for key, cost in zip(keys, measure_ours(keys), strict=True):
        number, _ = list_candidates(key)
        assert 0 < cost.num_candidates <= number
        assert cost.total > 0
