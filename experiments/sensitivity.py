"""#T, #MaxP, KV_thresh and #MinP one by one: the paper's Figure 16.

Varies one value at a time, with the paper's rule and with ours.
"""

from dataclasses import replace
from typing import Any

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import (
    ExpectedDirection,
    ExpectedLimit,
    PaperClaim,
    join_claims,
    relative_change,
)
from experiments.trials import (
    CAPACITY_LINK,
    JUDGED_TEXT,
    L20_32B,
    OUR_POLICY,
    PAPER_POLICY,
    SimulationTrial,
    TrialRun,
    plan_rates,
    run_trials,
)
from gllm.sim.metrics.plots import ChartPanel, plot_grid
from gllm.sim.metrics.report import format_table, show_value

VALUES: dict[str, tuple[float, ...]] = {
    "prefill_iterations": (1, 2, 4, 8, 16, 32),
    "max_prefill_tokens": (512, 1024, 2048, 4096),
    "kv_threshold": (0.0, 0.05, 0.1, 0.2),
    "min_prefill_tokens": (8, 32, 64, 128),
    "ridge_tokens": (50, 100, 150, 225, 450),
}
EMULATED_VALUES: dict[float, dict[str, tuple[float, ...]]] = {
    1.6: {"prefill_iterations": (1, 4, 32), "min_prefill_tokens": (8, 128)},
    2.6: {"max_prefill_tokens": (512, 2048), "kv_threshold": (0.0, 0.05)},
}
"""Values on emulated devices, by requests per second: below capacity, and above it."""
SYMBOLS = {
    "prefill_iterations": "#T",
    "max_prefill_tokens": "#MaxP",
    "kv_threshold": "KV_thresh",
    "min_prefill_tokens": "#MinP",
    "ridge_tokens": "ridge tokens",
}
POLICIES = (PAPER_POLICY, OUR_POLICY)
KV_SHARE = 0.25
"""Share of the KV cache in use: KV_thresh matters only for a cache that fills up."""
SHARE = 1.0
OVERLOAD = 1.2
"""Share of capacity at which throughput and preemptions are compared."""
OVERLOAD_FIELDS = ("max_prefill_tokens", "kv_threshold")
KEPT = 0.1
"""A latency that rises by at most this much counts as kept."""
WORKLOAD = "azure-conv"

ResultKey = tuple[str, str, float]
"""Policy, field and value."""
Results = dict[ResultKey, dict[str, Any]]


def run(options: ExperimentOptions) -> ExperimentResult:
    """Change one field at a time, the others at their defaults."""
    base = SimulationTrial(L20_32B, WORKLOAD, "throttle", 1.0, options.requests, kv_share=KV_SHARE)
    ((base, overloaded),) = plan_rates([base], [SHARE, OVERLOAD], options)
    keys = [
        (policy, field, value)
        for policy in POLICIES
        for field, values in VALUES.items()
        for value in (values[::2] if options.quick else values)
        if field != "ridge_tokens" or policy == "throttle"
    ]
    overload_keys = [key for key in keys if key[1] in OVERLOAD_FIELDS]
    trials = [_make_trial(base, key) for key in keys]
    trials += [_make_trial(overloaded, key) for key in overload_keys]
    figures = run_trials(trials, options)
    results: Results = dict(zip(keys, figures[: len(keys)], strict=True))
    at_overload: Results = dict(zip(overload_keys, figures[len(keys) :], strict=True))
    text = (
        f"Simulated: {L20_32B}, {WORKLOAD}, {options.requests} requests with Poisson arrivals at "
        f"{show_value(base.rate)}/s, {SHARE} of {CAPACITY_LINK}, with {KV_SHARE} of the KV "
        f"cache. {JUDGED_TEXT}\n\n{_table(results)}\n\nThroughput and preemptions depend on the "
        "fields only where more arrives than is sustained. At "
        f"{show_value(overloaded.rate)}/s, {OVERLOAD} of capacity:\n\n{_table(at_overload)}"
    )
    claims = [] if options.quick else make_claims(results, at_overload)
    return ExperimentResult(
        "Sensitivity to the hyper-parameters",
        text,
        claims,
        {"sensitivity.svg": lambda path: plot_grid(_panels(results), path)},
        measured=PAPER_POLICY,
    )


def _make_trial(base: SimulationTrial, key: ResultKey) -> SimulationTrial:
    policy, field, value = key
    return replace(base, policy=policy, options=((field, value),))


def _table(results: Results) -> str:
    rows = [
        [
            policy,
            SYMBOLS[field],
            f"{value:g}",
            *(show_value(figures[name]["mean"], 1e3) for name in ("ttft", "tpot")),
            show_value(figures["itl"]["p99"], 1e3),
            show_value(figures["steady_tokens_per_second"]),
            str(figures["preemptions"]),
            show_value(figures["bubble_share"], 100),
        ]
        for (policy, field, value), figures in results.items()
    ]
    header = ["policy", "field", "value", "TTFT, ms", "TPOT, ms", "ITL p99, ms", "tokens/s"]
    return format_table([*header, "preemptions", "bubbles, %"], rows)


def make_claims(results: Results, at_overload: Results) -> list[PaperClaim]:
    """Return the claims on the paper's policy, with the figures of the project's beside them."""
    judged, ours = (_claims(results, at_overload, policy) for policy in (PAPER_POLICY, OUR_POLICY))
    return join_claims(judged, {OUR_POLICY: ours})


def _claims(results: Results, at_overload: Results, policy: str) -> list[PaperClaim]:
    """Return the paper's four statements as claims on a policy."""

    def change(field: str, metric: str, old: float, new: float) -> float:
        old_figures, new_figures = (results[policy, field, value] for value in (old, new))
        return relative_change(new_figures[metric]["mean"], old_figures[metric]["mean"])

    none, some = (at_overload[policy, "kv_threshold", v]["preemptions"] for v in (0.0, 0.05))
    small, large = (
        float(at_overload[policy, "max_prefill_tokens", v]["steady_tokens_per_second"])
        for v in (512, 2048)
    )
    ends = [
        float(figures["e2el"]["mean"])
        for (name, field, _), figures in results.items()
        if (name, field) == (policy, "min_prefill_tokens")
    ]
    return [
        PaperClaim(
            f"{policy}: #T 1 to 4, TTFT",
            ExpectedLimit(KEPT, digits=0, name="kept"),
            change("prefill_iterations", "ttft", 1, 4),
        ),
        PaperClaim(
            f"{policy}: #T 1 to 4, TPOT",
            ExpectedDirection(False, "lower"),
            change("prefill_iterations", "tpot", 1, 4),
        ),
        PaperClaim(
            f"{policy}: #T 4 to 32, TTFT",
            ExpectedDirection(True, "higher"),
            change("prefill_iterations", "ttft", 4, 32),
        ),
        PaperClaim(
            f"{policy}: #MaxP 2048 to 512, throughput",
            ExpectedDirection(False, "lower"),
            relative_change(small, large),
        ),
        PaperClaim(
            f"{policy}: KV_thresh 0.05 to 0, preemptions",
            ExpectedDirection(True, "more"),
            relative_change(none, some),
            f"({some} to {none})",
        ),
        PaperClaim(
            f"{policy}: #MinP, E2EL",
            ExpectedLimit(0.02, name="spread"),
            max(ends) / min(ends) - 1,
        ),
    ]


def emulated_trials(options: ExperimentOptions) -> list[SimulationTrial]:
    """Return the trials for emulated devices."""
    base = SimulationTrial(L20_32B, WORKLOAD, "throttle", 1.0, options.requests, kv_share=KV_SHARE)
    return [
        _make_trial(replace(base, rate=rate), ("throttle-paper", field, value))
        for rate, fields in EMULATED_VALUES.items()
        for field, values in fields.items()
        for value in values
    ]


def emulated_claims(runs: list[TrialRun], policy: str) -> list[PaperClaim]:
    """Return the claims on a policy, from the runs of `emulated_trials`."""
    at_rate: dict[float, Results] = {rate: {} for rate in EMULATED_VALUES}
    for run in runs:
        ((field, value),) = run.trial.options
        if run.trial.policy == policy:
            at_rate[run.trial.rate][policy, field, value] = run.figures
    sustained, overloaded = at_rate.values()
    return _claims(sustained, overloaded, policy)


def _panels(results: Results) -> list[ChartPanel]:
    panels = []
    for field in VALUES:
        series = {}
        for name, label in (("ttft", "TTFT"), ("tpot", "TPOT")):
            for policy in POLICIES:
                points = {
                    value: figures[name]["mean"]
                    for (p, f, value), figures in results.items()
                    if (p, f) == (policy, field)
                }
                if points:
                    first = next(iter(points.values()))
                    series[f"{label}, {policy}"] = [(v, each / first) for v, each in points.items()]
        panels.append(ChartPanel(SYMBOLS[field], SYMBOLS[field], "against the first value", series))
    return panels
