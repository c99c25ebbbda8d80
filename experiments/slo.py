"""SLO attainment against request rate: the paper's Figure 14.

Sets the limits and finds the rate at which 80 % of the requests meet them.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedChange, PaperClaim, join_claims, relative_change
from experiments.parallel import map_parallel
from experiments.trials import (
    CAPACITY_LINK,
    JUDGED_POLICIES,
    JUDGED_TEXT,
    L20_32B,
    OUR_POLICY,
    PAPER_POLICY,
    SETTINGS,
    HardwareSetting,
    SimulationTrial,
    TrialRun,
    plan_rates,
    run_trials,
    summarize_trial,
)
from gllm.options.slo import Slo
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table, show_value

POLICIES = (OUR_POLICY, PAPER_POLICY, "sarathi", "prefill-first")
WORKLOADS = ("sharegpt-like", "azure-conv")
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
EMULATED_RATES = ("sharegpt-like", (2.0, 4.0, 8.0, 12.0))
"""Workload and requests per second on emulated devices, on the setting of the paper's numbers."""
TTFT_TIMES, TPOT_TIMES = 5.0, 2.0
"""The limits are these multiples of what the workload's requests get alone on the pipeline."""
LOW_RATE, MAX_LOW_RATE_REQUESTS = 0.01, 60
"""Requests per second at next to no load, and how many of them suffice for the limits."""
TARGET = 0.8
RATE_CLAIM = ExpectedChange(0.79, comment="against vLLM")
COVERAGE_CLAIM = ExpectedChange(0.64, comment="against vLLM")

Curve = list[tuple[float, float]]
"""(rate, attainment), by rising rate."""
Curves = dict[tuple[HardwareSetting, str, str], Curve]
"""By setting, workload and policy."""


def measure_slo_limits(trial: SimulationTrial) -> Slo:
    """Return TTFT and TPOT limits in seconds: multiples of the 90th percentile without load."""
    requests = min(trial.requests, MAX_LOW_RATE_REQUESTS)
    return make_slo(summarize_trial(replace(trial, rate=LOW_RATE, requests=requests)))


def make_slo(figures: dict[str, Any]) -> Slo:
    """Return TTFT and TPOT limits in seconds from the figures of a run without load."""
    return Slo(TTFT_TIMES * figures["ttft"]["p90"], TPOT_TIMES * figures["tpot"]["p90"])


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


def coverage(curve: Curve) -> float:
    """Return the mean attainment over the range of rates: the area under the curve, 0..1."""
    area = sum(
        (rate - last_rate) * (share + last_share) / 2
        for (last_rate, last_share), (rate, share) in pairwise(curve)
    )
    span = curve[-1][0] - curve[0][0]
    return area / span if span else curve[0][1]


def run(options: ExperimentOptions) -> ExperimentResult:
    """Simulate two settings, two workloads and all policies."""
    settings = (L20_32B,) if options.quick else (L20_32B, SETTINGS[-1])
    shares = SHARES[::5] if options.quick else SHARES
    bases = [
        SimulationTrial(setting, workload, "throttle", 1.0, options.requests)
        for setting in settings
        for workload in WORKLOADS
    ]
    limits = map_parallel(measure_slo_limits, bases, options.jobs, options.progress, "limit")
    bases = [replace(base, slo=slo) for base, slo in zip(bases, limits, strict=True)]
    trials = [
        replace(trial, policy=policy)
        for line in plan_rates(bases, shares, options)
        for trial in line
        for policy in POLICIES
    ]
    curves: Curves = {}
    for trial, figures in zip(trials, run_trials(trials, options), strict=True):
        key = (trial.setting, trial.workload, trial.policy)
        curves.setdefault(key, []).append((trial.rate, figures["slo_attainment"]))
    text = (
        f"Simulated, {options.requests} requests with Poisson arrivals each. The limits are "
        f"{TTFT_TIMES:g} x TTFT and {TPOT_TIMES:g} x TPOT of the 90th percentile at next to no "
        "load; both have to be met. Coverage: mean attainment over the rates from "
        f"{shares[0]} to {shares[-1]} of throttle's {CAPACITY_LINK}, the area under the curve. "
        f"{JUDGED_TEXT}\n\n" + _table(bases, curves)
    )
    return ExperimentResult(
        "SLO attainment against request rate",
        text,
        make_claims(bases, curves),
        {"slo.svg": lambda path: plot_grid(_panels(bases, curves), path)},
        measured=PAPER_POLICY,
    )


def make_claims(bases: list[SimulationTrial], curves: Curves) -> list[PaperClaim]:
    """Return the claims on the paper's policy, with the figures of the project's beside them."""
    judged, ours = (
        [claim for base in bases for claim in _claims(base, curves, policy)]
        for policy in (PAPER_POLICY, OUR_POLICY)
    )
    return join_claims(judged, {OUR_POLICY: ours})


def _table(bases: list[SimulationTrial], curves: Curves) -> str:
    rows = []
    for base in bases:
        shown = [f"{seconds * 1e3:.0f}" for seconds in base.slo.request_limits.values()]
        for policy in POLICIES:
            curve = curves[base.setting, base.workload, policy]
            rate = show_value(interpolate_rate(curve, TARGET))
            covered = show_value(coverage(curve), 100)
            rows.append([str(base.setting), base.workload, *shown, policy, rate, covered])
    header = ["setting", "workload", "TTFT limit, ms", "TPOT limit, ms", "policy"]
    return format_table([*header, "rate at 80 %, 1/s", "coverage, %"], rows)


def emulated_trials(options: ExperimentOptions) -> list[SimulationTrial]:
    """Return the trials for emulated devices, with the limits of an idle simulated pipeline."""
    workload, rates = EMULATED_RATES
    base = SimulationTrial(SETTINGS[-1], workload, "throttle", 1.0, options.requests)
    base = replace(base, slo=measure_slo_limits(base))
    return [
        replace(base, rate=rate, policy=policy)
        for rate in (rates[::2] if options.quick else rates)
        for policy in JUDGED_POLICIES
    ]


def emulated_claims(runs: list[TrialRun], policy: str) -> list[PaperClaim]:
    """Return the claims on a policy, from the runs of `emulated_trials`."""
    curves: Curves = {}
    for run in runs:
        key = (run.trial.setting, run.trial.workload, run.trial.policy)
        curves.setdefault(key, []).append((run.trial.rate, run.figures["slo_attainment"]))
    return _claims(runs[0].trial, curves, policy)


def _claims(base: SimulationTrial, curves: Curves, policy: str) -> list[PaperClaim]:
    """Return the paper's gains, which it reports for the network, beside those over sarathi."""
    ours, theirs = (curves[base.setting, base.workload, each] for each in (policy, "sarathi"))
    rates = interpolate_rate(ours, TARGET), interpolate_rate(theirs, TARGET)
    claims = []
    for name, expected, values in (
        ("rate at 80 %", RATE_CLAIM, rates),
        ("SLO coverage", COVERAGE_CLAIM, (coverage(ours), coverage(theirs))),
    ):
        gain = relative_change(*values)
        title = f"{base.setting}, {base.workload}: {name}, over sarathi"
        if base.setting.link == "network":
            claims.append(PaperClaim(title, expected, gain))
        else:
            note = expected.show(gain)
            claims.append(PaperClaim(title, "a plot without numbers", None, note))
    return claims


def _panels(bases: list[SimulationTrial], curves: Curves) -> list[ChartPanel]:
    panels = []
    for base in bases:
        series = {
            policy: [
                (rate, 100 * share) for rate, share in curves[base.setting, base.workload, policy]
            ]
            for policy in POLICIES
        }
        title = f"{base.setting}, {base.workload}"
        panels.append(ChartPanel(title, "requests/s", "SLO attainment, %", series, False))
    return panels
