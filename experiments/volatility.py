"""Tokens per micro-batch over time, and what each stage loses to bubbles: Figures 1 and 4.

Simulates the same requests under three policies.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedDirection, PaperClaim, join_claims
from experiments.parallel import map_parallel
from experiments.trials import (
    CAPACITY_LINK,
    JUDGED_POLICIES,
    JUDGED_TEXT,
    L20_32B,
    OUR_POLICY,
    PAPER_POLICY,
    SimulationTrial,
    TrialRun,
    plan_rates,
    simulate_trial,
)
from gllm.sim.metrics.plots import plot_gantt, plot_tokens
from gllm.sim.metrics.report import (
    format_table,
    show_value,
    summarize_run,
)
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.metrics.statistics import coefficient_of_variation

POLICIES = (OUR_POLICY, PAPER_POLICY, "sarathi")
SHARE = 0.8
WORKLOAD = "sharegpt-like"
EMULATED_RATE = 7.5
"""Requests per second on emulated devices."""


def steady_micro_batch_sizes(run: RunRecord) -> tuple[list[float], list[float]]:
    """Tokens and decodes of the micro-batches planned while requests still came."""
    last = max(served.line.arrival for served in run.requests.values())
    steps = [step for step in run.micro_batches if step.planned_time <= last]
    return [float(s.work.num_tokens) for s in steps], [float(s.num_decode_tokens) for s in steps]


def run(options: ExperimentOptions) -> ExperimentResult:
    """Simulate the same requests under each policy."""
    base = SimulationTrial(L20_32B, WORKLOAD, "throttle", 1.0, options.requests)
    ((base,),) = plan_rates([base], [SHARE], options)
    trials = [replace(base, policy=policy) for policy in POLICIES]
    records = map_parallel(simulate_trial, trials, options.jobs, options.progress)
    runs = dict(zip(POLICIES, records, strict=True))
    rows, spreads = [], {}
    for policy, each in runs.items():
        tokens, decodes = steady_micro_batch_sizes(each)
        spreads[policy] = coefficient_of_variation(tokens), coefficient_of_variation(decodes)
        figures = summarize_run(each)
        rows.append(
            [
                policy,
                show_value(fmean(tokens)),
                *map(show_value, spreads[policy]),
                show_value(figures["busy_share"], 100),
                show_value(figures["bubble_share"], 100),
            ]
        )
    header = ["policy", "tokens per micro-batch", "CV of tokens", "CV of decodes"]
    text = (
        f"Simulated: {L20_32B}, {WORKLOAD}, {options.requests} requests with Poisson arrivals at "
        f"{show_value(base.rate)}/s, {SHARE} of {CAPACITY_LINK}. "
        "CV: standard deviation over mean, over the "
        f"micro-batches planned while requests still came. {JUDGED_TEXT}\n\n"
        + format_table([*header, "stages busy, %", "bubbles, %"], rows)
    )
    claims = make_claims({policy: spread[0] for policy, spread in spreads.items()})
    return ExperimentResult(
        "Volatility of micro-batches", text, claims, _plots(runs), measured=PAPER_POLICY
    )


def make_claims(spreads: dict[str, float]) -> list[PaperClaim]:
    """Return the claims on the paper's policy, with the figures of the project's beside them.

    Args:
        spreads: Coefficient of variation of the tokens per micro-batch, by policy.
    """
    judged, ours = ([_claim(policy, spreads)] for policy in (PAPER_POLICY, OUR_POLICY))
    return join_claims(judged, {OUR_POLICY: ours})


def _claim(policy: str, spreads: dict[str, float]) -> PaperClaim:
    """Return the claim on a policy, from the variation of the tokens by policy."""
    return PaperClaim(
        f"CV of tokens, {policy} against sarathi",
        ExpectedDirection(False, "far steadier, a plot without numbers"),
        spreads[policy] / spreads["sarathi"] - 1,
    )


def emulated_trials(options: ExperimentOptions) -> list[SimulationTrial]:
    """Return the trials for emulated devices."""
    base = SimulationTrial(L20_32B, WORKLOAD, "throttle", EMULATED_RATE, options.requests)
    return [replace(base, policy=policy) for policy in JUDGED_POLICIES]


def emulated_claims(runs: list[TrialRun], policy: str) -> list[PaperClaim]:
    """Return the claims on a policy, from the runs of `emulated_trials`."""
    sizes = {run.trial.policy: steady_micro_batch_sizes(run.record)[0] for run in runs}
    spreads = {name: coefficient_of_variation(tokens) for name, tokens in sizes.items()}
    return [_claim(policy, spreads)]


def _plots(runs: dict[str, RunRecord]) -> dict[str, Callable[[Path], None]]:
    plots: dict[str, Callable[[Path], None]] = {}
    for policy in ("throttle", "sarathi"):
        plots[f"volatility-tokens-{policy}.svg"] = partial(plot_tokens, runs[policy])
        plots[f"volatility-gantt-{policy}.svg"] = partial(plot_gantt, runs[policy])
    return plots
