"""Vidur's searches: a wrong configuration costs more (V15)."""

import pytest

from gllm.experiments.vidur_searches import (
    PAPER_SLO,
    WORKLOADS,
    VidurCapacityTask,
    VidurSearchTask,
    run_capacity,
    run_search,
)

MODEL = "llama-2-70b"


@pytest.mark.long
def test_the_design_for_another_workload_costs_more() -> None:
    best = {}
    for workload in WORKLOADS:
        found = run_search(VidurSearchTask(MODEL, workload, PAPER_SLO, 50, 2)).best
        assert found is not None
        best[workload] = found
    costs = []
    for own in WORKLOADS:
        for other in WORKLOADS:
            task = VidurCapacityTask(best[own].design, MODEL, other, PAPER_SLO, 50)
            wrong = run_capacity(task)
            if own != other and wrong.capacity:
                costs.append(best[other].value / wrong.value)
    assert max(costs) >= 1.2
