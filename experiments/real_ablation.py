"""The ablation on this machine's engine.

Serves short conversations to the demo model on two and four stages at a saturated rate.
"""

from statistics import median
from typing import Any

from experiments.ablation import (
    BASE,
    POLICIES,
    SATURATED,
    ablation_claims,
    ablation_plots,
    ablation_table,
)
from experiments.base import ExperimentOptions, ExperimentResult
from experiments.logged_servers import LoggedServer, serve_logged
from gllm.config.engine import EngineConfig
from gllm.observability.progress import ProgressBar, show_progress
from gllm.sim.metrics.report import summarize_run
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.workloads.requests import WorkloadRequest, make_workload

STAGES = (2, 4)
REQUESTS = 100
ROUNDS = 3
LENGTH_SCALE = 0.2
"""Factor on the trace's lengths: the demo model's context is 1,024 tokens."""


def run(options: ExperimentOptions, serve: LoggedServer = serve_logged) -> ExperimentResult:
    """Serve the same jobs with every policy, round by round; return medians over the rounds.

    Args:
        options: Of the experiment.
        serve: Serves the jobs.
    """
    stages, count, rounds = (STAGES[:1], 12, 1) if options.quick else (STAGES, REQUESTS, ROUNDS)
    total = len(stages) * (1 + rounds * len(POLICIES))
    with show_progress("run", total, is_shown=options.progress) as bar:
        groups = dict(_measure_policies(serve, number, count, rounds, bar) for number in stages)
    text = (
        f"The demo model on this machine, {count} requests of azure-conv's lengths x "
        f"{LENGTH_SCALE}, Poisson arrivals at what throttle serves with all requests there at "
        f"once; medians of {rounds} rounds in alternating order. Stages share the cores. Changes "
        f"are against {BASE}.\n\n" + ablation_table(groups)
    )
    plots = {
        name.replace("ablation", "ablation-real"): draw
        for name, draw in ablation_plots(groups).items()
    }
    return ExperimentResult(
        "Ablation of token throttling, real engine", text, ablation_claims(groups), plots
    )


def _measure_policies(
    serve: LoggedServer, num_stages: int, count: int, rounds: int, bar: ProgressBar
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the setting of a number of stages, and the figures of each policy."""
    static = _figures(serve, num_stages, "throttle", _static(count))
    most = len(_jobs(count, 1.0)) / _seconds(static)
    bar.update()
    jobs = _jobs(count, SATURATED * most)
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for turn in range(rounds):
        for policy in POLICIES if turn % 2 == 0 else reversed(POLICIES):
            found[policy].append(_figures(serve, num_stages, policy, jobs))
            bar.update()
    name = f"demo at --pp {num_stages}, {SATURATED * most:.1f}/s"
    return name, {policy: median_figures(figures) for policy, figures in found.items()}


def median_figures(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds, figure by figure; a count that a round does not have is 0."""
    made: dict[str, Any] = {}
    for name in dict.fromkeys(name for figure in figures for name in figure):
        values = [figure.get(name, 0) for figure in figures]
        if isinstance(values[0], dict):
            made[name] = median_figures(values)
        elif isinstance(values[0], list):
            made[name] = [median(column) for column in zip(*values, strict=True)]
        else:
            made[name] = median(values)
    return made


def _jobs(count: int, rate: float) -> list[WorkloadRequest]:
    return [_shorter(job) for job in make_workload("azure-conv", count, rate, seed=11)]


def _static(count: int) -> list[WorkloadRequest]:
    return [job._replace(arrival_seconds=0.0) for job in _jobs(count, 1.0)]


def _shorter(job: WorkloadRequest) -> WorkloadRequest:
    """Within the model's context."""
    prompt = min(800, max(1, round(job.num_prompt_tokens * LENGTH_SCALE)))
    return WorkloadRequest(
        job.arrival_seconds, prompt, min(200, max(1, round(job.num_output_tokens * LENGTH_SCALE)))
    )


def _figures(
    serve: LoggedServer, stages: int, policy: str, jobs: list[WorkloadRequest]
) -> dict[str, Any]:
    config = EngineConfig.from_options("demo", pipeline_parallel_size=stages, policy=policy)
    return summarize_run(build_run_record(serve(config, jobs)))


def _seconds(figures: dict[str, Any]) -> float:
    return float(figures["seconds"])
