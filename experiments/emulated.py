"""Experiments of the paper on emulated devices (`--emulated`): the simulated trials, served.

The runtime is real; each step takes the time of the simulator's cost model. The claims of the paper
are judged on its own policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from experiments import (
    ablation,
    latency_vs_rate,
    policy_cells,
    policy_verdicts,
    scalability,
    sensitivity,
    slo,
    speculation,
    volatility,
)
from experiments.base import (
    OWN_REFERENCE,
    PAPER_REFERENCE,
    ExperimentOptions,
    ExperimentResult,
)
from experiments.claims import ExpectedLimit, PaperClaim, join_claims, relative_change
from experiments.emulated_trials import MAX_LATE, GroupServer, ServedTrial, serve_trials
from experiments.parallel import map_parallel
from experiments.trials import (
    OUR_POLICY,
    PAPER_POLICY,
    SimulationTrial,
    TrialRun,
    deploy_trial,
    describe_option,
    estimate_capacities,
    make_base,
    simulate_trial,
)
from gllm.sim.hardware.devices import find_link
from gllm.sim.metrics.report import format_table, show_value

MAX_ERROR = 0.05
"""Largest difference between an emulated and a simulated mean."""
LATE = "not judged: a trial was too late"
"""In place of the figure of a claim on an invalid trial."""


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
    Metric("CV of time", "seconds_per_step_variation", None, is_compared=False),
    Metric("bubbles, %", "bubble_share", None, 100, is_compared=False),
)


@dataclass(frozen=True)
class EmulatedExperiment:
    """Trials of an experiment for emulated devices, and its claims on their runs."""

    title: str
    make_trials: Callable[[ExperimentOptions], list[SimulationTrial]]
    make_claims: Callable[[list[TrialRun], str], list[PaperClaim]]
    """Of the runs of all trials and the policy that is judged."""
    policies: tuple[str, ...] = (PAPER_POLICY, OUR_POLICY)
    """The policy that is judged, and others for which the claims are made."""
    requests: int = 100
    """Requests per trial, by default: they take real time."""
    requests_of: str = "trial"
    """Unit to which `requests` belongs."""
    text: str = ""
    """Explanation of the policies and claims, for the page."""
    reference: str = PAPER_REFERENCE
    """Source of the claims."""


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
        "SLO attainment against request rate",
        slo.emulated_trials,
        slo.emulated_claims,
        requests=300,
    ),
    "ablation": EmulatedExperiment(
        "Ablation of token throttling",
        ablation.emulated_trials,
        ablation.emulated_claims,
        (PAPER_POLICY,),
    ),
    "sensitivity": EmulatedExperiment(
        "Sensitivity to the hyper-parameters",
        sensitivity.emulated_trials,
        sensitivity.emulated_claims,
        (PAPER_POLICY,),
        requests=200,
    ),
    "volatility": EmulatedExperiment(
        "Volatility of micro-batches", volatility.emulated_trials, volatility.emulated_claims
    ),
    "policies": EmulatedExperiment(
        "The default policy beside others",
        policy_cells.emulated_trials,
        policy_cells.emulated_claims,
        (OUR_POLICY,),
        requests=60,
        text=f"{policy_verdicts.AIMS} {policy_verdicts.OTHERS}\n\n",
        reference=OWN_REFERENCE,
    ),
    "speculation": EmulatedExperiment(
        "Speculation over pipelines",
        speculation.emulated_trials,
        speculation.emulated_claims,
        (OUR_POLICY,),
        requests=3,
        requests_of="stream",
        text=f"{speculation.EXPLANATION}\n\n",
        reference=OWN_REFERENCE,
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
    served = serve_trials(trials, speed, options.progress, serve, simulated)
    judged, *others = experiment.policies
    claims = make_claims(experiment, simulated, served, judged)
    columns = {f"simulated {judged}": experiment.make_claims(simulated, judged)}
    for policy in others:
        columns[f"emulated {policy}"] = make_claims(experiment, simulated, served, policy)
    claims = join_claims(claims, columns) + fidelity_claims(simulated, served)
    at_speed = "" if speed == 1 else f", at {speed:g} times their speed"
    text = (
        f"{options.requests} requests per {experiment.requests_of}, served by engines on emulated "
        f"devices{at_speed}: the whole runtime on this machine, with steps that take the time of "
        "the simulator's cost model. Cells: simulated / emulated, of the same requests. Shares in "
        f"brackets: of what {OUR_POLICY} serves in the simulator with all requests there at once. "
        f"The claims are judged on emulated devices under {judged}. A trial that is late by more "
        f"than {100 * MAX_LATE:.0f} % of the time of its steps runs once more; if it is again, "
        f"it is invalid: its figures are left out. {describe_hardware(trials)}\n\n"
        + experiment.text
        + comparison_table(simulated, served, options)
        + name_misses(claims)
    )
    title = f"{experiment.title}, on emulated devices"
    return ExperimentResult(
        title, text, claims, reference=experiment.reference, measured=f"emulated {judged}"
    )


def make_claims(
    experiment: EmulatedExperiment,
    simulated: Sequence[TrialRun],
    served: Sequence[ServedTrial],
    policy: str,
) -> list[PaperClaim]:
    """Return the claims on emulated runs of a policy; those on an invalid run are not judged.

    A claim is on an invalid run if it changes with the simulation in its place, or if no run is
    valid.
    """
    runs = [each.run for each in served]
    valid = [
        each.run if each.is_valid else expected
        for each, expected in zip(served, simulated, strict=True)
    ]
    pairs = (experiment.make_claims(each, policy) for each in (runs, valid))
    has_valid = any(each.is_valid for each in served)
    return [
        claim if has_valid and claim == expected else replace(claim, ours=None, note=LATE)
        for claim, expected in zip(*pairs, strict=True)
    ]


def fidelity_claims(
    simulated: Sequence[TrialRun], served: Sequence[ServedTrial]
) -> list[PaperClaim]:
    """Return the limits on lateness and on the difference from the simulation."""
    latest = max(served, key=lambda each: each.late_share)
    num_invalid = sum(not each.is_valid for each in served)
    claims = [
        PaperClaim(
            "largest lateness of a trial, over the time of its steps",
            ExpectedLimit(MAX_LATE),
            latest.late_share,
            f"({num_invalid} of {len(served)} trials are invalid)" if num_invalid else "",
        )
    ]
    valid = [pair for pair in zip(simulated, served, strict=True) if pair[1].is_valid]
    for metric in METRICS if valid else ():
        if not metric.is_compared:
            continue
        changes = [
            (relative_change(metric.read(each.run), metric.read(expected)), expected.trial)
            for expected, each in valid
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
    arriving = [run.trial for run in simulated if run.trial.arrivals != "static"]
    capacities = estimate_capacities(arriving, options)
    has_slo = any(run.trial.slo for run in simulated)
    rows = []
    for expected, each in zip(simulated, served, strict=True):
        trial = expected.trial
        rate = "all at once"
        if trial.arrivals != "static":
            share = trial.rate / capacities[make_base(trial)]
            rate = f"{show_value(trial.rate)} ({show_value(share)})"
        cells = [_setting(trial), rate, trial.policy]
        for metric in METRICS:
            emulated = show_value(metric.read(each.run), metric.factor) if each.is_valid else "-"
            cells.append(f"{show_value(metric.read(expected), metric.factor)} / {emulated}")
        if has_slo:
            limits = trial.slo.request_limits.values()
            cells.append(", ".join(f"{1e3 * seconds:.0f}" for seconds in limits))
            shares = [run.figures["slo_attainment"] for run in (expected, each.run)]
            emulated = show_value(shares[1], 100) if each.is_valid else "-"
            cells.append(f"{show_value(shares[0], 100)} / {emulated}")
        late = show_value(each.late_share, 100)
        rows.append([*cells, late if each.is_valid else f"**{late}, invalid**"])
    header = ["setting", "rate, 1/s (share)", "policy", *(metric.title for metric in METRICS)]
    header += ["limits of TTFT, TPOT, ms", "SLOs met, %"] if has_slo else []
    return format_table([*header, "late, %"], rows)


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


def _setting(trial: SimulationTrial) -> str:
    words = [f"{trial.setting}, {trial.workload}"]
    words += [trial.arrivals] if trial.arrivals not in ("poisson", "static") else []
    words += [f"{trial.kv_share} of the cache"] if trial.kv_share < 1 else []
    words += [describe_option(name, value) for name, value in trial.options]
    return ", ".join(words)


def _label(trial: SimulationTrial) -> str:
    rate = "all at once" if trial.arrivals == "static" else f"{show_value(trial.rate)}/s"
    return f"{_setting(trial)}, {rate}, {trial.policy}"
