"""Throttling without its parts: the paper's Figure 15.

Four policies at a rate that was fixed beforehand; real_ablation.py runs the same on this machine.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.base import ExperimentOptions, ExperimentResult, format_change
from experiments.claims import ExpectedChange, PaperClaim, relative_change
from experiments.trials import (
    CAPACITY_LINK,
    L20_32B,
    HardwareSetting,
    SimulationTrial,
    TrialRun,
    plan_rates,
    run_trials,
)
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table, show_value

BASE = "throttle-paper"
"""Baseline of the changes: the paper ablates its own rule."""
POLICIES = (BASE, "throttle-no-wt", "throttle-no-ut", "sarathi", "throttle")
SATURATED = 1.0
"""Share of capacity; fixed before the first run. The others show what the changes depend on."""
SHARES = (SATURATED, 0.8, 0.5)
SETTINGS = (L20_32B, HardwareSetting("qwen2.5-14b", "L20"))
WORKLOADS = ("sharegpt-like", "azure-conv")
TIGHT = 0.25
"""Share of the KV cache in the second half: what UT is for shows where the cache fills up."""
EMULATED_CASES = (("azure-conv", 2.5, 1.0), ("sharegpt-like", 9.5, 1.0), ("azure-conv", 1.8, TIGHT))
"""Workload, requests per second and share of the KV cache on emulated devices, at saturation."""

Changes = dict[str, float]
CLAIMED: dict[str, Changes] = {
    "throttle-no-wt": {"ttft": -0.10, "tpot": 0.44, "e2el": 0.20},
    "throttle-no-ut": {"ttft": 0.22, "tpot": 0.91, "e2el": 0.38},
}
"""The paper's changes against full throttling."""

Groups = dict[str, dict[str, dict[str, Any]]]
"""Figures by setting and policy."""


def run(options: ExperimentOptions) -> ExperimentResult:
    """Two settings, two workloads, all policies; with the whole KV cache and with a part of it."""
    settings = SETTINGS[:1] if options.quick else SETTINGS
    shares = SHARES[:1] if options.quick else SHARES
    bases = [
        SimulationTrial(setting, workload, "throttle", 1.0, options.requests, kv_share=kv_share)
        for setting in settings
        for workload in WORKLOADS
        for kv_share in (1.0, TIGHT)
    ]
    trials: dict[str, list[SimulationTrial]] = {}
    at_saturation = []
    for line in plan_rates(bases, shares, options):
        for share, trial in zip(shares, line, strict=True):
            name = f"{trial.setting}, {trial.workload}, {show_value(trial.rate)}/s"
            name += f", {trial.kv_share} of the cache" if trial.kv_share < 1 else ""
            trials[name] = [replace(trial, policy=policy) for policy in POLICIES]
            if share == SATURATED:
                at_saturation.append(name)
    results = iter(run_trials([t for trial in trials.values() for t in trial], options))
    groups = {name: {t.policy: next(results) for t in each} for name, each in trials.items()}
    saturated = {name: groups[name] for name in at_saturation}
    text = (
        f"Simulated, {options.requests} requests with Poisson arrivals at {SATURATED} of "
        f"throttle's {CAPACITY_LINK}, which was fixed before the first run; at lower rates, and "
        f"with {TIGHT} of the KV cache, to see what the changes depend on. Changes are against "
        f"{BASE}.\n\n" + ablation_table(groups)
    )
    return ExperimentResult(
        "Ablation of token throttling",
        text,
        ablation_claims(saturated),
        ablation_plots(saturated),
    )


def emulated_trials(options: ExperimentOptions) -> list[SimulationTrial]:
    """Return the trials for emulated devices."""
    return [
        SimulationTrial(L20_32B, workload, policy, rate, options.requests, kv_share=kv_share)
        for workload, rate, kv_share in EMULATED_CASES[: 1 if options.quick else None]
        for policy in (BASE, *CLAIMED)
    ]


def emulated_claims(runs: list[TrialRun], policy: str) -> list[PaperClaim]:
    """Return the claims from the runs of `emulated_trials`; all are on the parts of BASE."""
    assert policy == BASE, "the paper ablates its own rule"
    groups: Groups = {}
    for run in runs:
        trial = run.trial
        name = f"{trial.workload}, {show_value(trial.rate)}/s"
        name += f", {trial.kv_share} of the cache" if trial.kv_share < 1 else ""
        groups.setdefault(name, {})[trial.policy] = run.figures
    return ablation_claims(groups)


def ablation_table(groups: Groups) -> str:
    """Figures of each policy, and how far they are from full throttling's."""
    rows = []
    for name, policies in groups.items():
        full = policies[BASE]
        for policy, figures in policies.items():
            cells = [
                f"{show_value(figures[m]['mean'], 1e3)} "
                f"({format_change(figures[m]['mean'], full[m]['mean'])})"
                for m in ("ttft", "tpot", "e2el")
            ]
            cells.append(show_value(figures["itl"]["p99"], 1e3))
            cells.append(show_value(figures["steady_tokens_per_second"]))
            cells.append(show_value(figures["tokens_per_step_variation"]))
            cells += [show_value(figures["bubble_share"], 100), str(figures["preemptions"])]
            rows.append([name, policy, *cells])
    header = ["setting", "policy", "TTFT, ms", "TPOT, ms", "E2EL, ms", "ITL p99, ms", "tokens/s"]
    return format_table([*header, "CV of tokens", "bubbles, %", "preemptions"], rows)


def ablation_claims(groups: Groups) -> list[PaperClaim]:
    """Return the paper's changes beside ours."""
    claims = []
    for name, policies in groups.items():
        for policy, claimed in CLAIMED.items():
            for metric, paper in claimed.items():
                values = (policies[each][metric]["mean"] for each in (policy, BASE))
                title = f"{name}: {policy}, {metric.upper()}"
                claims.append(PaperClaim(title, ExpectedChange(paper), relative_change(*values)))
    return claims


def ablation_plots(
    groups: Groups,
) -> dict[str, Callable[[Path], None]]:
    """One chart a setting: each metric against full throttling, the paper's beside it."""
    plots: dict[str, Callable[[Path], None]] = {}
    for number, policies in enumerate(groups.values()):
        full = policies[BASE]
        bars = {
            metric.upper(): {
                policy: figures[metric]["mean"] / full[metric]["mean"]
                for policy, figures in policies.items()
            }
            for metric in ("ttft", "tpot", "e2el")
        }
        paper = {
            metric.upper(): {policy: 1 + claimed[metric] for policy, claimed in CLAIMED.items()}
            for metric in ("ttft", "tpot", "e2el")
        }
        title = list(groups)[number]
        plots[f"ablation-{number + 1}.svg"] = partial(_draw, bars=bars, paper=paper, title=title)
    return plots


def _draw(path: Path, bars: dict[str, Changes], paper: dict[str, Changes], title: str) -> None:
    plot_bars(bars, path, f"against {BASE}", title, paper)
