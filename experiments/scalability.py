"""Maximum throughput for 1, 2 and 4 devices: the paper's Figure 12.

Devices are stages of a pipeline or ranks of one stage.
"""

from dataclasses import replace

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedChange, PaperClaim, join_claims
from experiments.trials import (
    JUDGED_POLICIES,
    JUDGED_TEXT,
    OUR_POLICY,
    PAPER_POLICY,
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
POLICIES = (OUR_POLICY, PAPER_POLICY, "sarathi", TENSOR_PARALLEL)
WORKLOADS = ("sharegpt-like", "azure-conv")
CLAIMED = ExpectedChange(0.11, 3.98, comment="(vLLM PP or SGLang TP)")

Speeds = dict[tuple[HardwareSetting, str, str, int], float]
"""Tokens per second by setting, workload, policy and number of devices."""


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
    rows = []
    bars: dict[str, dict[str, float]] = {}
    for setting, workload, policy, devices in keys:
        if devices != DEVICES[0]:
            continue
        line = [speed[setting, workload, policy, count] for count in DEVICES]
        name = _name(setting)
        gains = [f"{value / line[0]:.2f} x" for value in line[1:]]
        rows.append([name, workload, policy, *map(show_value, line), *gains])
        bars.setdefault(f"{name}, {workload}", {})[policy] = line[-1] / line[0]
    header = ["setting", "workload", "policy", *(f"{n} devices, tokens/s" for n in DEVICES)]
    text = (
        f"Simulated, {options.requests} requests that all arrive at the beginning. Devices are "
        f"stages of a pipeline, or ranks of one stage (`{TENSOR_PARALLEL}`). One device has the "
        "least memory for KV cache, so more devices can gain more than their number. "
        f"{JUDGED_TEXT}\n\n" + format_table([*header, "gain of 2", "gain of 4"], rows)
    )
    return ExperimentResult(
        "Maximum throughput for 1, 2 and 4 devices",
        text,
        make_claims(speed),
        {
            "scalability.svg": lambda path: plot_bars(
                bars, path, "throughput of 4 devices / 1 device", "Gain of four devices"
            )
        },
        measured=PAPER_POLICY,
    )


def make_claims(speed: Speeds) -> list[PaperClaim]:
    """Return the claims on the paper's policy, with the figures of the project's beside them."""
    return join_claims(_claims(speed, PAPER_POLICY), {OUR_POLICY: _claims(speed, OUR_POLICY)})


def _claims(speed: Speeds, policy: str) -> list[PaperClaim]:
    fewest, most = DEVICES[0], DEVICES[-1]
    claims, gains = [], []
    for setting, workload in dict.fromkeys(key[:2] for key in speed):
        ours = speed[setting, workload, policy, most]
        gains.append(ours / speed[setting, workload, policy, fewest])
        for other in ("sarathi", TENSOR_PARALLEL):
            title = f"{_name(setting)}, {workload}: {most} stages against {other}"
            change = ours / speed[setting, workload, other, most] - 1
            claims.append(PaperClaim(title, CLAIMED, change))
    note = f"{min(gains):.2f} x at least"
    title = f"gain of {most} stages"
    return [*claims, PaperClaim(title, "a plot without numbers", None, note)]


def _name(setting: HardwareSetting) -> str:
    over = " over the network" if setting.link == "network" else ""
    return f"{setting.model}, {setting.device}{over}"
