"""HexGen-2: plans for unlike devices beside the throughput that the paper reports."""

from gllm.experiments.base import ExperimentOptions, ExperimentResult
from gllm.experiments.claims import ExpectedChange, ExpectedLimit, PaperClaim, relative_change
from gllm.experiments.hexgen2_cases import (
    SETTINGS,
    CellOutcome,
    compare_searches,
    measure_cell,
    measure_scale,
    simulate_cell,
)
from gllm.experiments.hexgen2_tables import (
    bandwidth_table,
    budget_table,
    plot_gains,
    scale_table,
    search_table,
    simulation_table,
    throughput_table,
)
from gllm.experiments.parallel import map_parallel
from gllm.plan.hetero.workload import CLASSES

REFERENCE = 'Jiang et al., "HexGen-2", ICLR 2025 (arXiv 2502.07903)'
MODEL = "llama-2-70b"
SETTING = """\
Llama-2-70B. Workloads are the requests of Azure's conversations with prompts above (HP) or up to
(LP) 512 tokens, and outputs above (HD) or up to (LD) 128. Costs are the simulator's roofline, the
batch is what memory holds, prices are HexGen-2's. Latencies and bandwidths of the links are
assumptions (`gllm/plan/data/hexgen2_clusters.yaml`): the paper's matrices are pictures. Figures are
output tokens per second at the maximum flow; *colocated* is the best division into engines that run
both phases (the optimum of HexGen's search), *DistServe* equal replicas of each phase, *vLLM* the
best colocated engines, both on 8 x H100."""
NOTES = """\
- *Absolute figures* are above the paper's by up to an order of magnitude where outputs are long. A
  batch here is as large as memory allows (up to 512 requests), and the paper's figures are those of
  its engine.
- *Setting 1.* The paper's text has 4 L40 and 8 A6000, but both of its placements use 8 L40 and
  4 A6000, whose price fits the budget (28.82 $/h for 28.8); the shipped cluster `het1-placed` has
  these.
- *The order of changes.* The table has the guided order beside the same changes in random order,
  and beside swaps, moves and flips without merging and splitting.
- *The flow ignores the memory of prefill replicas*, which hold prompts until they are fetched.
  Where it holds few prompts, as OPT-30B on one H100, the simulation serves less than the flow."""


def run(options: ExperimentOptions) -> ExperimentResult:
    """Plan all settings, compare searches and simulate plans."""
    settings = SETTINGS[:1] if options.quick else SETTINGS
    cells = [(MODEL, cluster, workload, 1.0) for cluster in settings for workload in CLASSES]
    cells += [
        (MODEL, cluster, workload, 1.0) for cluster in ("het5", "hom") for workload in CLASSES
    ]
    cells += [(MODEL, "het1", workload, factor) for factor in (0.5, 2.0) for workload in CLASSES]
    outcomes = map_parallel(measure_cell, cells, options.jobs, options.progress)
    by_cell = dict(zip(cells, outcomes, strict=True))
    simulated = [(MODEL, cluster, load) for cluster in settings for load in ("HPLD", "HPHD")]
    runs = map_parallel(simulate_cell, simulated, options.jobs, options.progress)
    num_seeds = 3 if options.quick else 15
    searches = compare_searches(num_seeds)
    scales = [measure_scale(factor) for factor in ((1,) if options.quick else (1, 3))]
    text = (
        f"{SETTING}\n\n## Throughput\n\n{throughput_table(by_cell, settings)}\n\n"
        f"## Bandwidth\n\nSetting 1 with every bandwidth halved and doubled.\n\n"
        f"{bandwidth_table(by_cell)}\n\n"
        f"## Budget\n\n{budget_table(by_cell)}\n\n"
        f"## Simulation\n\n{simulation_table(simulated, runs)}\n\n"
        f"## Search\n\nHPHD on setting 1 from the same first partition, {num_seeds} seeds: mean "
        f"flow in requests/s after a number of partitions.\n\n{search_table(searches)}\n\n"
        f"Partitions that are compared until no change improves the first local optimum, on "
        f"multiples of setting 1:\n\n{scale_table(scales)}\n\n"
        f"## Misses and slips\n\n{NOTES}"
    )
    claims = _claims(by_cell, settings, [run.error for run in runs])
    return ExperimentResult(
        "HexGen-2: prefill and decode on unlike devices",
        text,
        claims,
        {"hexgen2.svg": lambda path: plot_gains(by_cell, settings, path)},
        reference=REFERENCE,
    )


def _claims(
    cells: dict[tuple[str, str, str, float], CellOutcome],
    settings: tuple[str, ...],
    errors: list[float],
) -> list[PaperClaim]:
    ours = [cells[MODEL, cluster, load, 1.0] for cluster in settings for load in CLASSES]
    gains = [each.flow / each.colocated - 1 for each in ours]
    hom = {load: cells[MODEL, "hom", load, 1.0] for load in CLASSES}
    het1 = {load: cells[MODEL, "het1", load, 1.0] for load in CLASSES}
    het5 = {load: cells[MODEL, "het5", load, 1.0] for load in CLASSES}
    over_uniform = [relative_change(het1[load].flow, hom[load].uniform) for load in CLASSES]
    cheap = [relative_change(het5[load].flow, hom[load].uniform) for load in CLASSES]
    no_worse = sum(gain >= -1e-6 for gain in gains) / len(gains)
    near = sum(abs(error) <= 0.15 for error in errors) / len(errors)
    return [
        PaperClaim("over HexGen, mean", ExpectedChange(0.4), sum(gains) / len(gains)),
        PaperClaim("over HexGen, largest", ExpectedChange(0.5), max(gains)),
        PaperClaim(
            "setting 1 over DistServe on 8 x H100, mean", ExpectedChange(0.3), sum(over_uniform) / 4
        ),
        PaperClaim(
            "setting 5 at 70 % of the budget over DistServe on 8 x H100, mean",
            "comparable",
            None,
            f"{100 * sum(cheap) / 4:+.0f} %",
        ),
        PaperClaim(
            "cells in which the plan is at least the colocated one",
            ExpectedLimit(0.75, True, digits=0),
            no_worse,
        ),
        PaperClaim(
            "simulated plans within 15 % of the flow", ExpectedLimit(1.0, True, digits=0), near
        ),
    ]
