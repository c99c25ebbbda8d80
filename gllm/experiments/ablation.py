"""Throttling without its parts: the paper's Figure 15.

Owns the four policies of the ablation, the rate that was fixed beforehand, and the comparison. With
--real it runs on this machine's engine.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gllm.experiments.base import PAPER, Claim, Options, Result, change
from gllm.experiments.trials import L20_32B, Setting, Trial, at_rates, run_trials
from gllm.sim.plots import plot_bars
from gllm.sim.report import show, text_table

POLICIES = ("throttle", "throttle-paper", "throttle-no-wt", "throttle-no-ut", "sarathi")
SATURATED = 1.0
"""Share of capacity; fixed before the first run."""
SETTINGS = (L20_32B, Setting("qwen2.5-14b", "L20"))
WORKLOADS = ("sharegpt-like", "azure-conv")

Changes = dict[str, float]
CLAIMED: dict[str, Changes] = {
    "throttle-no-wt": {"ttft": -0.10, "tpot": 0.44, "e2el": 0.20},
    "throttle-no-ut": {"ttft": 0.22, "tpot": 0.91, "e2el": 0.38},
}
"""The paper's changes against full throttling."""


def run(options: Options) -> Result:
    """Simulated, or real where the options say so."""
    if options.real:
        # The real engine loads torch in its workers and takes minutes: only where asked for.
        from gllm.experiments.real_ablation import run_real

        return run_real(options)
    settings = SETTINGS[:1] if options.quick else SETTINGS
    trials = []
    for setting in settings:
        for workload in WORKLOADS:
            base = Trial(setting, workload, "throttle", 1.0, options.requests)
            (trial,) = at_rates(base, [SATURATED])
            trials += [replace(trial, policy=policy) for policy in POLICIES]
    results = run_trials(trials, options.progress)
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for trial, figures in zip(trials, results, strict=True):
        name = f"{trial.setting}, {trial.workload}, {show(trial.rate)}/s"
        groups.setdefault(name, {})[trial.policy] = figures
    text = (
        f"Simulated, {options.requests} requests with Poisson arrivals, at the rate that throttle "
        "serves with all requests there at once; the rate was fixed before the first run.\n\n"
        + ablation_table(groups)
    )
    return Result(
        "Ablation of token throttling", text, ablation_claims(groups), ablation_plots(groups)
    )


def ablation_table(groups: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Figures of each policy, and how far they are from full throttling's."""
    rows = []
    for name, policies in groups.items():
        full = policies["throttle"]
        for policy, figures in policies.items():
            cells = [
                f"{show(figures[m]['mean'], 1e3)} ({change(figures[m]['mean'], full[m]['mean'])})"
                for m in ("ttft", "tpot", "e2el")
            ]
            cells.append(show(figures["itl"]["p99"], 1e3))
            cells.append(show(figures["steady_tokens_per_second"]))
            cells.append(show(figures["tokens_per_step_variation"]))
            cells += [show(figures["bubble_share"], 100), str(figures["preemptions"])]
            rows.append([name, policy, *cells])
    header = ["setting", "policy", "TTFT, ms", "TPOT, ms", "E2EL, ms", "ITL p99, ms", "tokens/s"]
    return text_table([*header, "CV of tokens", "bubbles, %", "preemptions"], rows)


def ablation_claims(groups: dict[str, dict[str, dict[str, Any]]]) -> list[Claim]:
    """The paper's changes beside ours; met where the sign is the paper's."""
    claims = []
    for name, policies in groups.items():
        for policy, claimed in CLAIMED.items():
            for metric, paper in claimed.items():
                ours = policies[policy][metric]["mean"] / policies["throttle"][metric]["mean"] - 1
                claims.append(
                    Claim(
                        f"{name}: {policy}, {metric.upper()}",
                        f"{100 * paper:+.0f} %, {PAPER}",
                        f"{100 * ours:+.0f} %",
                        (ours > 0) == (paper > 0),
                    )
                )
    return claims


def ablation_plots(
    groups: dict[str, dict[str, dict[str, Any]]],
) -> dict[str, Callable[[Path], None]]:
    """One chart a setting: each metric against full throttling, the paper's beside it."""
    plots: dict[str, Callable[[Path], None]] = {}
    for number, policies in enumerate(groups.values()):
        full = policies["throttle"]
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
    plot_bars(bars, path, "against throttle", title, paper)
