"""Tables, claims and the plot of Splitwise's clusters."""

from collections.abc import Iterator
from pathlib import Path

from experiments.claims import ExpectedChange, ExpectedFigure, PaperClaim, relative_change
from experiments.splitwise_designs import (
    BASELINES,
    BatchTask,
    BorderOutcome,
    SearchOutcome,
    budget,
    fluid_optimum,
)
from gllm.plan.pools.planner import scale_cluster
from gllm.sim.hardware.machines import ClusterDesign
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table

Outcomes = dict[tuple[str, str, str], SearchOutcome]
"""By constraint, workload and name of the design."""
Batches = dict[tuple[str, str], tuple[BatchTask, float]]
"""Batch job and its requests per second, by workload and name of the design."""
PAPER_DESIGNS = {
    ("code", "AA"): (55, 15),
    ("code", "HH"): (35, 5),
    ("conversation", "HH"): (25, 15),
    ("conversation", "HA"): (25, 26),
}
"""Prompt and token machines that the paper finds at the power of 40 H100."""
PAPER_BATCH = {"Baseline-A100": 0.89, "AA": 0.89, "Baseline-H100": 0.75, "HH": 0.75}
"""Requests per second and dollar of a batch job in the paper, which names no unit of time."""


def search_table(outcomes: Outcomes) -> str:
    """Return the best clusters under each budget."""
    rows = []
    for (constraint, workload, name), outcome in outcomes.items():
        scale = outcome.task.scale
        cluster = scale_cluster(outcome.cluster, scale)
        base = outcomes["power", workload, "Baseline-H100"].rate
        paper = PAPER_DESIGNS.get((workload, name)) if constraint == "power" else None
        fluid = "" if name in BASELINES else str(scale_cluster(fluid_optimum(outcome.task), scale))
        rows.append(
            [workload, f"{constraint} {budget(constraint, 1):g}", name,
             "" if paper is None else f"{paper[0]}P/{paper[1]}T", str(cluster), fluid,
             f"{outcome.full_rate:.1f}", f"{outcome.rate / base:.2f}" if base else "-",
             f"{cluster.cost:.1f}",
             f"{cluster.power:.1f}", str(cluster.num_machines), str(outcome.num_designs)]
        )  # fmt: skip
    return format_table(
        ["workload", "budget", "design", "paper", "ours", "without queues", "requests/s",
         "x Baseline-H100", "cost", "power", "machines", "points"],
        rows,
    )  # fmt: skip


def border_table(borders: list[BorderOutcome], scale: int) -> str:
    """Return the clusters of least power and cost that serve a rate."""
    rows = []
    for border in borders:
        row = [border.task.workload, f"{scale * border.task.rate:.1f}", border.task.design]
        for cluster in (border.least_power, border.least_cost):
            whole = scale_cluster(cluster, scale)
            row += [str(whole), f"{whole.power:.1f}", f"{whole.cost:.1f}"]
        rows.append(row)
    header = ["workload", "requests/s", "design", "least power", "power", "cost"]
    return format_table([*header, "least cost", "power", "cost"], rows)


def batch_table(batches: Batches) -> str:
    """Return the throughput of batch jobs, and that per cost: paper, ours, ratio of ratios."""
    rows = []
    for (workload, name), (task, rate) in batches.items():
        base = batches[workload, "Baseline-H100"]
        ours = _per_cost(task.cluster, rate) / _per_cost(base[0].cluster, base[1])
        paper = PAPER_BATCH[name] / PAPER_BATCH["Baseline-H100"]
        rows.append(
            [workload, name, f"{rate:.1f}", f"{_per_cost(task.cluster, rate):.3f}",
             f"{paper:.2f}", f"{ours:.2f}", f"{ours / paper:.2f}"]
        )  # fmt: skip
    return format_table(
        ["workload", "cluster", "requests/s", "per $/h", "paper, x Baseline-H100", "ours", "ratio"],
        rows,
    )


def llama_table(outcomes: Outcomes, rates: dict[str, float], scale: int) -> str:
    """Return the rates of Llama-2-70B at the paper's size beside those of BLOOM-176B."""
    if not rates:
        return "Not measured."
    rows = []
    for name, rate in rates.items():
        bloom = outcomes["power", "conversation", name]
        base = outcomes["power", "conversation", "Baseline-H100"].rate
        ratios = [
            f"{value / other:.2f}" if other else "-"
            for value, other in ((rate, rates["Baseline-H100"]), (bloom.rate, base))
        ]
        cluster = str(scale_cluster(bloom.cluster, scale))
        rows.append([name, cluster, f"{scale * rate:.1f}", f"{bloom.full_rate:.1f}", *ratios])
    header = ["design", "cluster", "Llama-2-70B, requests/s", "BLOOM-176B, requests/s"]
    return format_table([*header, "Llama, x Baseline-H100", "BLOOM, x Baseline-H100"], rows)


def _per_cost(cluster: ClusterDesign, rate: float) -> float:
    return rate / cluster.dollars_per_hour


def cluster_claims(outcomes: Outcomes, batches: Batches) -> list[PaperClaim]:
    """Return the paper's figures of scaled clusters beside ours."""
    return [*_design_claims(outcomes), *_batch_claims(batches)]


def _design_claims(outcomes: Outcomes) -> Iterator[PaperClaim]:
    for (workload, name), paper in PAPER_DESIGNS.items():
        outcome = outcomes.get(("power", workload, name))
        if outcome is not None and workload == "code":
            whole = scale_cluster(outcome.cluster, outcome.task.scale)
            for kind, count, ours in zip(
                ("prompt", "token"), paper, (whole.num_prompt, whole.num_token), strict=True
            ):
                yield PaperClaim(
                    f"{workload}, {name}: {kind} machines", ExpectedFigure(count, "", 0), ours
                )


def _batch_claims(batches: Batches) -> Iterator[PaperClaim]:
    for workload in dict.fromkeys(workload for workload, _ in batches):
        if (workload, "AA") in batches and (workload, "HH") in batches:
            values = []
            for name in ("AA", "HH"):
                task, rate = batches[workload, name]
                values.append(_per_cost(task.cluster, rate))
            paper = relative_change(PAPER_BATCH["AA"], PAPER_BATCH["HH"])
            yield PaperClaim(
                f"batch job, {workload}: requests per second and dollar of AA beside HH",
                ExpectedChange(paper, is_ratio=True),
                relative_change(*values),
            )


def plot_rates(outcomes: Outcomes, path: Path) -> None:
    """Plot the highest rates under the power budget."""
    bars: dict[str, dict[str, float]] = {}
    for (constraint, workload, name), outcome in outcomes.items():
        if constraint == "power":
            bars.setdefault(workload, {})[name] = outcome.full_rate
    plot_bars(bars, path, "requests/s within nine SLOs", "Clusters with the power of 40 DGX-H100")
