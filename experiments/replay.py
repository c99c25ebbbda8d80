"""Replays of real runs in the simulator: its decisions, step times and latencies."""

from functools import partial

from experiments.base import OWN_REFERENCE, ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.logged_servers import LoggedServer, serve_logged
from experiments.parallel import map_parallel
from gllm.config.engine import EngineConfig
from gllm.observability.step_log import StepLogEvent
from gllm.sim.metrics.report import format_table
from gllm.sim.replay import replay_calls, replay_step_times
from gllm.sim.workloads.requests import make_workload

RUNS = (
    (1, "sarathi"),
    (1, "throttle"),
    (2, "throttle"),
    (2, "balance"),
    (2, "sarathi"),
    (4, "throttle"),
    (4, "prefill-first"),
)
"""(stages, policy)."""
WORKLOAD = "lognormal:120,400,900,20,50,100"
RATE = 12.0
REQUESTS = 120
LATENCY_LIMIT = 0.01
"""Largest error of TTFT and E2EL, as a share."""


def _serve(serve: LoggedServer, count: int, run: tuple[int, str]) -> list[StepLogEvent]:
    """Serve the load with a number of stages and a policy; return the step log."""
    stages, policy = run
    config = EngineConfig.from_options("demo", pipeline_parallel_size=stages, policy=policy)
    return serve(config, make_workload(WORKLOAD, count, RATE, "gamma:2", seed=5))


def run(options: ExperimentOptions, serve: LoggedServer = serve_logged) -> ExperimentResult:
    """Serve the load on this machine's engine, once for each run, and replay the log.

    Args:
        options: Of the experiment.
        serve: Serves the load.
    """
    count = 12 if options.quick else REQUESTS
    rows, least_calls, least_times = [], 1.0, 1.0
    errors: dict[str, list[float]] = {"ttft": [], "e2el": []}
    runs = RUNS[2:3] if options.quick else RUNS
    logs = map_parallel(partial(_serve, serve, count), runs, 1, options.progress)
    for (stages, policy), events in zip(runs, logs, strict=True):
        calls, times = replay_calls(events), replay_step_times(events)
        least_calls = min(least_calls, calls.share)
        least_times = min(least_times, times.share)
        shown = [f"{call.num_equal} of {call.num_plans}" for call in (calls, times)]
        latencies = times.latency_errors
        for metric, error in latencies.items():
            errors[metric].append(error)
        cells = [f"{100 * latencies[metric]:.2f} %" for metric in errors]
        rows.append([str(stages), policy, *shown, f"{100 * times.share:.1f} %", *cells])
    text = (
        f"The demo model on this machine, {count} requests of {WORKLOAD} at {RATE:g}/s (gamma "
        "gaps, CV 2). Recorded calls: a new scheduler is called as the driver was. Recorded times: "
        "the event loop gets the arrivals and each step's times; the last columns are the median "
        "errors of a request's latencies.\n\n"
        + format_table(
            [
                "stages",
                "policy",
                "recorded calls: plans equal",
                "recorded times: plans equal",
                "",
                "TTFT error",
                "E2EL error",
            ],
            rows,
        )
    )
    claims = [
        PaperClaim(f"recorded {source} give the same plans", ExpectedLimit(aim, True), least)
        for source, aim, least in (("calls", 1.0, least_calls), ("times", 0.95, least_times))
    ]
    claims += [
        PaperClaim(
            f"{metric.upper()} by recorded times: median error of a request",
            ExpectedLimit(LATENCY_LIMIT, digits=2),
            max(values),
        )
        for metric, values in errors.items()
    ]
    return ExperimentResult("Replay of real runs", text, claims, reference=OWN_REFERENCE)
