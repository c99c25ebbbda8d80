"""The comparison of the default policy with the best ones of a cell."""

import pytest

from experiments.policy_cells import (
    DEVICES,
    DIAGONAL,
    POLICIES,
    SHARES,
    STAGES,
    WORKLOADS,
    CellBase,
    CellRun,
    list_cells,
    run_cell,
)
from experiments.policy_verdicts import OURS, CellFigures, PolicyCell, judge_cell
from gllm.options.slo import Slo

SLO = Slo(ttft_seconds=1.0, tpot_seconds=0.1)
CELL = PolicyCell("cpu", 2, "azure-code", 0.8)


def figures(e2el: float, throughput: float, itl: float) -> CellFigures:
    return CellFigures(e2el, throughput, itl, 0.1, 0.01, 0.0, 1.0, 0.5)


def judge(ours: CellFigures, *, spread: float = 0.0) -> tuple[str, ...]:
    others = {policy: figures(2.0, 900.0, 0.5) for policy in POLICIES}
    others |= {"sarathi": figures(1.0, 950.0, 0.2), "vllm": figures(3.0, 1000.0, 0.1)}
    runs = [
        others | {OURS: ours._replace(e2el=ours.e2el + change)} for change in (-spread, 0.0, spread)
    ]
    verdict = judge_cell(CELL, runs)
    assert (verdict.e2el.policy, verdict.throughput.policy) == ("sarathi", "vllm")
    assert (verdict.itl.policy, verdict.least_itl.policy) == ("sarathi", "vllm")
    assert verdict.e2el.half_width == pytest.approx(4.303 * spread / 3**0.5)
    assert bool(verdict.misses) == (verdict.distance > 1)
    return verdict.misses


def test_each_aim_is_judged_by_the_best_policy_of_its_figure() -> None:
    assert judge(figures(1.02, 991.0, 0.23)) == ()
    assert judge(figures(0.9, 1100.0, 0.1), spread=0.05) == ()
    assert judge(figures(1.05, 991.0, 0.23)) == ("E2EL",)
    assert judge(figures(1.0, 980.0, 0.23)) == ("throughput",)
    assert judge(figures(1.0, 980.0, 0.3)) == ("throughput", "ITL")


def test_every_policy_of_a_cell_serves_the_same_requests() -> None:
    found = run_cell(CellRun(CELL, 1, 12, CellBase(10.0, SLO)))
    assert set(found) == set(POLICIES)
    assert len({figures.e2el for figures in found.values()}) > 3
    assert all(min(figures[:5]) > 0 for figures in found.values())
    own_ridge = run_cell(CellRun(CELL._replace(device="gpu"), 1, 12, CellBase(2.5, SLO)))
    assert own_ridge["fixed"] == own_ridge["fixed, own ridge"]


def test_a_quick_run_has_every_value() -> None:
    cells = list_cells(quick=True)
    assert {cell.device for cell in cells} == set(DEVICES)
    assert {cell.stages for cell in cells} == set(STAGES)
    assert {cell.workload for cell in cells} == set(WORKLOADS)
    assert {cell.share for cell in cells} >= set(SHARES)
    assert len(list_cells(quick=False)) == len(DEVICES) * 4 * (3 * 5 + 2)


def test_emulated_cells_have_every_value() -> None:
    assert {cell.stages for cell in DIAGONAL} == set(STAGES)
    assert {cell.workload for cell in DIAGONAL} == set(WORKLOADS)
    assert {cell.share for cell in DIAGONAL} >= set(SHARES)
    assert len({cell[:3] for cell in DIAGONAL}) == len(DIAGONAL)
