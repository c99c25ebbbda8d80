"""The page about HexGen-2: its figures of the paper, its cells and its tables."""

import pytest

from experiments.base import ExperimentOptions, format_change
from experiments.hexgen2 import run
from experiments.hexgen2_cases import measure_cell, measure_scale
from experiments.hexgen2_paper import (
    online_table,
    paper_search_minutes,
    paper_table,
    paper_throughput,
    scale_table,
)
from experiments.hexgen2_simulated import OnlineOutcome, compare_chunking
from experiments.hexgen2_tables import budget_table
from gllm.plan.hetero.workload import CLASSES


def test_figures_of_the_paper_are_read_by_system_and_workload() -> None:
    figures = {"HPLD": 157, "HPHD": 448, "LPHD": 689, "LPLD": 570, "online": 350}
    assert paper_throughput("hexgen-2") == figures
    assert paper_throughput("vllm")["HPHD"] == 437
    assert paper_throughput("hexgen", "opt-30b")["LPLD"] == 545
    assert paper_search_minutes()[320] == 47.77


def test_tables_of_the_paper_have_paper_ours_and_ratio() -> None:
    cell = measure_cell(("opt-30b", "hom4", "LPHD", 1.0))
    table = paper_table({("opt-30b", "hom4", load, 1.0): cell for load in CLASSES}, "opt-30b")
    row = next(line for line in table.splitlines() if "LPHD" in line and "hexgen-2" in line)
    ours = cell.flow * cell.output
    assert [part.strip() for part in row.split("|")[3:6]] == [
        "758",
        f"{ours:.0f}",
        f"{ours / 758:.1f}",
    ]
    assert format_change(cell.flow, cell.uniform) in table
    online = online_table({"vllm": OnlineOutcome(peak=400.0, served=512.0, latency=2.0)})
    assert "256" in online
    assert "2.0" in online.splitlines()[-1].split("|")[5]


def test_search_of_twenty_devices_has_no_figure_of_the_paper() -> None:
    outcome = measure_scale(20)
    assert outcome.cpu_seconds > 0
    assert scale_table([outcome]).splitlines()[-1].split("|")[2].strip() == "-"


@pytest.mark.long
def test_chunks_raise_the_peak_where_prompts_are_long_and_outputs_short() -> None:
    outcome = compare_chunking("HPLD")
    assert outcome.chunked > 1.1 * outcome.whole
    assert outcome.best_chunked >= outcome.chunked
    assert outcome.best_whole >= outcome.whole


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
    titles = [line[3:] for line in result.text.splitlines() if line.startswith("## ")]
    assert len(titles) == len(set(titles)) == 14
    assert {"Throughput", "Budget", "Simulation", "Deadlines", "Misses and slips"} <= set(titles)
    by_name = {claim.quantity: claim for claim in result.claims}
    assert by_name["simulated plans within 15 % of the flow"].ours is not None
    assert sum("seeds in which guided" in name for name in by_name) == 6
