"""Latency and throughput against request rate: the paper's Figures 10 and 13.

Simulates all policies at rates up to beyond the capacity and reads the claimed ratios off them.
"""

from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedChange, PaperClaim, join_claims
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
)
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table, show_value

TENSOR_PARALLEL = "sarathi, TP 4"
"""All four devices as ranks of one stage, within a node or across nodes as the setting says."""
POLICIES = (OUR_POLICY, PAPER_POLICY, "sarathi", "prefill-first", TENSOR_PARALLEL)
WORKLOADS = ("sharegpt-like", "azure-conv")
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.3)
EMULATED_SETTINGS = (L20_32B, SETTINGS[-1])
"""Settings on emulated devices, within a node and over a network."""
EMULATED_RATES = {"azure-conv": (1.0, 2.0, 3.0), "sharegpt-like": (4.0, 8.0, 12.0)}
"""Requests per second on emulated devices, by workload."""
TURNING = 2.0
"""TTFT has turned where its mean is this many times that of the lowest rate."""
INTRA_NODE = ExpectedChange(0.29, 1.5, comment="(vLLM PP, intra-node)")
ANYWHERE = ExpectedChange(0.11, 3.98, comment="(vLLM PP or SGLang TP)")
TURNING_CLAIM = ExpectedChange(1.0, 5.0, is_ratio=True)
SLOPE_CLAIM = ExpectedChange(-0.86, -0.08, is_ratio=True)

Curve = list[tuple[float, dict[str, Any]]]
"""(rate, figures), by rising rate."""


class CurveKey(NamedTuple):
    """Setting of a curve."""

    setting: HardwareSetting
    workload: str
    policy: str
    """A name of POLICIES."""


Curves = dict[CurveKey, Curve]


def apply_policy(trial: SimulationTrial, policy: str) -> SimulationTrial:
    """Return the trial under a name of POLICIES."""
    if policy != TENSOR_PARALLEL:
        return replace(trial, policy=policy)
    return replace(trial, policy="sarathi", setting=trial.setting.as_tensor_parallel())


def run(options: ExperimentOptions) -> ExperimentResult:
    """Simulate all settings, workloads and policies."""
    settings = SETTINGS[1:2] if options.quick else SETTINGS
    shares = SHARES[::3] if options.quick else SHARES
    bases = [
        SimulationTrial(setting, workload, "throttle", 1.0, options.requests)
        for setting in settings
        for workload in WORKLOADS
    ]
    keys, trials = [], []
    for line in plan_rates(bases, shares, options):
        for trial in line:
            for policy in POLICIES:
                keys.append(CurveKey(trial.setting, trial.workload, policy))
                trials.append(apply_policy(trial, policy))
    curves: Curves = {}
    for key, trial, figures in zip(keys, trials, run_trials(trials, options), strict=True):
        curves.setdefault(key, []).append((trial.rate, figures))
    text = (
        f"Simulated, {options.requests} requests with Poisson arrivals each; rates are "
        f"{', '.join(map(str, shares))} of throttle's {CAPACITY_LINK}. `{TENSOR_PARALLEL}`: the "
        "same devices as ranks of one stage, whose sums take the same link. Every policy runs in "
        "the same runtime: what the paper's baselines lose to theirs is not in these figures. "
        f"{JUDGED_TEXT}\n\n" + _table(curves)
    )
    return ExperimentResult(
        "Latency and throughput against request rate",
        text,
        make_claims(curves),
        {"latency-vs-rate.svg": lambda path: plot_grid(_panels(curves), path)},
        measured=PAPER_POLICY,
    )


def _table(curves: Curves) -> str:
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


def max_throughput(curve: Curve) -> float:
    """Return the highest steady throughput over all rates, in tokens per second."""
    return max(float(figures["steady_tokens_per_second"]) for _, figures in curve)


def make_claims(curves: Curves) -> list[PaperClaim]:
    """Return the claims on the paper's policy, with the figures of the project's beside them."""
    return join_claims(_claims(curves, PAPER_POLICY), {OUR_POLICY: _claims(curves, OUR_POLICY)})


def _claims(curves: Curves, policy: str) -> list[PaperClaim]:
    """Return the paper's ranges and a policy's figures.

    The paper compares with vLLM, we with sarathi.
    """
    claims = []
    for key, ours in curves.items():
        if key.policy != policy:
            continue
        title = f"{key.setting}, {key.workload}"
        sarathi = curves[key._replace(policy="sarathi")]
        tensor = curves.get(key._replace(policy=TENSOR_PARALLEL))
        within_node = key.setting.link != "network"
        changes: list[tuple[str, ExpectedChange, float]] = [
            ("maximum throughput against sarathi", INTRA_NODE if within_node else ANYWHERE,
             max_throughput(ours) / max_throughput(sarathi)),
            ("rate at which TTFT turns, against sarathi", TURNING_CLAIM,
             turning_point(ours) / turning_point(sarathi)),
            ("slope of E2EL against sarathi", SLOPE_CLAIM, slope(ours) / slope(sarathi)),
        ]  # fmt: skip
        if tensor is not None:
            ratio = max_throughput(ours) / max_throughput(tensor)
            changes.insert(1, ("maximum throughput against TP 4", ANYWHERE, ratio))
        claims += [
            PaperClaim(f"{title}: {name}", claimed, ratio - 1) for name, claimed, ratio in changes
        ]
    return claims


def emulated_trials(options: ExperimentOptions) -> list[SimulationTrial]:
    """Return the trials for emulated devices."""
    rates = {"azure-conv": EMULATED_RATES["azure-conv"]} if options.quick else EMULATED_RATES
    return [
        SimulationTrial(setting, workload, policy, rate, options.requests)
        for setting in EMULATED_SETTINGS[: 1 if options.quick else None]
        for workload, each in rates.items()
        for rate in (each[::2] if options.quick else each)
        for policy in JUDGED_POLICIES
    ]


def emulated_claims(runs: list[TrialRun], policy: str) -> list[PaperClaim]:
    """Return the claims on a policy, from the runs of `emulated_trials`."""
    curves: Curves = {}
    for run in runs:
        trial = run.trial
        key = CurveKey(trial.setting, trial.workload, trial.policy)
        curves.setdefault(key, []).append((trial.rate, run.figures))
    return _claims(curves, policy)


def _panels(curves: Curves) -> list[ChartPanel]:
    panels = []
    for setting in dict.fromkeys(key.setting for key in curves):
        for name, label, factor in (("ttft", "mean TTFT, s", 1.0), ("tpot", "mean TPOT, ms", 1e3)):
            series = {
                policy: [
                    (rate, figures[name]["mean"] * factor)
                    for rate, figures in curves[CurveKey(setting, "azure-conv", policy)]
                ]
                for policy in POLICIES
            }
            title = f"{setting}, azure-conv"
            panels.append(ChartPanel(title, "requests/s", label, series, name == "ttft"))
    return panels
