"""The simulator against a server on this machine: profile in one run, predict others.

Serves Poisson arrivals at shares of the server's capacity, and a bursty load, over HTTP.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from experiments.base import OWN_REFERENCE, ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.latency_errors import (
    median_latency,
    median_latency_error,
    normalized_latency_error,
)
from experiments.logged_servers import ServedLoad, serve_over_http
from experiments.prediction_attainment import (
    attainment_claims,
    attainment_section,
    compare_attainment,
)
from experiments.prediction_client import (
    ClientLatencies,
    client_claims,
    client_section,
    predict_client,
)
from gllm.commands.bench.real import RoundRobinLock
from gllm.commands.profile.command import measure_profile
from gllm.config.engine import EngineConfig
from gllm.observability.latency import percentile
from gllm.sim.compare import (
    METRICS,
    WINDOW_SECONDS,
    RunComparison,
    compare_runs,
    median_request_error,
    request_errors,
)
from gllm.sim.costs.profile import CostProfile
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.workloads.requests import make_workload

WORKLOAD = "uniform:16,400,8,60"
STAGES = (1, 2)
Loads = tuple[tuple[str, float, str], ...]
STATIC_SHARE = 0.0
"""Share of capacity of a load whose requests arrive at once, which has no rate."""
LOADS: Loads = (
    ("Poisson, 30 %", 0.3, "poisson"),
    ("Poisson, 60 %", 0.6, "poisson"),
    ("bursts (CV 4), 50 %", 0.5, "gamma:4"),
    ("Poisson, 90 %", 0.9, "poisson"),
    ("all at once", STATIC_SHARE, "static"),
)
"""(name, share of capacity, arrivals)."""
MAX_CLAIMED_SHARE = 0.6
"""Share of capacity up to which the errors at speed are judged. At 90 % the queue of an engine on a
shared machine grows whenever the machine is slower; that row is shown."""
REQUESTS = 120
"""Number of requests per load and round."""
PARTS = 6
"""Turns of each load in a round; they end with nothing left to serve."""
ROUNDS = 3
ALLOWED = 0.1
"""Largest error of a median after dividing out the machine's factor."""
NORMALIZED_LIMITS: tuple[tuple[float, float, float], ...] = (
    (STATIC_SHARE, 0.1, 0.15),
    (0.6, 0.15, 0.25),
)
"""(share of capacity, limit of the median, limit of P95): limits of the errors of the percentiles
of latencies per output token, and harder: of the percentiles of single requests' errors."""


def run(options: ExperimentOptions) -> ExperimentResult:
    """Both numbers of stages: the profile and all loads, in turns."""
    stages, count, rounds = (STAGES[:1], 16, 1) if options.quick else (STAGES, REQUESTS, ROUNDS)
    loads = LOADS[1:2] if options.quick else LOADS
    comparisons: dict[str, RunComparison] = {}
    latencies: dict[str, ClientLatencies] = {}
    judged = []
    for number in stages:
        # Threads of one stage wait for each other, which takes several times as long on a machine
        # that does other work too, and a quick run shows no figures anybody relies on.
        threads = 1 if options.quick else None
        config = EngineConfig.from_options("demo", pipeline_parallel_size=number, threads=threads)
        most = capacity(config, count)
        profile, runs = asyncio.run(_in_turns(config, loads, count, rounds, most, options.progress))
        for (name, share, arrivals), served in zip(loads, runs, strict=True):
            title = f"{number} stage{'s' * (number > 1)}, {name}"
            if arrivals == "poisson":
                latencies[title] = predict_client(served, profile)
            if share <= MAX_CLAIMED_SHARE:
                judged.append(title)
            comparisons[title] = compare_runs(served.events, profile)
    attainments = {
        title: compare_attainment(comparison)
        for title, comparison in comparisons.items()
        if title.endswith(tuple(name for name, _, arrivals in loads if arrivals == "poisson"))
    }
    text = _text(comparisons, profile.machine, rounds * count, rounds * PARTS)
    return ExperimentResult(
        "Prediction against reality",
        f"{client_section(latencies)}\n\n{text}\n\n{attainment_section(attainments)}",
        client_claims(latencies)
        + [_claim(title, comparisons[title]) for title in judged]
        + _normalized_claims(comparisons, loads)
        + attainment_claims(attainments),
        {"prediction.svg": lambda path: _plot(comparisons, path)},
        reference=OWN_REFERENCE,
    )


async def _in_turns(
    config: EngineConfig, loads: Loads, count: int, rounds: int, most: float, progress: bool
) -> tuple[CostProfile, list[ServedLoad]]:
    """Measure the profile and serve each load in turns; return both."""
    turns = RoundRobinLock(len(loads) + 3)

    async def serve_load(share: float, arrivals: str) -> ServedLoad:
        parts = [
            make_workload(WORKLOAD, count // PARTS, (share or 1.0) * most, arrivals, seed=seed)
            for seed in range(rounds * PARTS)
        ]
        return await serve_over_http(config, parts, turns)

    served = asyncio.gather(*(serve_load(share, arrivals) for _, share, arrivals in loads))
    return await asyncio.gather(measure_profile(config, progress, turns, rounds), served)


def _text(
    comparisons: Mapping[str, RunComparison],
    machine: Mapping[str, str],
    num_requests: int,
    num_turns: int,
) -> str:
    """Return what was served on which machine, and the table of the medians."""
    words = ", ".join(f"{key} {value}" for key, value in machine.items())
    return (
        "## Steps and latencies in the server\n\n"
        f"The demo model on this machine ({words}), latencies as the driver sees them. The profile "
        "and each load have servers of their own, which work in turns of a few seconds: the "
        "machine is shared, and its speed "
        f"changes by more than what is to be seen here. {num_requests} requests of {WORKLOAD} "
        f"for each load, in {num_turns} turns, at shares of what the engine serves with all "
        "requests there at once, and one small request before each turn, which wakes the engine "
        "up. Error: as predicted. Machine: what all steps took over what the profile says of the "
        "very same steps. At speed: the error of a prediction with stages and driver slower by "
        f"that factor, taken of each {WINDOW_SECONDS} s of the run: a shared host may stand still "
        "for a second and be at full speed in the next. It is the simulator's own error.\n\n"
        + format_table(
            [
                "load",
                "metric",
                "real",
                "predicted",
                "error",
                "at speed",
                "error of a request",
                "machine",
            ],
            [row for title, comparison in comparisons.items() for row in _rows(title, comparison)],
        )
    )


def _claim(title: str, comparison: RunComparison) -> PaperClaim:
    """Return the claim that every metric's median at speed has an error of at most ALLOWED."""
    shown, errors = [], []
    for metric in METRICS:
        raw, at_speed = (median_latency_error(comparison, metric, each) for each in (False, True))
        errors.append(abs(at_speed))
        shown.append(f"{metric.upper()} {100 * at_speed:+.1f} %, raw {100 * raw:+.1f} %")
    limit = ExpectedLimit(ALLOWED, name="aim (Vidur: < 9 % on GPUs)")
    return PaperClaim(f"{title}: medians at speed", limit, max(errors), f"({'; '.join(shown)})")


def _normalized_claims(comparisons: dict[str, RunComparison], loads: Loads) -> list[PaperClaim]:
    """Return the claims on latencies per output token and on single requests, at speed."""
    of_percentiles, of_requests = [], []
    for share, *limits in NORMALIZED_LIMITS:
        names = [name for name, load_share, _ in loads if load_share == share]
        for title, comparison in comparisons.items():
            if not title.endswith(tuple(f", {name}" for name in names)):
                continue
            errors = request_errors(comparison, "e2el", at_speed=True)
            for words, percent, limit in zip(("median", "P95"), (50, 95), limits, strict=True):
                error = normalized_latency_error(comparison, percent, at_speed=True)
                of_percentiles.append(
                    PaperClaim(
                        f"{title}: {words} of E2EL per output token at speed",
                        ExpectedLimit(limit, name="aim (Vidur's figure)"),
                        abs(error),
                        f"({100 * error:+.1f} %)",
                    )
                )
                of_requests.append(
                    PaperClaim(
                        f"{title}: {words} error of a request's E2EL at speed",
                        ExpectedLimit(limit),
                        percentile(errors, percent),
                    )
                )
    return of_percentiles + of_requests


def _plot(comparisons: dict[str, RunComparison], path: Path) -> None:
    bars = {
        title: {
            metric.upper(): 100 * abs(median_latency_error(comparison, metric))
            for metric in METRICS
        }
        for title, comparison in comparisons.items()
    }
    plot_bars(bars, path, "error of the median, %", "Prediction against reality")


def capacity(config: EngineConfig, count: int) -> float:
    """Return the requests per second that a server serves when all arrive at once."""
    jobs = make_workload(WORKLOAD, count, 1.0, "static", seed=3)
    served = asyncio.run(serve_over_http(config, [jobs, jobs], RoundRobinLock(1)))
    lines = [each.line for each in served.requests[-count:]]
    return count / (max(line.times[-1] for line in lines) - min(line.arrival for line in lines))


def _rows(title: str, comparison: RunComparison) -> list[list[str]]:
    """Return table rows with the medians of each metric."""
    rows = []
    for metric in METRICS:
        values = [median_latency(run, metric) for run in (comparison.real, comparison.predicted)]
        errors = [median_latency_error(comparison, metric, at_speed) for at_speed in (False, True)]
        rows.append(
            [
                title,
                f"median {metric.upper()}, ms",
                *(show_value(value, 1e3) for value in values),
                *(f"{100 * error:+.1f} %" for error in errors),
                f"{100 * median_request_error(comparison, metric):.1f} %",
                f"{comparison.slowdown:.2f}",
            ]
        )
    return rows
