"""Maximum throughput for 1, 2 and 4 devices: the paper's Figure 12.

Devices are stages of a pipeline or ranks of one stage.
"""

from dataclasses import replace

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedChange, PaperClaim
from experiments.trials import (
    JUDGED_POLICIES,
    HardwareSetting,
    SimulationTrial,
    TrialRun,
    run_trials,
)
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table, show_value

SETTINGS = (
    HardwareSetting("qwen2.5-14b", "L20"),
    HardwareSetting("qwen2.5-32b", "A100-80G"),
    HardwareSetting("qwen2.5-14b", "L20", link="network"),
)
DEVICES = (1, 2, 4)
TENSOR_PARALLEL = "sarathi, TP"
"""All devices as ranks of one stage."""
POLICIES = ("throttle", "throttle-paper", "sarathi", TENSOR_PARALLEL)
WORKLOADS = ("sharegpt-like", "azure-conv")
CLAIMED = ExpectedChange(0.11, 3.98, comment="(vLLM PP or SGLang TP)")


def make_trial(
    setting: HardwareSetting, workload: str, policy: str, devices: int, requests: int
) -> SimulationTrial:
    """Return the trial of a policy on a number of devices; all requests arrive at once."""
    setting = replace(setting, stages=devices)
    if policy == TENSOR_PARALLEL:
        policy, setting = "sarathi", setting.as_tensor_parallel()
    return SimulationTrial(setting, workload, policy, 1.0, requests, "static")


def emulated_trials(options: ExperimentOptions) -> list[SimulationTrial]:
    """Return the trials for emulated devices, within a node and over a network."""
    return [
        make_trial(setting, "azure-conv", policy, devices, options.requests)
        for setting in (SETTINGS[:1] if options.quick else SETTINGS[::2])
        for devices in DEVICES[1 if options.quick else 0 :]
        for policy in (*JUDGED_POLICIES, *([TENSOR_PARALLEL] if devices > 1 else []))
    ]


def emulated_claims(runs: list[TrialRun], policy: str) -> list[PaperClaim]:
    """Return the claims on a policy, from the runs of `emulated_trials`."""
    speed: dict[str, dict[tuple[str, int], float]] = {}
    for run in runs:
        setting = run.trial.setting
        name = TENSOR_PARALLEL if setting.ranks > 1 else run.trial.policy
        title = str(replace(setting, stages=DEVICES[-1], ranks=1))
        tokens = float(run.figures["steady_tokens_per_second"])
        speed.setdefault(title, {})[name, setting.stages * setting.ranks] = tokens
    claims = []
    for title, each in speed.items():
        fewest, most = min(devices for _, devices in each), DEVICES[-1]
        for other in ("sarathi", TENSOR_PARALLEL):
            ratio = each[policy, most] / each[other, most]
            claims.append(PaperClaim(f"{title}: against {other}", CLAIMED, ratio - 1))
        gain = f"{each[policy, most] / each[policy, fewest]:.2f} x"
        text = f"{title}: gain over {fewest} devices"
        claims.append(PaperClaim(text, "a plot without numbers", None, gain))
    return claims


def run(options: ExperimentOptions) -> ExperimentResult:
    """Simulate the same requests on every number of devices."""
    settings = SETTINGS[:1] if options.quick else SETTINGS
    keys = [
        (setting, workload, policy, devices)
        for setting in settings
        for workload in WORKLOADS
        for policy in POLICIES
        for devices in DEVICES
    ]
    figures = run_trials([make_trial(*key, options.requests) for key in keys], options)
    speed = {
        key: float(each["steady_tokens_per_second"])
        for key, each in zip(keys, figures, strict=True)
    }
    rows, claims = [], []
    bars: dict[str, dict[str, float]] = {}
    for setting, workload, policy, devices in keys:
        if devices != DEVICES[0]:
            continue
        line = [speed[setting, workload, policy, count] for count in DEVICES]
        over = " over the network" if setting.link == "network" else ""
        name = f"{setting.model}, {setting.device}{over}"
        gains = [f"{value / line[0]:.2f} x" for value in line[1:]]
        rows.append([name, workload, policy, *map(show_value, line), *gains])
        bars.setdefault(f"{name}, {workload}", {})[policy] = line[-1] / line[0]
        if policy in ("sarathi", TENSOR_PARALLEL):
            ours = speed[setting, workload, "throttle", DEVICES[-1]]
            title = f"{name}, {workload}: throttle on 4 stages against {policy}"
            claims.append(PaperClaim(title, CLAIMED, ours / line[-1] - 1))
    header = ["setting", "workload", "policy", *(f"{n} devices, tokens/s" for n in DEVICES)]
    text = (
        f"Simulated, {options.requests} requests that all arrive at the beginning. Devices are "
        f"stages of a pipeline, or ranks of one stage (`{TENSOR_PARALLEL}`). One device has the "
        "least memory for KV cache, so more devices can gain more than their number.\n\n"
        + format_table([*header, "gain of 2", "gain of 4"], rows)
    )
    lowest = min(bar["throttle"] for bar in bars.values())
    note = f"{lowest:.2f} x at least"
    claims.append(
        PaperClaim("gain of 4 stages under throttle", "a plot without numbers", None, note)
    )
    return ExperimentResult(
        "Maximum throughput for 1, 2 and 4 devices",
        text,
        claims,
        {
            "scalability.svg": lambda path: plot_bars(
                bars, path, "throughput of 4 devices / 1 device", "Gain of four devices"
            )
        },
    )
