"""HexGen-2's published groups of devices (Table 2) beside those of the search."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.hexgen2_cases import LLAMA, OPT
from experiments.hexgen2_paper import paper_placement
from experiments.hexgen2_text import REFERENCE
from experiments.parallel import map_parallel
from gllm.plan.hetero.evaluation import PlanEvaluator, TypedGroup, make_partition
from gllm.plan.hetero.planner import make_planner, plan_replicas
from gllm.plan.hetero.replicas import Phase, PipelineCapacityRule, Replica
from gllm.plan.hetero.workload import CLASSES
from gllm.plan.nodes import DeviceCluster, Group, named_cluster
from gllm.plan.problem import ServiceProblem
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table

PLACED = {
    (LLAMA, "het1"): "het1-placed",
    (LLAMA, "het2"): "het2",
    (LLAMA, "het3"): "het3",
    (LLAMA, "het4"): "het4",
    (OPT, "het1"): "het1-placed",
    (OPT, "het4"): "het4",
}
"""Shipped cluster that has the devices of a published placement."""
PAPER_NAMES = {LLAMA: "llama2-70b", OPT: "opt-30b"}
KINDS = {"H100": "H100", "A100-80G": "A100", "L40": "L40", "A6000": "A6000"}
"""Names of devices in the paper, by ours."""
GROUP = re.compile(r"(?:(\d+)x\()?((?:\d+[A-Z]\w+\+?)+)\)? TP(\d+)PP(\d+)")
"""Such as `2x(2L40+1A6000) TP1PP3`."""
PLACEMENT_NOTE = """\
The groups of devices that the paper publishes, and those of the best partition that the search
finds: by the paper's costs (Table 1 of the paper, batches *credited* to each stage: a reading of
its formula), and by ours (roofline, pipelined). Both sides
have the flow of the same costs, which also choose the layout of a group: TP and PP of the paper's
groups are those of its text and not the ones that were evaluated. The workload of the paper's
placements is not stated: all four are shown, and the one with most groups in common counts. *Of the
paper's*: published groups that the search has too, by phase and kinds of devices. *Over the
paper's*: requests/s of the search's groups over those of the published ones. Setting 1 is the
cluster that both of its placements fill, 8 L40 and 4 A6000."""


class PlacedGroup(NamedTuple):
    """A published group of devices."""

    phase: Phase
    devices: Mapping[str, int]
    """Number by the paper's name of the device."""
    tp: int
    pp: int


class PlacementOutcome(NamedTuple):
    """Flows of the published groups and of the search's, in requests per second."""

    paper: float
    found: float
    groups: str
    """Those of the search, as text."""
    num_common: int
    """Published groups that the search has too."""
    num_published: int

    @property
    def common_share(self) -> float:
        """Share of the published groups that the search has too."""
        return self.num_common / self.num_published

    @property
    def gain(self) -> float | None:
        """Flow of the search over that of the published groups; None if those serve nothing."""
        return self.found / self.paper if self.paper else None


PlacementKey = tuple[str, str, str]
"""Model, setting and workload."""
CostRule = tuple[str, PipelineCapacityRule]
"""Cost model and formula of a pipeline's capacity."""
PAPER_RULE: CostRule = ("table1", PipelineCapacityRule.CREDITED)
OUR_RULE: CostRule = ("roofline", PipelineCapacityRule.PIPELINED)


def parse_placement(text: str) -> list[PlacedGroup]:
    """Return the groups of a published placement.

    Args:
        text: Such as `P: 1H100+1A100 TP1PP2; 2x(2L40) TP1PP2 | D: 4L40 TP2PP2`.

    Raises:
        ValueError: A group cannot be read.
    """
    groups = []
    for side, phase in zip(text.split("|"), (Phase.PREFILL, Phase.DECODE), strict=True):
        for part in side.partition(":")[2].split(";"):
            match = GROUP.fullmatch(part.strip())
            if not match:
                raise ValueError(f"{part.strip()!r} is no group of devices")
            count, devices, tp, pp = match.groups()
            numbers = {
                name: int(number) for number, name in re.findall(r"(\d+)([A-Z]\w*)", devices)
            }
            groups += [PlacedGroup(phase, numbers, int(tp), int(pp))] * int(count or 1)
    return groups


def place_groups(cluster: DeviceCluster, groups: Sequence[PlacedGroup]) -> list[TypedGroup]:
    """Return the groups on the nodes of a cluster, each on as few nodes as are free for it.

    Raises:
        ValueError: The cluster has too few devices of a kind.
    """
    free = [node.num_devices for node in cluster.nodes]
    placed = []
    for group in groups:
        counts = [0] * len(free)
        for name, number in group.devices.items():
            missing = number
            nodes = [i for i, node in enumerate(cluster.nodes) if KINDS[node.device] == name]
            for index in sorted(nodes, key=lambda i: (free[i] < number, -free[i])):
                used = min(missing, free[index])
                counts[index] += used
                free[index] -= used
                missing -= used
            if missing:
                raise ValueError(f"{missing} {name} are missing for {group}")
        placed.append((group.phase, Group(counts)))
    return placed


def measure_placement(case: tuple[PlacementKey, CostRule]) -> PlacementOutcome:
    """Return the flows of a published placement and of the search's, by the same costs."""
    (model, setting, workload), rule = case
    cluster = named_cluster(PLACED[model, setting])
    problem = ServiceProblem(model, workload, cluster)
    planner = make_planner(problem, *rule)
    groups = parse_placement(paper_placement(PAPER_NAMES[model], setting))
    paper = PlanEvaluator(planner).evaluate(make_partition(place_groups(cluster, groups)))
    ours = plan_replicas(problem, planner).best
    published = Counter((each.phase, frozenset(each.devices.items())) for each in groups)
    found = Counter(
        (replica.phase, frozenset(_count_devices(cluster, replica).items()))
        for replica in (*ours.prefill, *ours.decode)
    )
    return PlacementOutcome(
        paper.score.flow,
        ours.score.flow,
        f"P: {_describe(cluster, ours.prefill)}; D: {_describe(cluster, ours.decode)}",
        (published & found).total(),
        len(groups),
    )


def _describe(cluster: DeviceCluster, replicas: Sequence[Replica]) -> str:
    """Return replicas as text, equal ones once."""
    return ", ".join(
        f"{count} x ({text})" if count > 1 else text
        for text, count in Counter(_describe_one(cluster, each) for each in replicas).items()
    )


def _describe_one(cluster: DeviceCluster, replica: Replica) -> str:
    devices = "+".join(f"{count}{name}" for name, count in _count_devices(cluster, replica).items())
    return f"{devices} {replica.degrees.replace(' ', '')}"


def _count_devices(cluster: DeviceCluster, replica: Replica) -> Counter[str]:
    """Return the number of devices of a replica by the paper's names."""
    counts: Counter[str] = Counter()
    for node, count in zip(cluster.nodes, replica.group, strict=True):
        counts[KINDS[node.device]] += count
    return +counts


Placements = Mapping[tuple[PlacementKey, CostRule], PlacementOutcome]


def published_table(placements: Placements) -> str:
    """Return the published groups."""
    keys = dict.fromkeys(key[:2] for key, _ in placements)
    rows = [
        [model, setting, paper_placement(PAPER_NAMES[model], setting).replace(" | ", "; ")]
        for model, setting in keys
    ]
    return format_table(["model", "setting", "groups of the paper"], rows)


def placement_table(placements: Placements) -> str:
    """Return the groups of the searches by both costs."""
    rows = []
    for key in dict.fromkeys(key for key, _ in placements):
        row = list(key)
        for rule in (PAPER_RULE, OUR_RULE):
            each = placements[key, rule]
            gain = "-" if each.gain is None else f"{each.gain:.2f} x"
            row += [each.groups, f"{each.num_common} of {each.num_published}", gain]
        rows.append(row)
    header = ["model", "setting", "workload"]
    for name in ("the paper's costs", "our costs"):
        header += [f"groups by {name}", "of the paper's", "over the paper's"]
    return format_table(header, rows)


def placement_claims(placements: Placements) -> list[PaperClaim]:
    """Return which published groups a search finds, and that it finds none that are worse.

    The latter is an aim of this project. Published groups that serve nothing by the same costs
    count as ones that the search's are better than.
    """
    claims = []
    for setting in dict.fromkeys(key[:2] for key, _ in placements):

        def most_common(rule: CostRule, setting: tuple[str, str] = setting) -> float:
            return max(
                each.common_share
                for (key, other), each in placements.items()
                if key[:2] == setting and other == rule
            )

        claims.append(
            PaperClaim(
                f"Table 2: {setting[0]}, {setting[1]}: the paper's groups that the search has too",
                ExpectedLimit(1.0, True, digits=0, name="paper"),
                most_common(PAPER_RULE),
                beside={"by our costs": f"{100 * most_common(OUR_RULE):.0f} %"},
            )
        )
    for rule, name in ((PAPER_RULE, "the paper's costs"), (OUR_RULE, "our costs")):
        gains = [
            each.gain
            for (_, other), each in placements.items()
            if other == rule and each.gain is not None
        ]
        if gains:
            claims.append(
                PaperClaim(
                    f"Table 2: least flow of the search's groups over the paper's, by {name}",
                    ExpectedLimit(1.0, True, "x", 2),
                    min(gains),
                )
            )
    return claims


def run(options: ExperimentOptions) -> ExperimentResult:
    """Evaluate the published placements, search, and return the page."""
    loads = CLASSES[:1] if options.quick else CLASSES
    keys = list(PLACED)[:1] if options.quick else PLACED
    placed = [
        ((*key, load), rule) for key in keys for load in loads for rule in (PAPER_RULE, OUR_RULE)
    ]
    found = map_parallel(measure_placement, placed, options.jobs, options.progress, "placement")
    placements = dict(zip(placed, found, strict=True))
    return ExperimentResult(
        "HexGen-2: groups of devices beside the paper's",
        f"Not simulated: closed forms. {PLACEMENT_NOTE}\n\n{published_table(placements)}\n\n"
        + placement_table(placements),
        placement_claims(placements),
        {"hexgen2-placements.svg": lambda path: _plot(placements, path)},
        reference=REFERENCE,
    )


def _plot(placements: Placements, path: Path) -> None:
    """Plot the flow of the search's groups over that of the published ones, by our costs."""
    bars: dict[str, dict[str, float]] = {}
    for ((model, setting, load), rule), each in placements.items():
        if rule == OUR_RULE:
            bars.setdefault(load, {})[f"{model}, {setting}"] = each.gain or 0.0
    plot_bars(bars, path, "search / paper", "Flow of the groups by our costs")
