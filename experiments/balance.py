"""Throttling by predicted time (`balance`) against throttling by tokens (`throttle`).

Compares them on loads whose tokens differ most in time: code, long documents, a mixture, long
prompts.
"""

from dataclasses import replace
from statistics import fmean
from typing import Any

from experiments.base import OWN_REFERENCE, ExperimentOptions, ExperimentResult, format_change
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.trials import (
    L20_32B,
    SETTINGS,
    SimulationTrial,
    estimate_capacities,
    make_base,
    run_trials,
)
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table, show_value

POLICIES = ("throttle", "balance")
WORKLOADS = (
    "azure-code",
    "arxiv-4k",
    "mixed",
    "azure-conv",
    "sharegpt-like",
    "uniform:2048,15000,16,400",
)
SHARES = (0.5, 0.7, 0.9)
METRICS: dict[str, tuple[str, ...]] = {
    "bubbles": ("bubble_share",),
    "throughput": ("steady_tokens_per_second",),
    "TTFT": ("ttft", "mean"),
    "TPOT": ("tpot", "mean"),
    "ITL p99": ("itl", "p99"),
}
NOISE = 0.01
"""Differences below this are none."""


def get_metric(figures: dict[str, Any], metric: str) -> float:
    """Return a metric of METRICS; bubbles are the mean over stages."""
    value: Any = figures
    for part in METRICS[metric]:
        value = value[part]
    return fmean(value) if isinstance(value, list) else float(value)


def run(options: ExperimentOptions) -> ExperimentResult:
    """All workloads at rising rates."""
    settings = (L20_32B,) if options.quick else (L20_32B, SETTINGS[-1])
    workloads = WORKLOADS[:2] if options.quick else WORKLOADS
    bases = [
        SimulationTrial(setting, workload, "throttle", 1.0, options.requests)
        for setting in settings
        for workload in workloads
    ]
    capacities = estimate_capacities(bases, options)
    trials = [
        replace(base, policy=policy, rate=share * capacities[make_base(base)])
        for base in bases
        for share in (SHARES[:1] if options.quick else SHARES)
        for policy in POLICIES
    ]
    results = run_trials(trials, options)
    rows = []
    changes: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for trial, old, new in zip(trials[::2], results[::2], results[1::2], strict=True):
        cells = []
        for metric in METRICS:
            before, after = get_metric(old, metric), get_metric(new, metric)
            factor = {"bubbles": 100.0, "throughput": 1.0}.get(metric, 1e3)
            changes[metric].append(after / before - 1)
            cells.append(
                f"{show_value(before, factor)} / {show_value(after, factor)} "
                f"({format_change(after, before)})"
            )
        rows.append([str(trial.setting), trial.workload, show_value(trial.rate), *cells])
    header = ["setting", "workload", "rate, 1/s", "bubbles, %", "tokens/s", "TTFT, ms", "TPOT, ms"]
    text = (
        f"Simulated, {options.requests} requests with Poisson arrivals each, at "
        f"{', '.join(map(str, SHARES))} of what throttle serves with all requests at once. "
        "`balance` chooses the size of chunks as `throttle` does, but fills them by predicted time "
        "instead of tokens. Each cell: throttle / balance (change).\n\n"
        + format_table([*header, "ITL p99, ms"], rows)
    )
    points = {
        metric: [(float(i), 100 * each) for i, each in enumerate(values)]
        for metric, values in changes.items()
    }
    return ExperimentResult(
        "Throttling by predicted time",
        text,
        _claims(changes),
        {
            "balance.svg": lambda path: plot_grid(
                [ChartPanel("balance against throttle", "row of the table", "change, %", points)],
                path,
                columns=1,
            )
        },
        reference=OWN_REFERENCE,
    )


def _claims(changes: dict[str, list[float]]) -> list[PaperClaim]:
    """Claim that the policy loses under no load, which a default must not."""
    claims = []
    for metric, values in changes.items():
        gains = [value if metric == "throughput" else -value for value in values]
        wins = sum(gain > NOISE for gain in gains)
        losses = sum(gain < -NOISE for gain in gains)
        note = f"of {len(gains)}, better in {wins}; mean {100 * fmean(values):+.1f} %"
        limit = ExpectedLimit(0, unit="loads", digits=0, name="our own aim, worse")
        claims.append(PaperClaim(metric, limit, losses, note))
    return claims
