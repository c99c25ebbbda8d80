"""Tokens per micro-batch over time, and what each stage loses to bubbles: Figures 1 and 4.

Owns the two policies that are shown side by side.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from gllm.experiments.base import Claim, Options, Result
from gllm.experiments.trials import L20_32B, Trial, at_rates, simulate_trial
from gllm.sim.plots import plot_gantt, plot_tokens
from gllm.sim.report import show, summarize, text_table, variation
from gllm.sim.run import Run

POLICIES = ("throttle", "throttle-paper", "sarathi")
SHARE = 0.8
WORKLOAD = "sharegpt-like"


def steady(run: Run) -> tuple[list[float], list[float]]:
    """Tokens and decodes of the micro-batches planned while requests still came."""
    last = max(served.line.arrival for served in run.requests.values())
    steps = [step for step in run.steps if step.planned <= last]
    return [float(s.work.num_tokens) for s in steps], [float(s.decode_tokens) for s in steps]


def run(options: Options) -> Result:
    """The same jobs under each policy."""
    base = Trial(L20_32B, WORKLOAD, "throttle", 1.0, options.requests)
    (base,) = at_rates(base, [SHARE])
    runs = {policy: simulate_trial(replace(base, policy=policy)) for policy in POLICIES}
    rows, spreads = [], {}
    for policy, each in runs.items():
        tokens, decodes = steady(each)
        spreads[policy] = variation(tokens), variation(decodes)
        figures = summarize(each)
        rows.append(
            [
                *(policy, show(fmean(tokens)), *map(show, spreads[policy])),
                *(show(figures["busy_share"], 100), show(figures["bubble_share"], 100)),
            ]
        )
    header = ["policy", "tokens per micro-batch", "CV of tokens", "CV of decodes"]
    text = (
        f"Simulated: {L20_32B}, {WORKLOAD}, {options.requests} requests with Poisson arrivals at "
        f"{show(base.rate)}/s, {SHARE} of capacity. CV: standard deviation over mean, over the "
        "micro-batches planned while requests still came.\n\n"
        + text_table([*header, "stages busy, %", "bubbles, %"], rows)
    )
    ratio = spreads["throttle"][0] / spreads["sarathi"][0]
    claims = [
        Claim(
            "CV of tokens, throttle against sarathi",
            "far steadier, a plot without numbers",
            f"{ratio:.2f} x",
            ratio < 1,
        )
    ]
    return Result("Volatility of micro-batches", text, claims, _plots(runs))


def _plots(runs: dict[str, Run]) -> dict[str, Callable[[Path], None]]:
    plots: dict[str, Callable[[Path], None]] = {}
    for policy in ("throttle", "sarathi"):
        plots[f"volatility-tokens-{policy}.svg"] = partial(plot_tokens, runs[policy])
        plots[f"volatility-gantt-{policy}.svg"] = partial(plot_gantt, runs[policy])
    return plots
