"""Tables of HexGen-2 (arXiv 2502.07903) beside ours: paper, ours, ratio."""

import csv
import io
from collections.abc import Mapping, Sequence
from statistics import fmean

from experiments.base import format_change
from experiments.hexgen2_cases import LLAMA, Cell, CellOutcome, ScaleOutcome
from experiments.hexgen2_simulated import (
    ATTAINMENT,
    ChunkedOutcome,
    DeadlineOutcome,
    OnlineOutcome,
    SimulatedCell,
)
from gllm.plan.hetero.replicas import PipelineCapacityRule
from gllm.plan.hetero.workload import CLASSES
from gllm.plan.nodes import read_data
from gllm.sim.metrics.report import format_table

ONLINE = "online"
SYSTEMS = ("hexgen-2", "hexgen", "distserve", "vllm")
CHUNKING_GAINS = {"HPLD": 0.2, "HPHD": 0.05, "LPHD": 0.05, "LPLD": 0.2}
"""Gains by chunked prefill (appendix D)."""


def _paper_value(item: str, column: str = "value") -> str:
    rows = csv.DictReader(io.StringIO(read_data("hexgen2_figures.csv")))
    return next(row[column] for row in rows if row["item"] == item)


def paper_throughput(system: str, model: str = LLAMA) -> dict[str, float]:
    """Return the paper's output tokens per second of a system, by workload.

    Args:
        system: A name of SYSTEMS.
        model: llama-2-70b for Table 3, opt-30b for Table 4.
    """
    item = f"table3 {system}" if model == LLAMA else f"table4 {system} {model}"
    values = map(float, _paper_value(item).split("/"))
    return dict(zip((*CLASSES, ONLINE), values, strict=False))


def paper_placement(model: str, setting: str) -> str:
    """Return the groups of devices that the paper publishes for a model on a setting (Table 2)."""
    return _paper_value(f"placement {model} {setting}", "setting")


def paper_search_minutes() -> dict[int, float]:
    """Return the minutes of a search by the number of devices (Table 5)."""
    values = map(float, _paper_value("table5 search time").split("/"))
    return dict(zip((64, 128, 192, 256, 320), values, strict=True))


def figures_by_system(cells: Mapping[Cell, CellOutcome], model: str, load: str) -> dict[str, float]:
    """Return our output tokens per second of Table 3's or Table 4's systems for a workload."""
    het, hom = ("het1", "hom") if model == LLAMA else ("hom4", "hom4")
    ours, uniform = cells[model, het, load, 1.0], cells[model, hom, load, 1.0]
    figures = {"hexgen-2": ours.flow, "hexgen": ours.colocated, "distserve": uniform.uniform}
    if model == LLAMA:
        figures["vllm"] = uniform.colocated
    return {system: flow * ours.output for system, flow in figures.items()}


def paper_table(cells: Mapping[Cell, CellOutcome], model: str) -> str:
    """Return the throughput of each system and workload, and HexGen-2's over that system's."""
    rows = []
    for load in CLASSES:
        ours = figures_by_system(cells, model, load)
        for system, figure in ours.items():
            paper, best = paper_throughput(system, model), paper_throughput("hexgen-2", model)
            gains = ["-", "-"]
            if system != "hexgen-2":
                gains = [
                    format_change(best[load], paper[load]),
                    format_change(ours["hexgen-2"], figure),
                ]
            row = [load, system, f"{paper[load]:.0f}", f"{figure:.0f}"]
            rows.append([*row, f"{figure / paper[load]:.1f}", *gains])
    header = [
        "workload", "system", "paper, tokens/s", "ours", "ratio",
        "paper: HexGen-2 over it", "ours",
    ]  # fmt: skip
    return format_table(header, rows)


def online_table(outcomes: Mapping[str, OnlineOutcome]) -> str:
    """Return the throughput of Table 3's systems at 75 % of their peaks."""
    rows = []
    for system, ours in outcomes.items():
        paper = paper_throughput(system)[ONLINE]
        row = [system, f"{ours.peak:.0f}", f"{paper:.0f}", f"{ours.served:.0f}"]
        rows.append([*row, f"{ours.served / paper:.1f}", f"{ours.latency:.1f}"])
    header = ["system", "peak", "paper at 75 %", "ours at 75 %", "ratio", "mean latency s"]
    return format_table(header, rows)


def deadline_table(outcomes: Mapping[str, DeadlineOutcome]) -> str:
    """Return the smallest scales of deadlines that each system keeps."""
    rows = []
    for load, each in outcomes.items():
        for index, percent in enumerate(ATTAINMENT):
            plan, colocated, short = (scales[index] for scales in each[1:])
            row = [load, f"{each.rate:.1f}", f"{percent} %", f"{plan:.1f}"]
            row += [f"{colocated:.1f}", f"{short:.1f}"]
            rows.append([*row, f"{colocated / plan:.1f}", f"{short / plan:.1f}"])
    header = [
        "workload", "requests/s", "requests in time", "plan", "colocated", "colocated, few stages",
        "colocated / plan", "few stages / plan",
    ]  # fmt: skip
    return format_table(header, rows)


def chunking_table(
    outcomes: Mapping[str, ChunkedOutcome], plans: Mapping[str, SimulatedCell]
) -> str:
    """Return the peaks of colocated engines with and without chunked prefill."""
    rows = []
    for load, each in outcomes.items():
        plan = plans[load].plan.simulated
        row = [load, f"{each.whole:.2f}", f"{each.chunked:.2f}"]
        row += [f"{100 * CHUNKING_GAINS[load]:+.0f} %", format_change(each.chunked, each.whole)]
        row += [f"{each.best_whole:.2f}", f"{each.best_chunked:.2f}", f"{plan:.2f}"]
        row += [format_change(plan, each.best_whole), format_change(plan, each.best_chunked)]
        rows.append(row)
    header = [
        "workload", "whole prompts /s", "chunks /s", "paper: gain", "ours", "best, whole /s",
        "best, chunks /s", "plan /s", "plan over whole", "plan over chunks",
    ]  # fmt: skip
    return format_table(header, rows)


def simulation_table(
    cells: Sequence[tuple[str, str, str]], outcomes: Sequence[SimulatedCell]
) -> str:
    """Return estimates beside simulated throughput, of plans and of colocated engines."""
    rows = []
    for (model, cluster, load), outcome in zip(cells, outcomes, strict=True):
        row = [model, cluster, load]
        for run in outcome:
            row += [f"{run.estimate:.2f}", f"{run.simulated:.2f}", f"{100 * run.error:+.0f} %"]
        rows.append([*row, format_change(outcome.plan.simulated, outcome.colocated.simulated)])
    header = [
        "model", "cluster", "workload", "flow /s", "simulated /s", "error",
        "colocated /s", "simulated /s", "error", "simulated plan over colocated",
    ]  # fmt: skip
    return format_table(header, rows)


def rules_table(gains: Mapping[tuple[str, PipelineCapacityRule, str], float]) -> str:
    """Return the gains over the colocated optimum by costs and rule of the capacities."""
    by_rule: dict[tuple[str, str], list[float]] = {}
    for (costs, credit, _), gain in gains.items():
        by_rule.setdefault((costs, str(credit)), []).append(gain)
    rows = [
        [*rule, *(f"{100 * value:+.0f} %" for value in (*values, fmean(values)))]
        for rule, values in by_rule.items()
    ]
    paper, base = paper_throughput("hexgen-2"), paper_throughput("hexgen")
    published = [paper[load] / base[load] - 1 for load in CLASSES]
    shown = [f"{100 * each:+.0f} %" for each in (*published, fmean(published))]
    return format_table(["costs", "credit", *CLASSES, "mean"], [["paper", "-", *shown], *rows])


def scale_table(outcomes: Sequence[ScaleOutcome]) -> str:
    """Return the effort of searches by the number of devices (Table 5)."""
    papers, rows = paper_search_minutes(), []
    for outcome in outcomes:
        paper, ours = papers.get(outcome.num_devices), outcome.cpu_seconds / 60
        row = [str(outcome.num_devices), "-" if paper is None else f"{paper:.2f}", f"{ours:.2f}"]
        row.append("-" if paper is None else f"{ours / paper:.2f}")
        rows.append(
            [*row, str(outcome.num_evaluations), str(outcome.num_flows), f"{outcome.flow:.1f}"]
        )
    header = [
        "devices", "paper, minutes", "ours, minutes of CPU time", "ratio", "partitions",
        "maximum flows", "flow /s",
    ]  # fmt: skip
    return format_table(header, rows)
