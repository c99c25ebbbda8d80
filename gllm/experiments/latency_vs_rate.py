"""Latency and throughput against request rate: the paper's Figures 10 and 13.

Owns the sweep over rates and what is read off it.
"""

from dataclasses import replace
from statistics import fmean
from typing import Any

from gllm.experiments.base import ExperimentOptions, ExperimentResult, PaperClaim
from gllm.experiments.trials import (
    SETTINGS,
    HardwareSetting,
    SimulationTrial,
    run_trials,
    trials_at_rates,
)
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table, show_value

POLICIES = ("throttle", "throttle-paper", "sarathi", "prefill-first")
WORKLOADS = ("sharegpt-like", "azure-conv")
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.3)
TURNING = 2.0
"""TTFT has turned where its mean is this many times that of the lowest rate."""

Key = tuple[HardwareSetting, str, str]
Curve = list[tuple[float, dict[str, Any]]]
"""(rate, figures), by rising rate."""


def run(options: ExperimentOptions) -> ExperimentResult:
    """All settings, workloads and policies."""
    settings = SETTINGS[1:2] if options.quick else SETTINGS
    shares = SHARES[::3] if options.quick else SHARES
    trials: list[SimulationTrial] = []
    for setting in settings:
        for workload in WORKLOADS:
            base = SimulationTrial(setting, workload, "throttle", 1.0, options.requests)
            for trial in trials_at_rates(base, shares):
                trials += [replace(trial, policy=policy) for policy in POLICIES]
    curves: dict[Key, Curve] = {}
    for trial, figures in zip(trials, run_trials(trials, options.progress), strict=True):
        key = (trial.setting, trial.workload, trial.policy)
        curves.setdefault(key, []).append((trial.rate, figures))
    text = (
        f"Simulated, {options.requests} requests with Poisson arrivals each; rates are "
        f"{', '.join(map(str, shares))} of what throttle serves with all requests there at once. "
        "Every policy runs in the same runtime: what the paper's baselines lose to theirs is not "
        "in these figures.\n\n" + _table(curves)
    )
    return ExperimentResult(
        "Latency and throughput against request rate",
        text,
        _claims(curves, settings),
        {"latency-vs-rate.svg": lambda path: plot_grid(_panels(curves, settings), path)},
    )


def _table(curves: dict[Key, Curve]) -> str:
    rows = []
    for (setting, workload, policy), curve in curves.items():
        for rate, figures in curve:
            rows.append(
                [
                    str(setting),
                    workload,
                    show_value(rate),
                    policy,
                    *(show_value(figures[name]["mean"], 1e3) for name in ("ttft", "tpot")),
                    show_value(figures["itl"]["p99"], 1e3),
                    show_value(figures["e2el"]["mean"]),
                    show_value(figures["steady_tokens_per_second"]),
                    show_value(100 * fmean(figures["bubble_share"])),
                ]
            )
    header = ["setting", "workload", "rate, 1/s", "policy", "TTFT, ms", "TPOT, ms", "ITL p99, ms"]
    return format_table([*header, "E2EL, s", "tokens/s", "bubbles, %"], rows)


def turning_point(curve: Curve) -> float:
    """Highest rate before mean TTFT first exceeds TURNING times that of the lowest, 1/s."""
    limit = TURNING * curve[0][1]["ttft"]["mean"]
    last = curve[0][0]
    for rate, figures in curve:
        if figures["ttft"]["mean"] > limit:
            break
        last = rate
    return last


def slope(curve: Curve) -> float:
    """Return the rise of mean E2EL from the lowest to the highest rate, in seconds per 1/s."""
    (low, first), (high, last) = curve[0], curve[-1]
    return float((last["e2el"]["mean"] - first["e2el"]["mean"]) / (high - low))


def _ratios(curves: dict[Key, Curve], setting: HardwareSetting) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"throughput": [], "turning": [], "slope": []}
    for workload in WORKLOADS:
        ours, theirs = curves[setting, workload, "throttle"], curves[setting, workload, "sarathi"]
        best = [max(f["steady_tokens_per_second"] for _, f in curve) for curve in (ours, theirs)]
        found["throughput"].append(best[0] / best[1] - 1)
        found["turning"].append(turning_point(ours) / turning_point(theirs))
        found["slope"].append(slope(ours) / slope(theirs))
    return found


def _claims(curves: dict[Key, Curve], settings: tuple[HardwareSetting, ...]) -> list[PaperClaim]:
    """Return the paper's ranges and our figures: the paper compares with vLLM, we with sarathi."""
    claims = []
    for setting in settings:
        ratios = _ratios(curves, setting)
        for what, paper, met, form in (
            ("throughput", "+29 to +150 % (intra-node)", lambda r: 0.29 <= r <= 1.5, "{:+.0%}"),
            ("turning", "2 to 6 x", lambda r: r >= 2, "{:.1f} x"),
            ("slope", "0.14 to 0.92 x", lambda r: r <= 0.92, "{:.2f} x"),
        ):
            names = {
                "throughput": "maximum throughput against sarathi",
                "turning": "rate at which TTFT turns, against sarathi",
                "slope": "slope of E2EL against sarathi",
            }
            values = ratios[what]
            shown = ", ".join(form.format(value) for value in values)
            claims.append(
                PaperClaim(
                    f"{setting}: {names[what]} ({', '.join(WORKLOADS)})",
                    paper,
                    shown,
                    all(met(value) for value in values),
                )
            )
    return claims


def _panels(curves: dict[Key, Curve], settings: tuple[HardwareSetting, ...]) -> list[ChartPanel]:
    panels = []
    for setting in settings:
        for name, label, factor in (("ttft", "mean TTFT, s", 1.0), ("tpot", "mean TPOT, ms", 1e3)):
            series = {
                policy: [
                    (rate, figures[name]["mean"] * factor)
                    for rate, figures in curves[setting, "azure-conv", policy]
                ]
                for policy in POLICIES
            }
            title = f"{setting}, azure-conv"
            panels.append(ChartPanel(title, "requests/s", label, series, name == "ttft"))
    return panels
