"""Costs of Vidur's other models: token operators of its tables, attention by the roofline."""

import pytest

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostRangeError
from gllm.sim.costs.forest import ForestCostModel
from gllm.sim.costs.token_forest import PROFILED_DEVICES, PROFILED_MODELS, TokenForestCostModel
from gllm.sim.hardware.devices import DEVICES
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.options import SimulationConfig, build_deployment

PREFILL = StageWork(1, 2048, ((0, 2048),), 0, 0, 1)
DECODES = StageWork(2, 32, (), 32, 32 * 512, 32)


def build(stages: int = 1) -> TokenForestCostModel:
    config = SimulationConfig(
        profile="vidur:llama-2-70b",
        device="A100-80G",
        pipeline_parallel_size=stages,
        tensor_parallel_size=(2,),
    )
    cost = build_deployment(config, 4096).cost
    assert isinstance(cost, TokenForestCostModel)
    return cost


@pytest.mark.parametrize("work", [PREFILL, DECODES])
def test_attention_by_the_roofline_is_near_the_measured_one(work: StageWork) -> None:
    """The only model with a table of attention: Llama-2-70B on two A100s."""
    measured = ForestCostModel(1).stage_seconds(0, work)
    assert build().stage_seconds(0, work) == pytest.approx(measured, rel=0.15)


def test_operators_add_up_and_stages_share_the_layers() -> None:
    one, two = build(), build(2)
    for work in (PREFILL, DECODES):
        parts = one.operator_seconds(0, work)
        assert sum(parts.values()) == pytest.approx(one.stage_seconds(0, work))
        assert min(parts.values()) >= 0
        halves = two.stage_seconds(0, work) + two.stage_seconds(1, work)
        assert halves == pytest.approx(one.stage_seconds(0, work) + parts["host"])
    assert two.activation_transfer(0, PREFILL).occupancy_seconds > 0


def test_work_beyond_the_tables_is_refused() -> None:
    with pytest.raises(CostRangeError, match="num_tokens is 5000"):
        build().stage_seconds(0, StageWork(1, 5000, ((0, 5000),), 0, 0, 1))


@pytest.mark.parametrize(
    ("profile", "device", "message"),
    [
        ("vidur:opt-13b", "H100", "model 'opt-13b' is not in Vidur's tables"),
        ("vidur:llama-2-7b", "L20", "device 'L20' is not in Vidur's tables"),
        ("vidur:llama-2-70b", "L20", "device 'L20' is not in Vidur's tables"),
        ("vidur:unknown", "H100", "model 'unknown' is not in Vidur's tables: choose from llama-2"),
    ],
)
def test_what_was_not_profiled_is_named(profile: str, device: str, message: str) -> None:
    config = SimulationConfig(profile=profile, device=device, pipeline_parallel_size=1)
    with pytest.raises(ValueError, match=message):
        build_deployment(config, 2048)


def test_names_are_those_of_the_tables_of_shapes_and_devices() -> None:
    assert set(PROFILED_MODELS) <= set(MODELS)
    assert set(PROFILED_DEVICES) <= set(DEVICES)
