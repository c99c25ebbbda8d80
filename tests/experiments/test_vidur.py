"""Vidur's searches: a wrong configuration costs more (V15)."""

from dataclasses import replace

import pytest

from experiments.vidur_searches import (
    PAPER_SLO,
    SPACE,
    WORKLOADS,
    VidurCapacityTask,
    VidurSearchTask,
    run_capacity,
    run_search,
)
from gllm.plan.search.objectives import AssessedDesign

MODEL = "llama-2-70b"
H100S = replace(SPACE, devices=("H100",))
"""Space of the best designs; A100s are best for none of the workloads."""
SERVED = "chat-1m"
"""Workload that is simulated, because its requests are the shortest."""


def find_best(workload: str) -> AssessedDesign:
    best = run_search(VidurSearchTask(MODEL, workload, PAPER_SLO, 50, 0, H100S)).best
    assert best is not None
    return best


@pytest.mark.full
def test_the_matrix_of_closed_forms_has_a_wrong_design_that_costs_more() -> None:
    best = {workload: find_best(workload) for workload in WORKLOADS}
    costs = {}
    for own in WORKLOADS:
        for other in WORKLOADS:
            task = VidurCapacityTask(best[own].design, MODEL, other, PAPER_SLO, 50, False)
            costs[own, other] = best[other].value / run_capacity(task).value
    assert {costs[own, own] for own in WORKLOADS} == {1.0}
    assert min(costs.values()) == 1.0
    assert max(costs.values()) >= 1.2


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_design_for_another_workload_costs_more() -> None:
    """Simulated, the designs for the other workloads serve chat-1m."""
    values = {}
    for own in WORKLOADS:
        task = VidurCapacityTask(find_best(own).design, MODEL, SERVED, PAPER_SLO, 50)
        values[own] = run_capacity(task).value
    # A better design for chat-1m than that of closed forms would make the cost only higher.
    assert max(values[SERVED] / values[own] for own in WORKLOADS) >= 1.2
