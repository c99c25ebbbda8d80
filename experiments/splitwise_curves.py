"""Splitwise's figures of provisioning (12), of transfers (14, 15) and of latency by load (16)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedFigure, ExpectedLimit, PaperClaim
from experiments.parallel import map_parallel
from experiments.splitwise_mixed import LOCAL_POLICY, measure_margins
from experiments.splitwise_phases import MODEL_NAMES, VISIBLE_SECONDS, transfer_costs
from experiments.transfer_mode import TransferMode
from gllm.plan.pools.clusters import (
    WORKLOADS,
    ClusterPoint,
    SampleSize,
    simulate_point,
)
from gllm.plan.pools.design_search import find_cheapest_cluster
from gllm.sim.costs.splitwise import read_splitwise_profile
from gllm.sim.hardware.machines import ClusterDesign, machine_pair, read_machine_types
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table
from gllm.sim.metrics.slowdowns import SloMargin, worst_margin
from gllm.sim.workloads.requests import make_workload

REFERENCE = 'Patel et al., "Splitwise", ISCA 2024 (arXiv 2311.18677)'
PROVISIONED_RATE = 70.0
"""Requests of code per second in Figure 12."""
PAPER_CLUSTER = (27, 3)
"""Prompt and token machines of Figure 12's cheapest Splitwise-HH cluster."""
PROMPT_COUNTS, TOKEN_COUNTS = range(18, 31, 6), range(1, 5)
"""Machines of the map."""
LEAST_MACHINES, MOST_MACHINES = (12, 1), (40, 6)
"""Numbers of prompt and token machines between which the cheapest cluster is searched. Machines of
the mixed pool help out, so that either pool may be smaller than its own load needs."""
SEEDS = (0, 1)
"""Samples of lengths and arrivals with which the cheapest cluster is searched."""
PROMPT_TOKENS = (128, 256, 512, 1024, 1500, 2048, 4096)
"""Lengths of Figure 14."""
MAX_SHARE = 0.07
"""Paper: a transfer takes less than this share of its prompt's time."""
OVERHEAD = {TransferMode.SERIALIZED: 0.03, TransferMode.PER_LAYER: 0.008}
"""Paper: rise of the end-to-end latency of code by the transfer, at most and as measured."""
NUM_LENGTHS = 4000
"""Requests whose mean overhead is Figure 15's."""
LOADS = (20, 50, 80, 110)
"""Requests per second of Figure 16."""
CLUSTERS = {
    "code": {
        "Baseline-A100": ("AA", 70, 0),
        "Baseline-H100": ("HH", 40, 0),
        "AA": ("AA", 55, 15),
        "HH": ("HH", 35, 5),
    },
    "conversation": {
        "Baseline-A100": ("AA", 70, 0),
        "Baseline-H100": ("HH", 40, 0),
        "HH": ("HH", 25, 15),
        "HA": ("HA", 25, 26),
    },
}
"""Clusters of equal power whose sizes the paper states: machines, prompt and token machines."""
LOAD_SCALE = 5
"""Clusters of Figure 16 have this share of the paper's machines, and of its load."""
MAP_NOTE = f"""\
Splitwise-HH, BLOOM-176B, {PROVISIONED_RATE:g} requests/s of code at the paper's size, with the
mixed pool of production's router. Cells: the largest of the nine slowdowns over its limit, so that
1.00 and less serves the rate; rows are prompt machines, columns token machines. The cheapest
cluster is searched apart, with {len(SEEDS)} samples of lengths and arrivals."""
TRANSFER_NOTE = """\
Time from the end of the prompt to the end of its transfer, by bandwidth alone: all layers after the
prompt (*serialised*), or each layer beside the next one's computation (*per layer*); *share*: of
the serialised transfer in the time of its prompt. The paper measures a per-layer transfer at 8 ms
on DGX-A100 and 5 ms on DGX-H100 whatever the length: synchronization, which a bandwidth does not
have."""
OVERHEAD_NOTE = f"""\
Mean rise of the end-to-end latency of the first {NUM_LENGTHS:,} requests of Azure's code trace,
each alone on a pair of machines, by the transfer of its KV cache. *With the paper's visible time*:
8 and 5 ms in place of our per-layer transfer."""
LOAD_NOTE = f"""\
The clusters of the power of 40 DGX-H100 whose machines the paper names, at 1/{LOAD_SCALE} of their
size; loads are those of the full size. Slowdowns against a request alone on a DGX-A100, median and
P99 of TTFT, of time between tokens (TBT) and of end-to-end latency; **bold** above the SLO (2 and
6; 1.25 and 5; 1.25 and 5). The figure is a plot without numbers in the paper's text: shown, not
judged."""


class CheapestCluster(NamedTuple):
    """Cheapest cluster for a rate with one sample."""

    num_prompt: int
    num_token: int
    num_simulations: int


def provisioning_point(
    num_prompt: int, num_token: int, size: SampleSize, seed: int = 0
) -> ClusterPoint:
    """Return Figure 12's load on a cluster of DGX-H100."""
    design = ClusterDesign(*machine_pair("HH"), num_prompt, num_token)
    return ClusterPoint(design, "code", PROVISIONED_RATE, size, policy=LOCAL_POLICY, seed=seed)


def measure_worst(point: ClusterPoint) -> float:
    """Return the largest slowdown of a point over its limit."""
    worst = worst_margin(measure_margins(point))
    return worst.slowdown / worst.limit


def find_cheapest(task: tuple[SampleSize, int]) -> CheapestCluster:
    """Return the cheapest cluster that serves the rate; all machines cost the same.

    Args:
        task: Requests of a simulation, and seed.

    Raises:
        ValueError: The largest cluster does not serve the rate.
    """
    size, seed = task
    count = 0

    def serves(design: ClusterDesign) -> bool:
        nonlocal count
        count += 1
        point = provisioning_point(design.num_prompt, design.num_token, size, seed)
        return measure_worst(point) <= 1

    pair = machine_pair("HH")
    found = find_cheapest_cluster(pair, serves, "cost", LEAST_MACHINES, MOST_MACHINES)
    if found is None:
        raise ValueError(f"{MOST_MACHINES} machines do not serve {PROVISIONED_RATE:g} requests/s")
    return CheapestCluster(found.num_prompt, found.num_token, count)


def map_table(worst: Mapping[tuple[int, int], float]) -> str:
    """Return the map of clusters: largest slowdown over its limit."""
    tokens = sorted({num_token for _, num_token in worst})
    rows = [
        [f"{num_prompt}P", *(f"{worst[num_prompt, num_token]:.2f}" for num_token in tokens)]
        for num_prompt in sorted({num_prompt for num_prompt, _ in worst})
    ]
    return format_table(["", *(f"{num_token}T" for num_token in tokens)], rows)


def cheapest_table(found: Sequence[CheapestCluster]) -> str:
    """Return the cheapest cluster of each sample beside the paper's."""
    cost = read_machine_types()["DGX-H100"].cost
    rows = [
        [
            "paper",
            f"{PAPER_CLUSTER[0]}P/{PAPER_CLUSTER[1]}T",
            f"{cost * sum(PAPER_CLUSTER):.1f}",
            "",
        ]
    ]
    rows += [
        [f"sample {seed}", f"{each.num_prompt}P/{each.num_token}T",
         f"{cost * (each.num_prompt + each.num_token):.1f}", str(each.num_simulations)]
        for seed, each in enumerate(found)
    ]  # fmt: skip
    return format_table(["", "cheapest cluster", "cost", "simulations"], rows)


def provisioning_claims(found: Sequence[CheapestCluster]) -> list[PaperClaim]:
    """Return the machines of the cheapest cluster, means over the samples."""
    figures = {
        "prompt machines": (PAPER_CLUSTER[0], [each.num_prompt for each in found]),
        "token machines": (PAPER_CLUSTER[1], [each.num_token for each in found]),
        "machines": (sum(PAPER_CLUSTER), [each.num_prompt + each.num_token for each in found]),
    }
    return [
        PaperClaim(
            f"Figure 12, code at {PROVISIONED_RATE:g} requests/s, HH: {name}",
            ExpectedFigure(paper, "", 1),
            fmean(ours),
            f"({min(ours)} to {max(ours)} over {len(ours)} samples)",
        )
        for name, (paper, ours) in figures.items()
    ]


def transfer_rows() -> tuple[list[list[str]], list[PaperClaim]]:
    """Return the rows of Figure 14, and its claims."""
    rows, claims = [], []
    for model in MODEL_NAMES:
        shares = []
        for name, measured in VISIBLE_SECONDS.items():
            machine = read_machine_types()[name]
            prompt_seconds = read_splitwise_profile(model, machine.device).prompt_seconds
            visible = 0.0
            for num_tokens in PROMPT_TOKENS:
                costs = transfer_costs(model, machine, num_tokens)
                serialised = costs.visible_seconds(TransferMode.SERIALIZED, num_tokens)
                per_layer = costs.visible_seconds(TransferMode.PER_LAYER, num_tokens)
                visible = max(visible, per_layer)
                shares.append(serialised / prompt_seconds(num_tokens))
                rows.append(
                    [f"{model}, {name}", f"{num_tokens:,}", f"{1e3 * serialised:.1f}",
                     f"{1e3 * per_layer:.2f}", f"{100 * shares[-1]:.1f} %"]
                )  # fmt: skip
            claims.append(
                PaperClaim(
                    f"Figure 14, {model}, {name}: longest visible time of a per-layer transfer",
                    ExpectedFigure(1e3 * measured, "ms", 1),
                    1e3 * visible,
                )
            )
        claims.append(
            PaperClaim(
                f"Figure 14, {model}: largest share of a serialised transfer in its prompt's time",
                ExpectedLimit(MAX_SHARE, name="paper"),
                max(shares),
            )
        )
    return rows, claims


def overhead_rows(num_requests: int) -> tuple[list[list[str]], list[PaperClaim]]:
    """Return the rows of Figure 15, and its claims.

    Args:
        num_requests: Requests of the trace.
    """
    jobs = make_workload(WORKLOADS["code"], num_requests)
    rows, claims = [], []
    for model in MODEL_NAMES:
        for name, measured in VISIBLE_SECONDS.items():
            machine = read_machine_types()[name]
            profile = read_splitwise_profile(model, machine.device)
            added: dict[str, list[float]] = {"measured": []}
            for job in jobs:
                num_tokens = job.num_prompt_tokens
                alone = profile.prompt_seconds(num_tokens)
                alone += (job.num_output_tokens - 1) * profile.token_seconds(1)
                costs = transfer_costs(model, machine, num_tokens)
                for mode in TransferMode:
                    rise = costs.visible_seconds(mode, num_tokens) / alone
                    added.setdefault(mode.value, []).append(rise)
                added["measured"].append(measured / alone)
            means = {mode: fmean(rises) for mode, rises in added.items()}
            serialised, per_layer = (means[mode.value] for mode in OVERHEAD)
            rows.append(
                [f"{model}, {name}", "<= 3 %", f"{100 * serialised:.2f} %", "0.8 %",
                 f"{100 * per_layer:.2f} %", f"{100 * means['measured']:.2f} %"]
            )  # fmt: skip
            title = f"Figure 15, {model}, {name}: end-to-end latency of code"
            claims += [
                PaperClaim(
                    f"{title}, serialised",
                    ExpectedLimit(OVERHEAD[TransferMode.SERIALIZED], name="paper"),
                    serialised,
                ),
                PaperClaim(
                    f"{title}, per layer",
                    ExpectedFigure(OVERHEAD[TransferMode.PER_LAYER], "%"),
                    per_layer,
                ),
            ]
    return rows, claims


Curves = dict[tuple[str, str, float], list[SloMargin]]
"""Slowdowns by workload, name of the cluster and requests per second at full size."""


def load_points(size: SampleSize) -> dict[tuple[str, str, float], ClusterPoint]:
    """Return the simulations of Figure 16."""
    points = {}
    for workload, clusters in CLUSTERS.items():
        for name, (pair, *counts) in clusters.items():
            design = ClusterDesign(*machine_pair(pair), *(ceil(n / LOAD_SCALE) for n in counts))
            policy = "vllm" if design.num_token else LOCAL_POLICY
            point = ClusterPoint(design, workload, 1.0, size, policy=policy)
            for load in LOADS:
                points[workload, name, float(load)] = replace(point, rate=load / LOAD_SCALE)
    return points


def measure_load(point: ClusterPoint) -> list[SloMargin]:
    """Return the nine slowdowns of a point."""
    return simulate_point(point).margins


def load_table(curves: Curves) -> str:
    """Return the slowdowns by cluster and load."""
    rows = []
    for (workload, name, load), margins in curves.items():
        shown = [
            f"**{each.slowdown:.2f}**" if not each.is_met else f"{each.slowdown:.2f}"
            for each in margins
            if each.percent in (50, 99)
        ]
        rows.append([workload, name, f"{load:g}", *shown])
    header = ["workload", "cluster", "requests/s"]
    header += [f"{each} {part}" for each in ("TTFT", "TBT", "E2E") for part in ("P50", "P99")]
    return format_table(header, rows)


def plot_loads(curves: Curves, path: Path) -> None:
    """Plot the median slowdowns of TTFT, TBT and E2E over the load, a row per workload."""
    panels = []
    for workload in dict.fromkeys(workload for workload, _, _ in curves):
        for metric in ("ttft", "tbt", "e2e"):
            series: dict[str, list[tuple[float, float]]] = {}
            for (other, name, load), margins in curves.items():
                if other == workload:
                    value = next(m for m in margins if (m.metric, m.percent) == (metric, 50))
                    series.setdefault(name, []).append((load, value.slowdown))
            panels.append(
                ChartPanel(
                    f"{workload}: {metric.upper()}", "requests/s", "slowdown, median", series
                )
            )
    plot_grid(panels, path, columns=3)


def run(options: ExperimentOptions) -> ExperimentResult:
    """Simulate the maps and curves, and return the page."""
    size = SampleSize(max(8, options.requests // 2), *((0.5,) if options.quick else ()))
    prompts, tokens = PROMPT_COUNTS, TOKEN_COUNTS
    if options.quick:
        prompts, tokens = prompts[-1:], tokens[-1:]
    cells = [(num_prompt, num_token) for num_prompt in prompts for num_token in tokens]
    points = [provisioning_point(*cell, size) for cell in cells]
    worst = map_parallel(measure_worst, points, options.jobs, options.progress, "cluster")
    seeds = SEEDS[:1] if options.quick else SEEDS
    cheapest = (
        [CheapestCluster(*cells[-1], 0)]
        if options.quick
        else map_parallel(
            find_cheapest,
            [(size, seed) for seed in seeds],
            options.jobs,
            options.progress,
            "search",
        )
    )
    loads = load_points(size)
    if options.quick:
        loads = dict(list(loads.items())[:2])
    margins = map_parallel(measure_load, list(loads.values()), options.jobs, options.progress)
    curves = dict(zip(loads, margins, strict=True))
    transfers, transfer_claims = transfer_rows()
    overheads, overhead_claims = overhead_rows(NUM_LENGTHS)
    header = ["", "prompt tokens", "serialised, ms", "per layer, ms", "share"]
    overhead_header = ["", "paper, serialised", "ours", "paper, per layer", "ours",
                       "with the paper's visible time"]  # fmt: skip
    sections = {
        "Figure 12: clusters for a rate of code": (
            f"{MAP_NOTE}\n\n{map_table(dict(zip(cells, worst, strict=True)))}\n\n"
            f"{cheapest_table(cheapest)}"
        ),
        "Figure 14: transfer by prompt": f"{TRANSFER_NOTE}\n\n{format_table(header, transfers)}",
        "Figure 15: end-to-end latency": (
            f"{OVERHEAD_NOTE}\n\n{format_table(overhead_header, overheads)}"
        ),
        "Figure 16: latency by load": f"{LOAD_NOTE}\n\n{load_table(curves)}",
    }
    setting = (
        "Simulated, with the costs, machines and SLOs of [splitwise](splitwise.md). A simulation "
        f"has {size.requests:,} requests, or as many as arrive in {size.seconds:g} s."
    )
    return ExperimentResult(
        "Splitwise: provisioning, transfers and latency by load",
        "\n\n".join([setting, *(f"## {title}\n\n{text}" for title, text in sections.items())]),
        [*provisioning_claims(cheapest), *transfer_claims, *overhead_claims],
        {"splitwise-curves.svg": lambda path: plot_loads(curves, path)},
        reference=REFERENCE,
    )
