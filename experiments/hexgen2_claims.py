"""Claims of HexGen-2 (arXiv 2502.07903) beside our figures."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from experiments.claims import ExpectedChange, ExpectedLimit, PaperClaim, relative_change
from experiments.hexgen2_cases import CHECKPOINTS, LLAMA, OPT, Cell, CellOutcome
from experiments.hexgen2_paper import (
    CHUNKING_GAINS,
    ONLINE,
    SYSTEMS,
    figures_by_system,
    paper_throughput,
)
from experiments.hexgen2_simulated import (
    ONLINE_WORKLOAD,
    ChunkedOutcome,
    DeadlineOutcome,
    OnlineOutcome,
    SimulatedCell,
)
from experiments.hexgen2_tables import count_wins
from gllm.plan.hetero.search import SearchResult
from gllm.plan.hetero.workload import CLASSES

NUM_WINS = 0.8
"""Share of the seeds in which the guided search shall be no worse."""


def make_claims(
    cells: Mapping[Cell, CellOutcome],
    settings: Sequence[str],
    simulated: Mapping[tuple[str, str, str], SimulatedCell],
    chunking: Mapping[str, ChunkedOutcome],
    online: Mapping[str, OnlineOutcome],
    deadlines: Mapping[str, DeadlineOutcome],
    searches: Mapping[str, Sequence[SearchResult]],
) -> list[PaperClaim]:
    """Return all claims."""
    return [
        *_gain_claims(cells, settings, simulated),
        *_table_claims(cells, online),
        *_budget_claims(cells),
        *_chunking_claims(chunking),
        *_deadline_claims(deadlines),
        *_simulation_claims(simulated),
        *_search_claims(searches),
    ]


def _gain_claims(
    cells: Mapping[Cell, CellOutcome],
    settings: Sequence[str],
    simulated: Mapping[tuple[str, str, str], SimulatedCell],
) -> list[PaperClaim]:
    ours = [cells[LLAMA, cluster, load, 1.0] for cluster in settings for load in CLASSES]
    gains = [our.flow / our.colocated - 1 for our in ours]
    run = [
        relative_change(each.plan.simulated, each.colocated.simulated)
        for (model, _, _), each in simulated.items()
        if model == LLAMA
    ]
    no_worse = sum(gain >= 0 for gain in gains) / len(gains)
    return [
        PaperClaim("over HexGen, mean of the estimates", ExpectedChange(0.4), fmean(gains)),
        PaperClaim("over HexGen, largest of the estimates", ExpectedChange(0.5), max(gains)),
        PaperClaim("over HexGen, mean, simulated", ExpectedChange(0.4), fmean(run)),
        PaperClaim("over HexGen, largest, simulated", ExpectedChange(0.5), max(run)),
        PaperClaim(
            "cells in which the plan is at least the colocated one",
            ExpectedLimit(0.75, True, digits=0),
            no_worse,
        ),
    ]


def _budget_claims(cells: Mapping[Cell, CellOutcome]) -> list[PaperClaim]:
    hom = {load: cells[LLAMA, "hom", load, 1.0] for load in CLASSES}
    het1 = {load: cells[LLAMA, "het1", load, 1.0] for load in CLASSES}
    het5 = {load: cells[LLAMA, "het5", load, 1.0] for load in CLASSES}
    over_uniform = [relative_change(het1[load].flow, hom[load].uniform) for load in CLASSES]
    cheap = [relative_change(het5[load].flow, hom[load].uniform) for load in CLASSES]
    return [
        PaperClaim(
            "setting 1 over DistServe on 8 x H100, mean", ExpectedChange(0.3), fmean(over_uniform)
        ),
        PaperClaim(
            "setting 5 at 70 % of the budget over DistServe on 8 x H100, mean",
            "comparable",
            None,
            f"{100 * fmean(cheap):+.0f} %",
        ),
    ]


def _chunking_claims(chunking: Mapping[str, ChunkedOutcome]) -> list[PaperClaim]:
    return [
        PaperClaim(
            f"chunked prefill in colocated engines, {load}",
            ExpectedChange(CHUNKING_GAINS[load]),
            relative_change(each.chunked, each.whole),
        )
        for load, each in chunking.items()
    ]


def _deadline_claims(deadlines: Mapping[str, DeadlineOutcome]) -> list[PaperClaim]:
    if ONLINE_WORKLOAD not in deadlines:
        return []
    each = deadlines[ONLINE_WORKLOAD]
    return [
        PaperClaim(
            "deadline of 90 % of the requests, HexGen's over HexGen-2's, online",
            ExpectedChange(0.5, is_ratio=True),
            relative_change(each.colocated[0], each.plan[0]),
        )
    ]


def _table_claims(
    cells: Mapping[Cell, CellOutcome], online: Mapping[str, OnlineOutcome]
) -> list[PaperClaim]:
    """Return the gains of Tables 3 and 4 over each system."""
    claims = []
    for table, model, systems in (("Table 3", LLAMA, SYSTEMS[1:]), ("Table 4", OPT, SYSTEMS[1:3])):
        ours = {load: figures_by_system(cells, model, load) for load in CLASSES}
        best = paper_throughput("hexgen-2", model)
        for system in systems:
            paper = paper_throughput(system, model)
            gain = fmean(best[load] / paper[load] - 1 for load in CLASSES)
            value = fmean(our["hexgen-2"] / our[system] - 1 for our in ours.values())
            name = f"{table}: estimate over {system}, mean"
            claims.append(PaperClaim(name, ExpectedChange(gain), value))
    for system in SYSTEMS[1:]:
        gain = paper_throughput("hexgen-2")[ONLINE] / paper_throughput(system)[ONLINE] - 1
        value = relative_change(online["hexgen-2"].served, online[system].served)
        name = f"Table 3: online load over {system}"
        claims.append(PaperClaim(name, ExpectedChange(gain), value))
    return claims


def _simulation_claims(
    simulated: Mapping[tuple[str, str, str], SimulatedCell],
) -> list[PaperClaim]:
    near = [abs(each.plan.error) <= 0.15 for each in simulated.values()]
    return [
        PaperClaim(
            "simulated plans within 15 % of the flow",
            ExpectedLimit(1.0, True, digits=0),
            fmean(near),
        )
    ]


def _search_claims(searches: Mapping[str, Sequence[SearchResult]]) -> list[PaperClaim]:
    return [
        PaperClaim(
            f"seeds in which guided is no worse than {name}, after {count}",
            ExpectedLimit(NUM_WINS, True, digits=0),
            count_wins(searches["guided"], searches[name], count) / len(searches[name]),
        )
        for name in ("random swaps, moves, flips", "genetic")
        for count in CHECKPOINTS
    ]
