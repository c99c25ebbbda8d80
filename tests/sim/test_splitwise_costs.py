"""Splitwise's performance model: fits, measured times and machine types."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import DecodeOnlyCostModel
from gllm.sim.costs.piecewise_linear import PiecewiseLinear
from gllm.sim.costs.splitwise import (
    MIXED_FACTOR,
    SplitwiseCostModel,
    interpolate_medians,
    read_points,
    read_splitwise_profile,
)
from gllm.sim.hardware.machines import ClusterDesign, machine_pair, read_machine_types

MODEL = "bloom-176b"


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0.1, 10)), min_size=2, max_size=30).filter(
        lambda points: len({x for x, _ in points}) > 1
    )
)
def test_medians_are_met_and_the_rest_is_between(points: list[tuple[int, float]]) -> None:
    function = interpolate_medians([(float(x), y) for x, y in points])
    for x, _ in points:
        values = sorted(y for each, y in points if each == x)
        assert values[0] - 1e-9 <= function(x) <= values[-1] + 1e-9
    low, high = min(y for _, y in points), max(y for _, y in points)
    for x in range(51):
        if x <= function.knots[-1]:
            assert low - 1e-9 <= function(x) <= high + 1e-9


def test_knots_that_do_not_ascend_are_refused() -> None:
    with pytest.raises(ValueError, match="ascending"):
        PiecewiseLinear([1, 1], [2, 3])


def test_iterations_take_the_measured_times() -> None:
    a100 = read_splitwise_profile(MODEL, "a100-80gb")
    assert a100.prompt_seconds(4096) == pytest.approx(1.335, rel=0.02)  # of 8 x 512 and 1 x 4,096
    assert a100.token_seconds(64) == pytest.approx(0.09658)
    assert a100.iteration_seconds(0, 0) == 0
    mixed = a100.iteration_seconds(2000, 48)
    assert mixed == pytest.approx(MIXED_FACTOR * a100.prompt_seconds(2048))
    # Beyond the largest batch the last segment goes on.
    slope = (a100.token_seconds(64) - a100.token_seconds(32)) / 32
    assert a100.token_seconds(96) == pytest.approx(a100.token_seconds(64) + 32 * slope)
    with pytest.raises(ValueError, match="bloom-176b a100-80gb tp 8"):
        read_points(MODEL, "a100-80gb", 4)


def test_a_machine_without_prefill_takes_no_time_for_prompts() -> None:
    profile = read_splitwise_profile(MODEL, "h100-80gb")
    work = StageWork(0, 1000, ((0, 990),), 10, 5000, 11)
    whole = SplitwiseCostModel(profile).stage_seconds(0, work)
    assert whole == pytest.approx(profile.iteration_seconds(990, 10))
    tokens_only = DecodeOnlyCostModel(SplitwiseCostModel(profile)).stage_seconds(0, work)
    assert tokens_only == pytest.approx(profile.token_seconds(10))


def test_the_stages_of_an_engine_share_the_time_of_a_machine() -> None:
    profile = read_splitwise_profile(MODEL, "h100-80gb")
    work = StageWork(0, 1000, ((0, 990),), 10, 5000, 11)
    cost = SplitwiseCostModel(profile, num_stages=2, activation_seconds=1e-7)
    for stage in (0, 1):
        seconds = cost.stage_seconds(stage, work)
        assert seconds == pytest.approx(profile.iteration_seconds(990, 10) / 2)
    assert cost.activation_transfer(0, work).occupancy_seconds == pytest.approx(1e-4)


def test_a_power_limit_slows_prompts_down_and_no_tokens() -> None:
    full, capped = (read_splitwise_profile(MODEL, name) for name in ("h100-80gb", "h100-80gb-pcap"))
    assert capped.prompt_seconds(2048) == pytest.approx(1.3 * full.prompt_seconds(2048), rel=0.01)
    assert capped.token_seconds(32) == full.token_seconds(32)


def test_machine_types_have_the_ratios_of_the_paper() -> None:
    machines = read_machine_types()
    a100, h100 = machines["DGX-A100"], machines["DGX-H100"]
    assert h100.dollars_per_hour / a100.dollars_per_hour == pytest.approx(h100.cost, rel=0.001)
    assert (a100.link.bandwidth, h100.link.bandwidth) == (200e9, 400e9)
    # 70 % of the machine with half of the GPUs' power.
    assert machines["DGX-H100-cap"].power == pytest.approx(0.70 * h100.power, abs=0.01)
    # HA 25P/26T of the paper is a cluster of 40 H100 in power.
    power = ClusterDesign(*machine_pair("HA"), 25, 26).power
    assert power == pytest.approx(40 * h100.power, rel=0.01)
    with pytest.raises(ValueError, match="AA, HH, HA, HHcap"):
        machine_pair("AH")
    with pytest.raises(ValueError, match="do not fit DGX-A100"):
        a100.kv_tokens(1e12, 4e6, 0.9)
