"""The simulator against this machine's engine: profile in one run, predict others.

Owns the loads: Poisson arrivals at shares of what the engine serves at most, and a bursty one.
"""

import asyncio
import tempfile
from pathlib import Path
from statistics import median

from gllm.config import EngineConfig
from gllm.experiments.base import Claim, Options, Result
from gllm.experiments.profile import measure
from gllm.experiments.real import serve
from gllm.sim.compare import (
    METRICS,
    Comparison,
    compare_runs,
    error_of_median,
    median_error,
    median_of,
)
from gllm.sim.plots import plot_bars
from gllm.sim.profile import Profile, read_profile
from gllm.sim.report import show, text_table
from gllm.sim.run import run_of
from gllm.sim.workload import make_jobs

WORKLOAD = "uniform:16,400,8,60"
STAGES = (1, 2)
LOADS = (
    ("Poisson, 30 %", 0.3, "poisson"),
    ("Poisson, 50 %", 0.5, "poisson"),
    ("Poisson, 70 %", 0.7, "poisson"),
    ("bursts (CV 4), 50 %", 0.5, "gamma:4"),
)
"""(name, share of capacity, arrivals)."""
REQUESTS = 120
ROUNDS = 3
ALLOWED = 0.15


def run(options: Options) -> Result:
    """Both numbers of stages, all loads, round by round: profile, then every load."""
    stages, count, rounds = (STAGES[:1], 16, 1) if options.quick else (STAGES, REQUESTS, ROUNDS)
    loads = LOADS[1:2] if options.quick else LOADS
    found: dict[str, list[Comparison]] = {}
    machine = ""
    for number in stages:
        config = EngineConfig.of("demo", pipeline_parallel_size=number)
        most = capacity(config, count)
        for _ in range(rounds):
            profile = _profile(config, options.progress)
            machine = ", ".join(f"{key} {value}" for key, value in profile.machine.items())
            for name, share, arrivals in loads:
                jobs = make_jobs(WORKLOAD, count, share * most, arrivals, seed=7)
                title = f"{number} stage{'s' * (number > 1)}, {name}"
                found.setdefault(title, []).append(compare_runs(serve(config, jobs), profile))
    text = (
        f"The demo model on this machine ({machine}). Each round takes a profile with an engine of "
        f"its own and then serves the loads: {count} requests of {WORKLOAD}, at shares of what the "
        f"engine serves with all requests there at once. Medians of {rounds} rounds. Machine: what "
        "the stages took over what the profile says of the very same steps, in each round: how "
        "much slower the machine was. At speed: the error of a prediction with all stages slower "
        "by that, the simulator's own.\n\n"
        + text_table(
            [
                *("load", "metric", "real", "predicted", "error", "at speed"),
                *("error of a request", "machine"),
            ],
            [row for title, each in found.items() for row in _rows(title, each)],
        )
    )
    return Result(
        "Prediction against reality",
        text,
        [_claim(title, each) for title, each in found.items()],
        {"prediction.svg": lambda path: _plot(found, path)},
    )


def _claim(title: str, rounds: list[Comparison]) -> Claim:
    """Whether the median error over the rounds is small enough for every metric."""
    errors = {
        metric.upper(): median(error_of_median(both, metric) for both in rounds)
        for metric in METRICS
    }
    shown = ", ".join(f"{metric} {100 * error:+.1f} %" for metric, error in errors.items())
    met = max(map(abs, errors.values())) <= ALLOWED
    return Claim(title, "asked for: within 15 % (Vidur: < 9 % on GPUs)", shown, met)


def _plot(found: dict[str, list[Comparison]], path: Path) -> None:
    bars = {
        title: {
            metric.upper(): 100 * abs(median(error_of_median(both, metric) for both in rounds))
            for metric in METRICS
        }
        for title, rounds in found.items()
    }
    plot_bars(bars, path, "error of the median, %", "Prediction against reality")


def _profile(config: EngineConfig, progress: bool) -> Profile:
    with tempfile.TemporaryDirectory(prefix="gllm-") as folder:
        path = Path(folder) / "profile.json"
        asyncio.run(measure(config, path, progress))
        return read_profile(path)


def capacity(config: EngineConfig, count: int) -> float:
    """Requests a second with all of them there at once."""
    jobs = make_jobs(WORKLOAD, count, 1.0, "static", seed=3)
    run = run_of(serve(config, jobs))
    return count / (run.end - run.begin)


def _rows(title: str, rounds: list[Comparison]) -> list[list[str]]:
    """The medians of each metric."""
    rows = []
    machine = " ".join(f"{both.slowdown:.2f}" for both in rounds)
    for metric in METRICS:
        values = [
            median(median_of(getattr(both, which), metric) for both in rounds)
            for which in ("real", "predicted")
        ]
        cells = [show(value, 1e3) for value in values]
        for at_speed in (False, True):
            error = median(error_of_median(both, metric, at_speed) for both in rounds)
            cells.append(f"{100 * error:+.1f} %")
        each = median(median_error(both, metric) for both in rounds)
        name = f"median {metric.upper()}, ms"
        rows.append([title, name, *cells, f"{100 * each:.1f} %", machine])
    return rows
