"""SLO attainment against request rate: the paper's Figure 14.

Owns the limits and the rate at which 80 % of the requests meet them.
"""

from dataclasses import replace
from itertools import pairwise

from gllm.experiments.base import ExperimentOptions, ExperimentResult, PaperClaim, format_change
from gllm.experiments.trials import (
    L20_32B,
    SETTINGS,
    HardwareSetting,
    SimulationTrial,
    run_trials,
    summarize_trial,
    trials_at_rates,
)
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table, show_value

POLICIES = ("throttle", "throttle-paper", "sarathi", "prefill-first")
WORKLOADS = ("sharegpt-like", "azure-conv")
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
TTFT_TIMES, TPOT_TIMES = 5.0, 2.0
"""The limits are these multiples of what the workload's requests get alone on the pipeline."""
LOW_RATE, MAX_LOW_RATE_REQUESTS = 0.01, 60
"""Requests per second at next to no load, and how many of them suffice for the limits."""
TARGET = 0.8

Curve = list[tuple[float, float]]


def measure_slo_limits(
    setting: HardwareSetting, workload: str, num_requests: int
) -> tuple[float, float]:
    """TTFT and TPOT limits in seconds: multiples of the 90th percentile at next to no load."""
    figures = summarize_trial(
        SimulationTrial(setting, workload, "throttle", LOW_RATE, num_requests)
    )
    return TTFT_TIMES * figures["ttft"]["p90"], TPOT_TIMES * figures["tpot"]["p90"]


def interpolate_rate(curve: Curve, target: float) -> float:
    """Return the rate at which a falling curve first crosses the target.

    Interpolates linearly. Returns the last rate if the curve stays above, 0 if it begins below.
    """
    if curve[0][1] < target:
        return 0.0
    for (rate, share), (next_rate, next_share) in pairwise(curve):
        if next_share < target:
            return rate + (next_rate - rate) * (share - target) / (share - next_share)
    return curve[-1][0]


def run(options: ExperimentOptions) -> ExperimentResult:
    """Two settings, two workloads, all policies."""
    settings = (L20_32B,) if options.quick else (L20_32B, SETTINGS[-1])
    shares = SHARES[::5] if options.quick else SHARES
    trials: list[SimulationTrial] = []
    for setting in settings:
        for workload in WORKLOADS:
            slo = measure_slo_limits(
                setting, workload, min(options.requests, MAX_LOW_RATE_REQUESTS)
            )
            base = SimulationTrial(setting, workload, "throttle", 1.0, options.requests, slo=slo)
            for trial in trials_at_rates(base, shares):
                trials += [replace(trial, policy=policy) for policy in POLICIES]
    curves: dict[tuple[HardwareSetting, str, str], Curve] = {}
    slos = {(t.setting, t.workload): t.slo for t in trials if t.slo is not None}
    for trial, figures in zip(trials, run_trials(trials, options.progress), strict=True):
        key = (trial.setting, trial.workload, trial.policy)
        curves.setdefault(key, []).append((trial.rate, figures["slo_attainment"]))
    rows, claims, panels = [], [], []
    for (setting, workload), limit in slos.items():
        best = {
            policy: interpolate_rate(curves[setting, workload, policy], TARGET)
            for policy in POLICIES
        }
        for policy, rate in best.items():
            shown = [f"{seconds * 1e3:.0f}" for seconds in limit]
            rows.append([str(setting), workload, *shown, policy, show_value(rate)])
        ours = best["throttle"], best["sarathi"]
        gain = format_change(*ours) if ours[1] else "sarathi never gets there"
        network = setting.link == "network"
        paper = "+79 % against vLLM" if network else "a plot without numbers"
        met = (not ours[1] or ours[0] / ours[1] >= 1.79) if network else None
        claims.append(
            PaperClaim(f"{setting}, {workload}: rate at 80 %, over sarathi", paper, gain, met)
        )
        series = {p: [(r, 100 * s) for r, s in curves[setting, workload, p]] for p in POLICIES}
        title = f"{setting}, {workload}"
        panels.append(ChartPanel(title, "requests/s", "SLO attainment, %", series, False))
    text = (
        f"Simulated, {options.requests} requests with Poisson arrivals each. The limits are "
        f"{TTFT_TIMES:g} x TTFT and {TPOT_TIMES:g} x TPOT of the 90th percentile at next to no "
        "load; both have to be met.\n\n"
        + format_table(
            ["setting", "workload", "TTFT limit, ms", "TPOT limit, ms", "policy",
             "rate at 80 %, 1/s"], rows,
        )
    )  # fmt: skip
    return ExperimentResult(
        "SLO attainment against request rate",
        text,
        claims,
        {"slo.svg": lambda path: plot_grid(panels, path)},
    )
