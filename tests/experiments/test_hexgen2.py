"""The page about HexGen-2: its figures of the paper, its cells and its tables."""

import pytest

from gllm.experiments.base import ExperimentOptions, format_change
from gllm.experiments.hexgen2 import run
from gllm.experiments.hexgen2_cases import measure_cell
from gllm.experiments.hexgen2_tables import budget_table, paper_throughput
from gllm.plan.hetero.workload import CLASSES


def test_figures_of_the_paper_are_read_by_system_and_workload() -> None:
    assert paper_throughput("hexgen-2") == {"HPLD": 157, "HPHD": 448, "LPHD": 689, "LPLD": 570}
    assert paper_throughput("vllm")["HPHD"] == 437


def test_cells_have_the_rivals_of_their_cluster() -> None:
    cell = measure_cell(("opt-30b", "hom4", "LPHD", 1.0))
    assert 0 < cell.uniform <= cell.flow * (1 + 1e-9)
    assert cell.price == pytest.approx(4 * 3.69)
    slow = measure_cell(("opt-30b", "case-e", "HPLD", 0.25))
    fast = measure_cell(("opt-30b", "case-e", "HPLD", 4.0))
    assert slow.uniform == 0
    assert slow.flow < fast.flow
    cells = {("llama-2-70b", name, load, 1.0): cell for name in ("het5", "hom") for load in CLASSES}
    table = budget_table(cells)
    assert "het5, 14.76 $/h" in table
    assert table.count(format_change(cell.flow, cell.uniform)) >= len(CLASSES)


@pytest.mark.long
def test_page_has_every_section() -> None:
    result = run(ExperimentOptions(quick=True, progress=False, jobs=1))
    for title in ("Throughput", "Bandwidth", "Budget", "Simulation", "Search", "Misses and slips"):
        assert f"## {title}" in result.text
    assert len(result.claims) == 6
