"""Splitwise's clusters with conversations at the paper's size, where its claims are judged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from experiments.claims import ExpectedChange, ExpectedFigure, PaperClaim, relative_change
from experiments.parallel import map_parallel
from experiments.splitwise_designs import POLICY, SearchOutcome, budget
from experiments.splitwise_smallest import find_smallest
from experiments.splitwise_tables import PAPER_DESIGNS
from gllm.plan.pools.clusters import (
    RATE_STEP,
    ClusterPoint,
    SampleSize,
    fluid_rate,
    highest_rate,
    simulate_point,
)
from gllm.plan.pools.design_search import maximal_designs
from gllm.plan.pools.planner import scale_cluster
from gllm.sim.hardware.machines import ClusterDesign, machine_pair
from gllm.sim.metrics.report import format_table

WORKLOAD = "conversation"
PROMPT_STEP = 3
"""Prompt machines by which a split is changed."""
MAX_SPLITS = 4
"""Simulated splits of a design at most."""
LIMIT_FACTOR = 1.3
"""Most machines of a kind, per number that serves the rate without queues. No fewer are tried: they
serve it only in a simulation that ends before its steady state."""
SMALLEST_DESIGNS = ("AA", "HHcap")
"""Designs whose smallest cluster for the rate of Baseline-H100 is searched."""
NOTE = """\
With conversations, at the paper's size. *requests/s*: the highest rate within the nine SLOs, by the
same search; a split in two pools begins with the best one of a fifth of the size, and its prompt
machines change by 3 while the rate rises by a step. *for the rate*: the fewest token machines that
serve the rate of Baseline-H100, then the fewest prompt machines beside them, but of both no fewer
than serve it for ever without queues."""


@dataclass(frozen=True)
class FullRow:
    """One cluster at the paper's size."""

    constraint: str
    """Name of a budget; `rate` for the smallest cluster that serves the rate of Baseline-H100."""
    design: str
    cluster: ClusterDesign
    rate: float
    """Requests per second within the SLOs."""
    num_clusters: int
    """Simulated clusters, this one included."""
    num_simulations: int


@dataclass(frozen=True)
class SmallestTask:
    """Search for the smallest cluster of a design that serves a rate."""

    design: str
    rate: float
    size: SampleSize


def measure_design(outcome: SearchOutcome) -> FullRow:
    """Return the best cluster near the best one of a scaled search, and its rate."""
    task = outcome.task
    cluster = scale_cluster(outcome.cluster, task.scale)
    point = ClusterPoint(
        cluster, task.workload, max(outcome.full_rate, 1.0), task.size, policy=task.policy
    )
    rate, num_simulations = highest_rate(point)
    num_clusters = 1
    if cluster.num_token:
        pair, limit = machine_pair(task.design), budget(task.constraint, 1)
        designs = {
            maximal_design.num_prompt: maximal_design
            for maximal_design in maximal_designs(pair, task.constraint, limit)
        }
        first = cluster
        for step in (PROMPT_STEP, -PROMPT_STEP):
            while num_clusters < MAX_SPLITS:
                other = designs.get(cluster.num_prompt + step)
                if other is None:
                    break
                num_clusters += 1
                num_simulations += 1
                trial = replace(point, design=other, rate=RATE_STEP * rate)
                if not simulate_point(trial).is_served:
                    break
                cluster = other
                rate, count = highest_rate(trial)
                num_simulations += count
            if cluster != first:
                break
    return FullRow(task.constraint, task.design, cluster, rate, num_clusters, num_simulations)


def find_smallest_cluster(task: SmallestTask) -> FullRow:
    """Return the smallest cluster of a design that serves a rate."""
    pair = machine_pair(task.design)
    alone = ClusterDesign(*pair, 1, 10**6), ClusterDesign(*pair, 10**6, 1)
    least_prompt, least_token = (ceil(task.rate / fluid_rate(each, WORKLOAD)) for each in alone)

    def serves(design: ClusterDesign) -> bool:
        point = ClusterPoint(design, WORKLOAD, task.rate, task.size, policy=POLICY)
        return simulate_point(point).is_served

    cluster, count = find_smallest(
        pair,
        serves,
        (least_prompt, least_token),
        (ceil(LIMIT_FACTOR * least_prompt), ceil(LIMIT_FACTOR * least_token)),
    )
    return FullRow("rate", task.design, cluster, task.rate, count, count)


def measure_full_size(
    outcomes: Sequence[SearchOutcome], size: SampleSize, jobs: int, progress: bool
) -> list[FullRow]:
    """Return the clusters at the paper's size.

    Args:
        outcomes: Scaled searches with conversations, that of Baseline-H100 among them.
        size: Requests of a simulation.
        jobs: Processes.
        progress: Print finished searches.
    """
    rows = map_parallel(measure_design, list(outcomes), jobs, progress, "full size")
    rate = next(row.rate for row in rows if row.design == "Baseline-H100")
    tasks = [SmallestTask(name, rate, size) for name in SMALLEST_DESIGNS if rate]
    return rows + map_parallel(find_smallest_cluster, tasks, jobs, progress, "smallest")


def full_size_table(rows: Sequence[FullRow]) -> str:
    """Return the clusters beside Baseline-H100."""
    if not rows:
        return "Not measured."
    base = _find(rows, "power", "Baseline-H100")
    cells = [
        ["for the rate" if row.constraint == "rate" else f"{row.constraint} "
         f"{budget(row.constraint, 1):g}", row.design, str(row.cluster), f"{row.rate:.1f}",
         f"{row.rate / base.rate:.2f}" if base and base.rate else "-",
         "-" if not row.cluster.num_token else f"{fluid_rate(row.cluster, WORKLOAD):.1f}",
         f"{row.cluster.cost:.1f}", f"{row.cluster.power:.1f}", str(row.cluster.num_machines),
         str(row.num_clusters), str(row.num_simulations)]
        for row in rows
    ]  # fmt: skip
    return format_table(
        ["budget", "design", "cluster", "requests/s", "x Baseline-H100", "without queues", "cost",
         "power", "machines", "points", "simulations"],
        cells,
    )  # fmt: skip


def full_size_claims(rows: Sequence[FullRow]) -> list[PaperClaim]:
    """Return the paper's changes beside ours, all at full size."""
    base = _find(rows, "power", "Baseline-H100")
    if base is None:
        return []
    claims = []
    for name in ("HH", "HA"):
        if row := _find(rows, "power", name):
            counts = row.cluster.num_prompt, row.cluster.num_token
            for kind, paper_count, ours in zip(
                ("prompt", "token"), PAPER_DESIGNS[WORKLOAD, name], counts, strict=True
            ):
                expected = ExpectedFigure(paper_count, "", 0)
                claims.append(PaperClaim(f"{WORKLOAD}, {name}: {kind} machines", expected, ours))
    for name, other, constraint, paper in (
        ("AA", "Baseline-A100", "power", 2.15),
        ("HA", "Baseline-H100", "power", 1.18),
        ("AA", "Baseline-H100", "cost", 1.4),
    ):
        row, beside = _find(rows, constraint, name), _find(rows, "power", other)
        if row and beside and beside.rate:
            claims.append(
                PaperClaim(
                    f"{WORKLOAD}, {constraint}: throughput of {name} beside {other}",
                    ExpectedChange(paper - 1, is_ratio=True),
                    relative_change(row.rate, beside.rate),
                )
            )
    for constraint, name, quantity, paper in (
        ("cost", "AA", "power", 0.25),
        ("cost", "AA", "num_machines", 1.0),
        ("power", "HA", "cost", -0.1),
        ("rate", "AA", "cost", -0.25),
        ("rate", "HHcap", "power", -0.25),
    ):
        if row := _find(rows, constraint, name):
            change = relative_change(
                getattr(row.cluster, quantity), getattr(base.cluster, quantity)
            )
            budget_name = "rate of Baseline-H100" if constraint == "rate" else constraint
            label = "space" if quantity == "num_machines" else quantity
            claims.append(
                PaperClaim(
                    f"{WORKLOAD}, {budget_name}: {label} of {name}",
                    ExpectedChange(paper, is_ratio=quantity == "num_machines"),
                    change,
                )
            )
    return claims


def _find(rows: Sequence[FullRow], constraint: str, design: str) -> FullRow | None:
    return next((row for row in rows if (row.constraint, row.design) == (constraint, design)), None)
