"""Goodput over several samples of lengths and arrivals: how much one sample says."""

from collections.abc import Sequence
from statistics import fmean

from experiments.base import ExperimentOptions
from experiments.distserve_search import make_task, measure_goodputs
from experiments.distserve_study import WorkloadResult
from gllm.sim.metrics.report import format_table

SEEDS = range(5)
SYSTEMS = ("DistServe", "vLLM++", "colocated")


def measure_seeds(
    result: WorkloadResult,
    options: ExperimentOptions,
    systems: Sequence[str] = SYSTEMS,
    seeds: Sequence[int] = SEEDS,
) -> dict[str, list[float]]:
    """Return goodputs in requests per second per GPU by system, one for each seed.

    Args:
        result: of the workload, with the systems.
        options: of the experiment.
        systems: names of the systems.
        seeds: seeds of the samples.
    """
    tasks = [
        make_task(result.workload, result.systems[name], options, seed)
        for name in systems
        for seed in seeds
    ]
    rates = iter(measure_goodputs(tasks, options))
    return {name: [next(rates) / result.systems[name].num_gpus for _ in seeds] for name in systems}


def seeds_table(result: WorkloadResult, goodputs: dict[str, list[float]]) -> str:
    """Return the goodputs, and DistServe's over each other system's, for the seeds from 0 on."""
    num_seeds = len(goodputs["DistServe"])
    rows = []
    for name, values in goodputs.items():
        ratios = [
            ours / theirs
            for ours, theirs in zip(goodputs["DistServe"], values, strict=True)
            if theirs
        ]
        rows.append(
            [
                name,
                result.systems[name].placement,
                *(f"{value:.3f}" for value in values),
                f"{fmean(values):.3f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-",
            ]
        )
    text = (
        f"{result.workload.name}: goodput in requests/s per GPU with other samples of lengths and "
        "arrivals. The tables above are\nthose of seed 0."
    )
    head = ["system", "placement", *(f"seed {seed}" for seed in range(num_seeds)), "mean"]
    return f"{text}\n\n{format_table([*head, 'DistServe over it, x'], rows)}"
