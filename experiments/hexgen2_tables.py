"""Tables of the page about HexGen-2."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.base import format_change
from experiments.hexgen2_cases import CHECKPOINTS, LLAMA, Cell, CellOutcome
from experiments.hexgen2_paper import paper_throughput
from gllm.plan.hetero.search import SearchResult
from gllm.plan.hetero.workload import CLASSES
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table


def flow_after(search: SearchResult, num_evaluations: int) -> float:
    """Return the best flow of a search after a number of evaluations, requests per second."""
    known = [step.flow for step in search.steps if step.num_evaluations <= num_evaluations]
    return max(known, default=0.0)


def throughput_table(cells: Mapping[Cell, CellOutcome], settings: Sequence[str]) -> str:
    """Return tokens per second of plans and baselines."""
    rows = []
    for cluster in settings:
        for load in CLASSES:
            cell, hom = cells[LLAMA, cluster, load, 1.0], cells[LLAMA, "hom", load, 1.0]
            flows = (cell.flow, cell.colocated, hom.uniform, hom.colocated)
            row = [cluster, load, *(f"{flow * cell.output:.0f}" for flow in flows)]
            row.append(format_change(cell.flow, cell.colocated))
            rows.append(row)
    header = [
        "cluster", "workload", "plan", "colocated", "DistServe", "vLLM", "plan over colocated",
    ]  # fmt: skip
    return format_table(header, rows)


def bandwidth_table(cells: Mapping[Cell, CellOutcome]) -> str:
    """Return the plans of setting 1 by the factor of all bandwidths."""
    rows = []
    for load in CLASSES:
        row = [load]
        for factor in (0.5, 1.0, 2.0):
            cell = cells[LLAMA, "het1", load, factor]
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
        five, hom = cells[LLAMA, "het5", load, 1.0], cells[LLAMA, "hom", load, 1.0]
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
    five, hom = cells[LLAMA, "het5", "HPHD", 1.0], cells[LLAMA, "hom", "HPHD", 1.0]
    header = [
        "workload", f"het5, {five.price:.2f} $/h", f"8 x H100, {hom.price:.2f} $/h, DistServe",
        "8 x H100, plan", "het5 over DistServe", "per dollar",
    ]  # fmt: skip
    return format_table(header, rows)


def count_wins(
    guided: Sequence[SearchResult], rivals: Sequence[SearchResult], num_evaluations: int
) -> int:
    """Return the seeds in which the guided search has no less flow than a rival."""
    return sum(
        flow_after(mine, num_evaluations) >= flow_after(rival, num_evaluations) * (1 - 1e-9)
        for mine, rival in zip(guided, rivals, strict=True)
    )


def search_table(results: Mapping[str, Sequence[SearchResult]]) -> str:
    """Return the mean flow of each search, and the seeds in which the guided one is no worse."""
    guided = results["guided"]
    rows = []
    for name, runs in results.items():
        row = [name]
        for count in CHECKPOINTS:
            flows = [flow_after(run, count) for run in runs]
            wins = count_wins(guided, runs, count)
            row.append(f"{sum(flows) / len(flows):.2f}")
            row.append("-" if name == "guided" else f"{wins} of {len(flows)}")
        rows.append(row)
    header = ["search"]
    for count in CHECKPOINTS:
        header += [f"after {count}", "guided no worse"]
    return format_table(header, rows)


def plot_gains(
    cells: Mapping[Cell, CellOutcome], settings: Sequence[str], path: str | Path
) -> None:
    """Plot the throughput of plans over that of colocated engines; the paper's for setting 1."""
    plans, colocated = paper_throughput("hexgen-2"), paper_throughput("hexgen")
    gains: dict[str, dict[str, float]] = {}
    for load in CLASSES:
        outcomes = {name: cells[LLAMA, name, load, 1.0] for name in settings}
        gains[load] = {name: cell.flow / cell.colocated for name, cell in outcomes.items()}
    papers = {load: {settings[0]: plans[load] / colocated[load]} for load in CLASSES}
    plot_bars(gains, path, "plan / colocated", "Throughput by workload and setting", papers)
