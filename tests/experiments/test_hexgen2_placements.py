"""HexGen-2's published groups of devices: they are read, placed, and compared with the search's."""

import pytest

from experiments.claims import ExpectedLimit
from experiments.hexgen2_paper import paper_placement
from experiments.hexgen2_placements import (
    OUR_RULE,
    PAPER_NAMES,
    PAPER_RULE,
    PLACED,
    PlacementOutcome,
    parse_placement,
    place_groups,
    placement_claims,
)
from gllm.plan.hetero.replicas import Phase
from gllm.plan.nodes import named_cluster


def test_a_published_group_is_read() -> None:
    groups = parse_placement("P: 1H100+1A100 TP1PP2 | D: 2x(2L40+1A6000) TP1PP3")
    assert groups[0] == (Phase.PREFILL, {"H100": 1, "A100": 1}, 1, 2)
    assert groups[1:] == [(Phase.DECODE, {"L40": 2, "A6000": 1}, 1, 3)] * 2
    with pytest.raises(ValueError, match="'4XL' is no group of devices"):
        parse_placement("P: 4XL | D: 1H100 TP1PP1")


@pytest.mark.parametrize("key", PLACED)
def test_published_groups_fill_the_devices_of_their_cluster(key: tuple[str, str]) -> None:
    model, setting = key
    cluster = named_cluster(PLACED[key])
    groups = parse_placement(paper_placement(PAPER_NAMES[model], setting))
    placed = place_groups(cluster, groups)
    for index, node in enumerate(cluster.nodes):
        assert sum(group[index] for _, group in placed) <= node.num_devices
    num_used = sum(sum(group) for _, group in placed)
    assert num_used == sum(sum(group.devices.values()) for group in groups)
    assert num_used <= cluster.num_devices
    for published, (phase, group) in zip(groups, placed, strict=True):
        assert phase is published.phase
        assert sum(group) == published.tp * published.pp


def test_missing_devices_are_named() -> None:
    groups = parse_placement("P: 4H100 TP4PP1 | D: 1A100 TP1PP1")
    with pytest.raises(ValueError, match="2 H100 are missing"):
        place_groups(named_cluster("het1"), groups)


def test_the_workload_with_most_groups_in_common_counts() -> None:
    outcomes = {
        (("m", "het1", load), rule): PlacementOutcome(paper, found, "", common, 4)
        for load, rule, paper, found, common in (
            ("HPLD", PAPER_RULE, 1.0, 1.5, 1),
            ("LPHD", PAPER_RULE, 2.0, 1.0, 3),
            ("HPLD", OUR_RULE, 0.0, 1.0, 0),
            ("LPHD", OUR_RULE, 2.0, 2.5, 2),
        )
    }
    common, paper_flow, our_flow = placement_claims(outcomes)
    assert (common.ours, common.verdict.is_met) == (0.75, False)
    assert common.beside == {"by our costs": "50 %"}
    assert paper_flow.ours == 0.5
    assert paper_flow.paper == ExpectedLimit(1.0, True, "x", 2)
    # Published groups that serve nothing are no base.
    assert our_flow.ours == 1.25
