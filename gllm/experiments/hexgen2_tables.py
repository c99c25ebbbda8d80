"""Tables of the page about HexGen-2."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from gllm.experiments.base import format_change
from gllm.experiments.hexgen2_cases import CHECKPOINTS, Cell, CellOutcome, ScaleOutcome
from gllm.plan.data_files import read_data
from gllm.plan.hetero.search import SearchResult
from gllm.plan.hetero.simulation import SimulatedThroughput
from gllm.plan.hetero.workload import CLASSES
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table

MODEL = "llama-2-70b"


def paper_throughput(system: str) -> dict[str, float]:
    """Return the paper's output tokens per second of a system of Table 3, by workload."""
    rows = csv.DictReader(io.StringIO(read_data("hexgen2_figures.csv")))
    row = next(each for each in rows if each["item"] == f"table3 {system}")
    return dict(zip(CLASSES, map(float, row["value"].split("/")), strict=False))


def throughput_table(cells: Mapping[Cell, CellOutcome], settings: Sequence[str]) -> str:
    """Return tokens per second of plans and baselines; the paper's for setting 1."""
    rows = []
    papers = {name: paper_throughput(name) for name in ("hexgen-2", "hexgen", "distserve", "vllm")}
    for cluster in settings:
        for load in CLASSES:
            cell, hom = cells[MODEL, cluster, load, 1.0], cells[MODEL, "hom", load, 1.0]
            flows = (cell.flow, cell.colocated, hom.uniform, hom.colocated)
            row = [cluster, load, *(f"{flow * cell.output:.0f}" for flow in flows)]
            row.append(format_change(cell.flow, cell.colocated))
            if cluster == "het1":
                row.append("/".join(f"{paper[load]:.0f}" for paper in papers.values()))
                row.append(format_change(papers["hexgen-2"][load], papers["hexgen"][load]))
            else:
                row += ["-", "-"]
            rows.append(row)
    header = [
        "cluster", "workload", "plan", "colocated", "DistServe", "vLLM", "plan over colocated",
        "paper: HexGen-2/HexGen/DistServe/vLLM", "HexGen-2 over HexGen",
    ]  # fmt: skip
    return format_table(header, rows)


def bandwidth_table(cells: Mapping[Cell, CellOutcome]) -> str:
    """Return the plans of setting 1 by the factor of all bandwidths."""
    rows = []
    for load in CLASSES:
        row = [load]
        for factor in (0.5, 1.0, 2.0):
            cell = cells[MODEL, "het1", load, factor]
            row.append(f"{cell.flow * cell.output:.0f}")
            row.append(format_change(cell.flow, cell.colocated))
        rows.append(row)
    header = ["workload"]
    for name in ("x 1/2", "x 1", "x 2"):
        header += [name, "over colocated"]
    return format_table(header, rows)


def budget_table(cells: Mapping[Cell, CellOutcome]) -> str:
    """Return setting 5 beside eight H100, tokens per second and per dollar."""
    rows = []
    for load in CLASSES:
        five, hom = cells[MODEL, "het5", load, 1.0], cells[MODEL, "hom", load, 1.0]
        rows.append(
            [
                load,
                f"{five.flow * five.output:.0f}",
                f"{hom.uniform * hom.output:.0f}",
                f"{hom.flow * hom.output:.0f}",
                format_change(five.flow, hom.uniform),
                format_change(five.flow / five.price, hom.uniform / hom.price),
            ]
        )
    five, hom = cells[MODEL, "het5", "HPHD", 1.0], cells[MODEL, "hom", "HPHD", 1.0]
    header = [
        "workload", f"het5, {five.price:.2f} $/h", f"8 x H100, {hom.price:.2f} $/h, DistServe",
        "8 x H100, plan", "het5 over DistServe", "per dollar",
    ]  # fmt: skip
    return format_table(header, rows)


def simulation_table(
    cells: Sequence[tuple[str, str, str]], runs: Sequence[SimulatedThroughput]
) -> str:
    """Return flows beside simulated throughput."""
    rows = [
        [cluster, load, f"{run.estimate:.2f}", f"{run.simulated:.2f}", f"{100 * run.error:+.0f} %"]
        for (_, cluster, load), run in zip(cells, runs, strict=True)
    ]
    return format_table(["cluster", "workload", "flow /s", "simulated /s", "error"], rows)


def search_table(results: Mapping[str, Sequence[SearchResult]]) -> str:
    """Return the mean flow of each search, and the seeds in which the guided one is no worse."""
    guided = results["guided"]
    rows = []
    for name, runs in results.items():
        row = [name]
        for count in CHECKPOINTS:
            flows = [run.flow_after(count) for run in runs]
            wins = sum(
                mine.flow_after(count) >= flow * (1 - 1e-9)
                for mine, flow in zip(guided, flows, strict=True)
            )
            row.append(f"{sum(flows) / len(flows):.2f}")
            row.append("-" if name == "guided" else f"{wins} of {len(flows)}")
        rows.append(row)
    header = ["search"]
    for count in CHECKPOINTS:
        header += [f"after {count}", "guided no worse"]
    return format_table(header, rows)


def scale_table(outcomes: Sequence[ScaleOutcome]) -> str:
    """Return the effort of searches by the number of devices."""
    rows = [
        [str(each.num_devices), str(each.num_evaluations), str(each.num_flows), f"{each.flow:.1f}"]
        for each in outcomes
    ]
    return format_table(["devices", "partitions", "maximum flows", "flow /s"], rows)


def plot_gains(
    cells: Mapping[Cell, CellOutcome], settings: Sequence[str], path: str | Path
) -> None:
    """Plot the throughput of plans over that of colocated engines; the paper's for setting 1."""
    plans, colocated = paper_throughput("hexgen-2"), paper_throughput("hexgen")
    gains: dict[str, dict[str, float]] = {}
    for load in CLASSES:
        outcomes = {name: cells[MODEL, name, load, 1.0] for name in settings}
        gains[load] = {name: cell.flow / cell.colocated for name, cell in outcomes.items()}
    papers = {load: {settings[0]: plans[load] / colocated[load]} for load in CLASSES}
    plot_bars(gains, path, "plan / colocated", "Throughput by workload and setting", papers)
