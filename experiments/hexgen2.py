"""HexGen-2: plans for unlike devices beside the throughput that the paper reports."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.hexgen2_cases import (
    LLAMA,
    OPT,
    SETTINGS,
    Cell,
    CellOutcome,
    ScaleOutcome,
    compare_searches,
    measure_cell,
    measure_rule,
    measure_scale,
)
from experiments.hexgen2_claims import make_claims
from experiments.hexgen2_paper import (
    SYSTEMS,
    chunking_table,
    deadline_table,
    online_table,
    paper_table,
    rules_table,
    scale_table,
    simulation_table,
)
from experiments.hexgen2_simulated import (
    DEADLINE_WORKLOADS,
    ChunkedOutcome,
    DeadlineOutcome,
    OnlineOutcome,
    SimulatedCell,
    compare_chunking,
    compare_deadlines,
    serve_online,
    simulate_cell,
)
from experiments.hexgen2_tables import (
    bandwidth_table,
    budget_table,
    plot_gains,
    search_table,
    throughput_table,
)
from experiments.hexgen2_text import (
    BANDWIDTH,
    CAUSES,
    CHUNKING,
    DEADLINES,
    NOTES,
    ONLINE,
    REFERENCE,
    RULES_TEXT,
    SCALE,
    SEARCH,
    SETTING,
    SIMULATION,
)
from experiments.parallel import map_parallel
from gllm.plan.hetero.replicas import PipelineCapacityRule
from gllm.plan.hetero.search import SearchResult
from gllm.plan.hetero.workload import CLASSES

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
RULES = (
    ("roofline", PipelineCapacityRule.PIPELINED),
    ("roofline", PipelineCapacityRule.LITERAL),
    ("table1", PipelineCapacityRule.PIPELINED),
    ("table1", PipelineCapacityRule.LITERAL),
    ("table1", PipelineCapacityRule.CREDITED),
)
"""Costs and rules of the capacities that are compared."""
SCALES = (20, 64, 128)
"""Numbers of devices of the searches; larger ones would take most of the page's time."""


class PageFigures(NamedTuple):
    """Everything that the page shows."""

    settings: Sequence[str]
    cells: Mapping[Cell, CellOutcome]
    simulated: Mapping[tuple[str, str, str], SimulatedCell]
    chunking: Mapping[str, ChunkedOutcome]
    online: Mapping[str, OnlineOutcome]
    deadlines: Mapping[str, DeadlineOutcome]
    rules: Mapping[tuple[str, PipelineCapacityRule, str], float]
    searches: Mapping[str, Sequence[SearchResult]]
    scales: Sequence[ScaleOutcome]


def run(options: ExperimentOptions) -> ExperimentResult:
    """Plan all settings, compare searches and simulate plans."""
    figures = _measure(options)
    return ExperimentResult(
        "HexGen-2: prefill and decode on unlike devices",
        _text(figures),
        make_claims(
            figures.cells,
            figures.settings,
            figures.simulated,
            figures.chunking,
            figures.online,
            figures.deadlines,
            figures.searches,
        ),
        {"hexgen2.svg": lambda path: plot_gains(figures.cells, figures.settings, path)},
        reference=REFERENCE,
    )


def _measure(options: ExperimentOptions) -> PageFigures:
    def by_item(function: Callable[[Item], Outcome], items: Sequence[Item]) -> dict[Item, Outcome]:
        outcomes = map_parallel(function, items, options.jobs, options.progress)
        return dict(zip(items, outcomes, strict=True))

    settings = SETTINGS[:1] if options.quick else SETTINGS
    cells = [(LLAMA, cluster, load, 1.0) for cluster in settings for load in CLASSES]
    cells += [(LLAMA, cluster, load, 1.0) for cluster in ("het5", "hom") for load in CLASSES]
    cells += [(LLAMA, "het1", load, factor) for factor in (0.5, 2.0) for load in CLASSES]
    cells += [(OPT, "hom4", load, 1.0) for load in CLASSES]
    loads = CLASSES[:1] if options.quick else CLASSES
    simulated = [(LLAMA, cluster, load) for cluster in settings for load in loads]
    simulated += [(OPT, "case-e", load) for load in loads]
    rules = [(*rule, load) for rule in RULES for load in CLASSES]
    return PageFigures(
        settings,
        by_item(measure_cell, cells),
        by_item(simulate_cell, simulated),
        by_item(compare_chunking, loads),
        by_item(serve_online, SYSTEMS),
        by_item(
            compare_deadlines, DEADLINE_WORKLOADS[1:2] if options.quick else DEADLINE_WORKLOADS
        ),
        by_item(measure_rule, rules[: len(CLASSES)] if options.quick else rules),
        compare_searches(3 if options.quick else 15),
        [measure_scale(count) for count in (SCALES[:1] if options.quick else SCALES)],
    )


def _text(figures: PageFigures) -> str:
    """Return all sections."""
    plans = {
        load: outcome
        for (_, cluster, load), outcome in figures.simulated.items()
        if cluster == "het1"
    }
    num_seeds = len(figures.searches["guided"])
    sections = [
        ("Throughput", throughput_table(figures.cells, figures.settings)),
        ("Table 3: Llama-2-70B on setting 1 and 8 x H100", paper_table(figures.cells, LLAMA)),
        ("Table 4: OPT-30B on 4 x H100", paper_table(figures.cells, OPT)),
        ("Bandwidth", BANDWIDTH + bandwidth_table(figures.cells)),
        ("Budget", budget_table(figures.cells)),
        (
            "Simulation",
            SIMULATION
            + simulation_table(list(figures.simulated), list(figures.simulated.values())),
        ),
        ("Chunked prefill", CHUNKING + chunking_table(figures.chunking, plans)),
        ("Online load", ONLINE + online_table(figures.online)),
        ("Deadlines", DEADLINES + deadline_table(figures.deadlines)),
        ("Rules of the estimate", RULES_TEXT + rules_table(figures.rules)),
        ("Search", SEARCH.format(num_seeds=num_seeds) + search_table(figures.searches)),
        ("Table 5: time of a search", SCALE + scale_table(figures.scales)),
        ("Why the gain is smaller", CAUSES),
        ("Misses and slips", NOTES),
    ]
    return "\n\n".join([SETTING, *(f"## {title}\n\n{text}" for title, text in sections)])
