"""Smallest clusters that serve a throughput."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.splitwise_smallest import find_smallest
from gllm.sim.hardware.machines import ClusterDesign, machine_pair
from tests.plan.test_design_search import throughput


@given(st.floats(0.3, 5), st.floats(0.3, 5), st.floats(1, 40))
def test_the_smallest_cluster_lacks_no_machine(
    prompt_rate: float, token_rate: float, rate: float
) -> None:
    pair, evaluate = machine_pair("AA"), throughput(prompt_rate, token_rate)

    def serves(design: ClusterDesign) -> bool:
        return evaluate(design) >= rate

    if not serves(ClusterDesign(*pair, 30, 30)):
        with pytest.raises(ValueError, match="raise the limit"):
            find_smallest(pair, serves, (1, 1), (30, 30))
        return
    design, num_evaluations = find_smallest(pair, serves, (1, 1), (30, 30))
    assert serves(design)
    for num_prompt, num_token in ((1, 0), (0, 1)):
        fewer = ClusterDesign(*pair, design.num_prompt - num_prompt, design.num_token - num_token)
        assert not serves(fewer)
    assert num_evaluations <= 11
