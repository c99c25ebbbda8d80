"""Splitwise's provisioning, transfers and latency by load."""

import pytest

from experiments.splitwise_curves import (
    CheapestCluster,
    load_points,
    overhead_rows,
    provisioning_claims,
    provisioning_point,
    transfer_rows,
)
from experiments.splitwise_mixed import measure_margins, serves_point
from gllm.plan.pools.clusters import SampleSize
from gllm.sim.hardware.machines import read_machine_types

SMALL = SampleSize(60, 0.5)


def test_a_transfer_beside_its_prompt_is_shorter_than_one_after_it() -> None:
    rows, claims = transfer_rows()
    assert all(float(row[3]) < float(row[2]) for row in rows)
    assert {claim.verdict.is_met for claim in claims} == {True, False}
    overheads, _ = overhead_rows(50)
    serialised, per_layer = ([float(row[i].split()[0]) for row in overheads] for i in (2, 4))
    assert all(each > other >= 0 for each, other in zip(serialised, per_layer, strict=True))


def test_more_machines_serve_no_less() -> None:
    small, large = (
        max(each.slowdown / each.limit for each in measure_margins(provisioning_point(*counts)))
        for counts in ((6, 1, SMALL), (30, 3, SMALL))
    )
    assert large < small
    assert serves_point(provisioning_point(30, 3, SMALL)) == (large <= 1)


@pytest.mark.parametrize(("counts", "are_met"), [((27, 3), True), ((13, 3), False)])
def test_machines_are_judged_apart(counts: tuple[int, int], are_met: bool) -> None:
    prompt, token, both = provisioning_claims([CheapestCluster(*counts, 5)] * 2)
    assert prompt.verdict.is_met == are_met
    assert token.verdict.is_met
    assert both.ours == sum(counts)


def test_the_clusters_of_a_load_have_the_power_of_the_baseline() -> None:
    points = load_points(SMALL)
    limit = 40 * read_machine_types()["DGX-H100"].power / 5
    for point in points.values():
        assert 0.9 * limit < point.design.power < 1.1 * limit
    assert len({(point.design, point.workload) for point in points.values()}) == 8
