"""Experiments of the paper on emulated devices (`--emulated`): the simulated trials, served.

The runtime is real; each step takes the time of the simulator's cost model. The paper's own policy
is judged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from experiments import ablation, latency_vs_rate, scalability, sensitivity, slo, volatility
from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim, relative_change
from experiments.emulated_trials import GroupServer, ServedTrial, serve_trials
from experiments.parallel import map_parallel
from experiments.trials import (
    SimulationTrial,
    TrialRun,
    deploy_trial,
    estimate_capacity,
    simulate_trial,
)
from gllm.sim.hardware.devices import find_link
from gllm.sim.metrics.report import format_table, show_value

PAPER_POLICY, OUR_POLICY = "throttle-paper", "throttle"
MAX_LATE = 0.02
"""Lateness, as a share of the time of the steps, up to which an emulated run is usable."""
MAX_ERROR = 0.05
"""Largest difference between an emulated and a simulated mean."""
CAPACITY_REQUESTS = 400
"""Requests of the simulation with all of them there at once, of which rates are shares."""


class Metric(NamedTuple):
    """Figure of a run for the table."""

    title: str
    name: str
    """Of the figures of `summarize_run`."""
    statistic: str | None = "mean"
    factor: float = 1.0
    is_compared: bool = True
    """True if its largest difference is judged."""

    def read(self, run: TrialRun) -> float:
        """Return the figure of a run."""
        value = run.figures[self.name]
        if isinstance(value, list):
            return float(sum(value) / len(value))
        return float(value if self.statistic is None else value[self.statistic])


METRICS = (
    Metric("TTFT, ms", "ttft", factor=1e3),
    Metric("TPOT, ms", "tpot", factor=1e3),
    Metric("ITL p99, ms", "itl", "p99", 1e3, is_compared=False),
    Metric("E2EL, s", "e2el"),
    Metric("tokens/s", "steady_tokens_per_second", None),
    Metric("CV of tokens", "tokens_per_step_variation", None, is_compared=False),
    Metric("bubbles, %", "bubble_share", None, 100, is_compared=False),
)


@dataclass(frozen=True)
class EmulatedExperiment:
    """Trials of an experiment for emulated devices, and its claims on their runs."""

    title: str
    make_trials: Callable[[ExperimentOptions], list[SimulationTrial]]
    make_claims: Callable[[list[TrialRun], str], list[PaperClaim]]
    """Of the runs of all trials and the policy that is judged."""
    compares_ours: bool = True
    """True if the claims can be made for the project's own policy too."""


EMULATED = {
    "latency-vs-rate": EmulatedExperiment(
        "Latency and throughput against request rate",
        latency_vs_rate.emulated_trials,
        latency_vs_rate.emulated_claims,
    ),
    "scalability": EmulatedExperiment(
        "Maximum throughput for 1, 2 and 4 devices",
        scalability.emulated_trials,
        scalability.emulated_claims,
    ),
    "slo": EmulatedExperiment(
        "SLO attainment against request rate", slo.emulated_trials, slo.emulated_claims
    ),
    "ablation": EmulatedExperiment(
        "Ablation of token throttling",
        ablation.emulated_trials,
        ablation.emulated_claims,
        compares_ours=False,
    ),
    "sensitivity": EmulatedExperiment(
        "Sensitivity to the hyper-parameters",
        sensitivity.emulated_trials,
        sensitivity.emulated_claims,
        compares_ours=False,
    ),
    "volatility": EmulatedExperiment(
        "Volatility of micro-batches", volatility.emulated_trials, volatility.emulated_claims
    ),
}
"""By name of the experiment."""


def run(
    name: str, options: ExperimentOptions, speed: float = 1.0, serve: GroupServer | None = None
) -> ExperimentResult:
    """Serve the trials of an experiment on emulated devices, and simulate them.

    Args:
        name: A key of EMULATED.
        options: Of the experiment.
        speed: Emulated seconds per second.
        serve: Runs the engines; None for those of this machine.
    """
    experiment = EMULATED[name]
    trials = experiment.make_trials(options)
    records = map_parallel(simulate_trial, trials, options.jobs, options.progress)
    simulated = [TrialRun(*pair) for pair in zip(trials, records, strict=True)]
    served = serve_trials(trials, speed, options.progress, serve)
    emulated = [each.run for each in served]
    others = {"simulated": experiment.make_claims(simulated, PAPER_POLICY)}
    if experiment.compares_ours:
        others[f"emulated {OUR_POLICY}"] = experiment.make_claims(emulated, OUR_POLICY)
    claims = join_claims(experiment.make_claims(emulated, PAPER_POLICY), others)
    claims += fidelity_claims(simulated, served)
    at_speed = "" if speed == 1 else f", at {speed:g} times their speed"
    text = (
        f"{options.requests} requests per trial, served by engines on emulated devices"
        f"{at_speed}: the whole runtime on this machine, with steps that take the time of the "
        "simulator's cost model. Cells: simulated / emulated, of the same requests. Shares in "
        f"brackets: of what {OUR_POLICY} serves in the simulator with all requests there at once. "
        f"The claims are judged on emulated devices and the paper's own policy, {PAPER_POLICY}. "
        f"{describe_hardware(trials)}\n\n"
        + comparison_table(simulated, served, options)
        + name_misses(claims)
    )
    return ExperimentResult(f"{experiment.title}, on emulated devices", text, claims)


def join_claims(claims: list[PaperClaim], others: dict[str, list[PaperClaim]]) -> list[PaperClaim]:
    """Return the claims with the figures of others, by their name, as a note."""
    joined = []
    for index, claim in enumerate(claims):
        notes = [f"{name}: {each[index].shown}" for name, each in others.items()]
        note = f"{claim.note}{claim.note and ' '}({'; '.join(notes)})"
        joined.append(replace(claim, note=note))
    return joined


def fidelity_claims(
    simulated: Sequence[TrialRun], served: Sequence[ServedTrial]
) -> list[PaperClaim]:
    """Return the limits on lateness and on the difference from the simulation."""
    latest = max(served, key=lambda each: each.late_share)
    claims = [
        PaperClaim(
            "largest lateness of a trial, over the time of its steps",
            ExpectedLimit(MAX_LATE),
            latest.late_share,
        )
    ]
    for metric in METRICS:
        if not metric.is_compared:
            continue
        changes = [
            (relative_change(metric.read(each.run), metric.read(expected)), expected.trial)
            for expected, each in zip(simulated, served, strict=True)
        ]
        worst, trial = max(changes, key=lambda pair: abs(pair[0]))
        mean = sum(abs(change) for change, _ in changes) / len(changes)
        title = metric.title.partition(",")[0]
        note = f"({100 * worst:+.1f} % at {_label(trial)}; mean {100 * mean:.1f} %)"
        claims.append(
            PaperClaim(
                f"largest difference of {title} from the simulation",
                ExpectedLimit(MAX_ERROR),
                abs(worst),
                note,
            )
        )
    return claims


def comparison_table(
    simulated: Sequence[TrialRun], served: Sequence[ServedTrial], options: ExperimentOptions
) -> str:
    """Return the figures of all trials, simulated beside emulated."""
    capacities = _estimate_capacities([run.trial for run in simulated], options)
    has_slo = any(run.trial.slo for run in simulated)
    rows = []
    for expected, each in zip(simulated, served, strict=True):
        trial = expected.trial
        rate = "all at once"
        if trial.arrivals != "static":
            share = trial.rate / capacities[_base_of(trial)]
            rate = f"{show_value(trial.rate)} ({show_value(share)})"
        cells = [_setting(trial), rate, trial.policy]
        for metric in METRICS:
            values = (metric.read(run) for run in (expected, each.run))
            cells.append(" / ".join(show_value(value, metric.factor) for value in values))
        if has_slo:
            shares = (run.figures["slo_attainment"] for run in (expected, each.run))
            cells.append(" / ".join(show_value(share, 100) for share in shares))
        rows.append([*cells, show_value(each.late_share, 100)])
    header = ["setting", "rate, 1/s (share)", "policy", *(metric.title for metric in METRICS)]
    return format_table([*header, *(["SLOs met, %"] if has_slo else []), "late, %"], rows)


def describe_hardware(trials: Sequence[SimulationTrial]) -> str:
    """Return the peak rates of the devices and links of trials, which bound every figure."""
    sentences = []
    for setting in dict.fromkeys(trial.setting for trial in trials):
        hardware = deploy_trial(SimulationTrial(setting, "azure-conv", OUR_POLICY, 1.0, 1)).hardware
        assert hardware is not None, "the devices are those of a data sheet"
        device = hardware.stages[0].device
        weights = max(hardware.rank_weight_bytes(stage) for stage in range(setting.stages))
        sentence = (
            f"Limits of {setting}: {device.flops / 1e12:g} TFLOP/s, "
            f"{device.bandwidth / 1e9:g} GB/s and {device.memory / 1e9:g} GB per device; a step "
            f"reads its weights in at least {1e3 * weights / device.bandwidth:.1f} ms"
        )
        if setting.stages > 1:
            names = dict.fromkeys(setting.link.split(","))
            rates = (f"{name} {find_link('link', name).bandwidth / 1e9:g} GB/s" for name in names)
            sentence += f"; links between stages: {', '.join(rates)}"
        sentences.append(f"{sentence}.")
    return " ".join(sentences)


def name_misses(claims: list[PaperClaim]) -> str:
    """Return a sentence with the missed claims."""
    missed = [
        f"{claim.quantity} ({claim.shown})" for claim in claims if claim.verdict.is_met is False
    ]
    return f"\n\nMissed: {'; '.join(missed)}." if missed else "\n\nNo claim is missed."


def _base_of(trial: SimulationTrial) -> SimulationTrial:
    """Return the trial that shows the capacity of the setting of another one."""
    return SimulationTrial(
        trial.setting,
        trial.workload,
        OUR_POLICY,
        1.0,
        max(trial.requests, CAPACITY_REQUESTS),
        kv_share=trial.kv_share,
    )


def _estimate_capacities(
    trials: Sequence[SimulationTrial], options: ExperimentOptions
) -> dict[SimulationTrial, float]:
    bases = list(dict.fromkeys(_base_of(t) for t in trials if t.arrivals != "static"))
    rates = map_parallel(estimate_capacity, bases, options.jobs, options.progress, "capacity")
    return dict(zip(bases, rates, strict=True))


def _setting(trial: SimulationTrial) -> str:
    words = [f"{trial.setting}, {trial.workload}"]
    words += [f"{trial.kv_share} of the cache"] if trial.kv_share < 1 else []
    words += [f"{name} {value:g}" for name, value in trial.options]
    return ", ".join(words)


def _label(trial: SimulationTrial) -> str:
    rate = "all at once" if trial.arrivals == "static" else f"{show_value(trial.rate)}/s"
    return f"{_setting(trial)}, {rate}, {trial.policy}"
