"""Maximum throughput for 1, 2 and 4 stages: the paper's Figure 12.

Owns the sweep over stages.
"""

from dataclasses import replace

from gllm.experiments.base import ExperimentOptions, ExperimentResult, PaperClaim
from gllm.experiments.trials import HardwareSetting, SimulationTrial, run_trials
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table, show_value

SETTINGS = (HardwareSetting("qwen2.5-14b", "L20"), HardwareSetting("qwen2.5-32b", "A100-80G"))
STAGES = (1, 2, 4)
POLICIES = ("throttle", "throttle-paper", "sarathi")
WORKLOADS = ("sharegpt-like", "azure-conv")


def run(options: ExperimentOptions) -> ExperimentResult:
    """All requests at once; the same number for every count of stages."""
    settings = SETTINGS[:1] if options.quick else SETTINGS
    trials = [
        SimulationTrial(
            replace(setting, stages=stages), workload, policy, 1.0, options.requests, "static"
        )
        for setting in settings
        for workload in WORKLOADS
        for policy in POLICIES
        for stages in STAGES
    ]
    results = dict(zip(trials, run_trials(trials, options.progress), strict=True))
    speed = {t: f["steady_tokens_per_second"] for t, f in results.items()}
    rows = []
    bars: dict[str, dict[str, float]] = {}
    for first in (trial for trial in trials if trial.setting.stages == STAGES[0]):
        line = [replace(first, setting=replace(first.setting, stages=n)) for n in STAGES]
        gains = [speed[trial] / speed[first] for trial in line]
        name = f"{first.setting.model}, {first.setting.device}"
        rows.append([name, first.workload, first.policy, *(show_value(speed[t]) for t in line)])
        rows[-1] += [f"{gain:.2f} x" for gain in gains[1:]]
        bars.setdefault(f"{name}, {first.workload}", {})[first.policy] = gains[-1]
    header = ["setting", "workload", "policy", *(f"{n} stages, tokens/s" for n in STAGES)]
    text = (
        f"Simulated, {options.requests} requests that are all there from the beginning. One device "
        "has the least memory for KV cache, so more stages can gain more than their number.\n\n"
        + format_table([*header, "gain of 2", "gain of 4"], rows)
    )
    lowest = min(each["throttle"] for each in bars.values())
    claim = PaperClaim(
        "gain of 4 stages under throttle",
        "a plot without numbers",
        f"{lowest:.2f} x at least",
        None,
    )
    return ExperimentResult(
        "Maximum throughput for 1, 2 and 4 stages",
        text,
        [claim],
        {
            "scalability.svg": lambda path: plot_bars(
                bars, path, "throughput of 4 stages / 1 stage", "Gain of four stages"
            )
        },
    )
