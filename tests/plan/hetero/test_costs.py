"""Table 1 of HexGen-2 against values computed by hand, and the rules of capacity (H1, H4)."""

import pytest

from gllm.plan.hetero.costs import RooflineCosts, Table1Costs
from gllm.plan.hetero.replicas import (
    Phase,
    PipelineCapacityRule,
    ReplicaPlanner,
    split_by_memory,
    stage_layouts,
)
from gllm.plan.hetero.workload import CLASSES, MeanLengths, mean_lengths
from gllm.plan.layout import PlannedStage
from gllm.plan.nodes import DeviceCluster, DeviceNode, build_cluster, named_cluster
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.hardware.shapes import MODELS

NVLINK, ETHERNET = NetworkLink(450e9, 5e-6), NetworkLink(9.125e9, 50e-6)
CLUSTER = DeviceCluster(
    (
        DeviceNode("h", "H100", 4, NVLINK),
        DeviceNode("a", "A100-80G", 4, NetworkLink(300e9, 5e-6)),
        DeviceNode("l", "L40", 4, NetworkLink(20e9, 10e-6)),
    ),
    ETHERNET,
)
H, A, L = 0, 1, 2
LENGTHS = MeanLengths(1000, 100)
OPT = Table1Costs(CLUSTER, MODELS["opt-30b"], LENGTHS)
LLAMA = Table1Costs(CLUSTER, MODELS["llama-2-70b"], LENGTHS)


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-6)


def test_prefill_compute() -> None:
    # 24 * 1000 * 7168^2 * 24 layers / (2 ranks * 989.4e12)
    assert OPT.prefill_compute(PlannedStage((H, H), 24)) == near(0.01495603852)


def test_decode_compute_is_that_of_the_slowest_device() -> None:
    # 12 * 7168^2 * 2 * 100 * 24 / (2 * 2039e9) + 24 * 10 * 100 * 7168^2 * 24 / (2 * 312e12)
    assert OPT.decode_compute(PlannedStage((H, A), 24), 10) == near(0.7731515142)


def test_sums_over_ranks_are_those_of_the_rank_with_the_worst_links() -> None:
    # A100: 2 * (50e-6 + 1000 * 7168 * 2 / (3 * 9.125e9)) * 4 * 12 layers
    assert OPT.rank_transfers(PlannedStage((H, H, A), 12), 1000 * 7168 * 2) == near(0.05507419178)


def test_activations_take_the_best_link_in_each_step() -> None:
    # (50e-6 + 10 * 7168 * 2 / 9.125e9) * 100
    stages = PlannedStage((H, A), 24), PlannedStage((L,), 24)
    assert OPT.decode(stages, 10).hops == [near(0.006571068493)]
    # A stage of one rank has no sums.
    assert OPT.decode(stages, 10).stages[1] == near(OPT.decode_compute(stages[1], 10))


def test_memory_of_each_device() -> None:
    # (12 * 7168^2 * 2 + 2 * 32 * 1100 * 7168 * 2) * 24 / 2 + 4 * 32 * 1100 * 7168 * 2
    assert OPT.device_bytes(PlannedStage((A, A), 24), 32) == near(28927066112)


@pytest.mark.parametrize("workload", CLASSES)
def test_credit_for_full_stages_makes_decode_a_pipeline(workload: str) -> None:
    shape, lengths = MODELS["opt-30b"], mean_lengths(workload)
    cluster = named_cluster("case-e")
    costs = Table1Costs(cluster, shape, lengths)
    degrees = {
        rule: [
            planner.best(group, phase).degrees  # type: ignore[union-attr]
            for group in ((2, 0), (0, 2))
            for phase in (Phase.PREFILL, Phase.DECODE)
        ]
        for rule in PipelineCapacityRule
        for planner in [ReplicaPlanner(cluster, shape, costs, rule)]
    }
    assert degrees[PipelineCapacityRule.CREDITED] == ["TP2 PP1", "TP1 PP2"] * 2
    # A batch that is divided over the stages, or waits for all of them, needs no pipeline.
    assert degrees[PipelineCapacityRule.LITERAL] == ["TP2 PP1"] * 4
    assert degrees[PipelineCapacityRule.PIPELINED] == ["TP2 PP1"] * 4


@pytest.mark.parametrize("costs", [Table1Costs, RooflineCosts])
def test_rules_agree_without_a_pipeline_and_are_ordered_with_one(costs: type) -> None:
    shape = MODELS["opt-30b"]
    model = costs(CLUSTER, shape, LENGTHS)
    capacities = {}
    for rule in PipelineCapacityRule:
        planner = ReplicaPlanner(CLUSTER, shape, model, rule)
        by_layout = {
            each.stages: each.capacity for each in planner.candidates((2, 0, 1), Phase.DECODE)
        }
        capacities[rule] = by_layout
    for stages, literal in capacities[PipelineCapacityRule.LITERAL].items():
        pipelined = capacities[PipelineCapacityRule.PIPELINED][stages]
        credited = capacities[PipelineCapacityRule.CREDITED][stages]
        if len(stages) == 1:
            assert pipelined == near(literal)
        assert pipelined <= credited * (1 + 1e-9)


@pytest.mark.parametrize("costs", [Table1Costs, RooflineCosts])
def test_engines_hold_the_longest_request(costs: type) -> None:
    stages = (PlannedStage((H, H), 48),)
    usual = costs(CLUSTER, MODELS["opt-30b"], LENGTHS).max_batch(stages)
    most = int(usual * LENGTHS.total)
    for longest, batch in ((most, usual), (2 * most, 0)):
        lengths = LENGTHS._replace(longest=longest)
        assert costs(CLUSTER, MODELS["opt-30b"], lengths).max_batch(stages) == batch


def test_layers_follow_memory_and_ranks_divide_the_heads() -> None:
    assert split_by_memory(CLUSTER, [(A, A), (L,)], 52) == [40, 12]
    layouts = stage_layouts(CLUSTER, (2, 0, 1), 80, 64)
    cuts = {tuple(stage.devices for stage in stages) for stages in layouts}
    assert cuts == {((H,), (H,), (L,)), ((H, H), (L,))}
    assert all(sum(stage.layers for stage in stages) == 80 for stages in layouts)
    # Three ranks do not divide 56 heads, seven do.
    devices = {
        len(stage.devices)
        for stages in stage_layouts(build_cluster({"h100": 7}), (7,), 48, 56)
        for stage in stages
    }
    assert devices == {1, 2, 4, 7}


def test_roofline_is_slower_than_peak_rates() -> None:
    shape = MODELS["llama-2-70b"]
    stages = (PlannedStage((H, H), 40), PlannedStage((A, A), 40))
    peak, roofline = (costs(CLUSTER, shape, LENGTHS) for costs in (Table1Costs, RooflineCosts))
    for a, b in zip(peak.prefill(stages).stages, roofline.prefill(stages).stages, strict=True):
        assert a < b < 4 * a
    assert roofline.max_batch(stages) > 0
    assert roofline.max_batch((PlannedStage((L,), 80),)) == 0
    with pytest.raises(ValueError, match="does not fit"):
        roofline.prefill((PlannedStage((L,), 80),))
