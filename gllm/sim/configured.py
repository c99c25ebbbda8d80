"""Simulations that a SimulationConfig describes: one run with its figures, or a run at any rate."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from gllm.observability.latency import (
    RequestTimeline,
    collect_latencies,
    meets_slo,
    percentile,
    slo_attainment,
)
from gllm.observability.step_log import StepLogEvent, StepLogWriter
from gllm.options.slo import NO_SLO, Slo, parse_class_slos
from gllm.scheduler.kv_admission import RESERVING_ADMISSIONS
from gllm.sim.capacity import (
    CapacityRule,
    RateTrial,
    stopped_trial,
)
from gllm.sim.cluster.cluster import ClusterRun, LogOpener, simulate_cluster
from gllm.sim.cluster.router import make_router
from gllm.sim.deployment import Deployment, simulate, simulate_sessions
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.metrics.delays import (
    DelayLimitStop,
    RunLoad,
    measure_load,
    measure_rate_trial,
)
from gllm.sim.metrics.report import class_attainment, summarize_cluster, summarize_run
from gllm.sim.metrics.run_record import RunRecord, ServedRequest
from gllm.sim.metrics.session_turns import TurnResult, summarize_turns
from gllm.sim.options import (
    SimulationConfig,
    build_deployment,
    build_workload,
    check_request_lengths,
    table_model,
)
from gllm.sim.sessions import has_pauses
from gllm.sim.workloads.classes import parse_shares
from gllm.sim.workloads.length_predictions import (
    NoisyLengthPredictor,
    OracleLengthPredictor,
    make_simulated_predictor,
)
from gllm.sim.workloads.requests import WorkloadRequest, longest_job


class SimulationResult(NamedTuple):
    """Result of one `gllm simulate` run: request records, metrics of the run and of engines."""

    record: RunRecord
    """Record of the run for a single engine; for several engines, only its requests."""
    summary: dict[str, Any]
    """Metrics of the whole run by name."""
    engines: dict[str, dict[str, Any]]
    """Metrics of each engine by engine name; empty for a single engine."""
    load: RunLoad | None
    """Offered and sustained request rate; None with fewer than two requests."""
    below_range: dict[str, int]
    """Number of predictions for batches smaller than the cost model was measured for, by name of
    the quantity."""


def build_simulation(config: SimulationConfig) -> tuple[Deployment, list[WorkloadRequest]]:
    """Return the engine deployment and the workload that the options of `gllm simulate` describe.

    All engines of a simulated cluster have the same deployment.

    Raises:
        ValueError: The options are invalid.
        OSError: The cost profile cannot be read.
    """
    jobs = build_workload(config)
    longest = longest_job(jobs)
    name = table_model(config)
    if name is not None and MODELS[name].positions:
        # Other models than those with learned positions compute beyond their context.
        check_request_lengths(config, longest)
    deployment = build_deployment(config, longest)
    if config.length_predictor is not None:
        _check_prediction(config, deployment)
    return deployment, jobs


def _check_prediction(config: SimulationConfig, deployment: Deployment) -> None:
    """Raise ValueError if nothing reads the predicted output lengths of the requests."""
    is_routed = config.engines > 1 and config.routing_policy in ("predict", "aladdin")
    if not is_routed and deployment.scheduler.kv_admission not in RESERVING_ADMISSIONS:
        raise ValueError(
            f"--length-predictor {config.length_predictor} would change nothing: choose "
            f"--kv-admission {' or '.join(RESERVING_ADMISSIONS)}, or several --engines with "
            "--routing-policy predict or aladdin"
        )


def run_simulation(
    config: SimulationConfig,
    deployment: Deployment,
    jobs: list[WorkloadRequest],
    step_log: str | None = None,
) -> SimulationResult:
    """Simulate a workload on one engine, or on several behind a router, and return its metrics.

    Args:
        config: Options of `gllm simulate`: number of engines, routing policy, SLO limits and
            others.
        deployment: Model, cost model and scheduler configuration of each engine.
        jobs: Requests sorted by arrival time.
        step_log: Path of the step log to write; with several engines, each writes a file with its
            name before the suffix. None: no log.

    Raises:
        ValueError: A request is longer than the model's context, or an SLO limit is invalid.
        OSError: A step log cannot be written.
    """
    limits = _read_slo_limits(config)
    with ExitStack() as stack:
        open_log = partial(_open_log, Path(step_log), stack) if step_log else None
        if config.engines == 1:
            requests, result = _run_engine(config, deployment, jobs, open_log)
        else:
            requests, result = _run_cluster(config, deployment, jobs, open_log)
    summary, load = result.summary, result.load
    classes = {index: job.slo_class for index, job in enumerate(jobs)}
    if attainment := class_attainment(requests, classes, limits, config.slo):
        summary["slo_classes"] = attainment
    summary["below_range"] = result.below_range
    if load:
        summary["load"] = {
            "offered_rate": load.offered_rate,
            "sustained_rate": load.sustained_rate,
            "is_overloaded": load.is_overloaded,
            **load.trial._asdict(),
        }
    return result


def _read_slo_limits(config: SimulationConfig) -> dict[str, Slo]:
    """Return the limits of each SLO class; ValueError if a class is not one of the workload."""
    limits = parse_class_slos(config.slo_limits) if config.slo_limits else {}
    classes = parse_shares(config.slo_classes) if config.slo_classes else {}
    for name in limits:
        if name not in classes:
            raise ValueError(
                f"--slo-limits {config.slo_limits}: {name!r} is no class of --slo-classes: add it "
                "there or leave it out"
            )
    return limits


RequestRecords = Mapping[int, ServedRequest]
"""Requests by position in the workload."""


def _open_log(path: Path, stack: ExitStack, engine: str) -> Callable[[StepLogEvent], None]:
    """Open the step log of an engine until the stack ends; a single engine has no name."""
    file = path.with_name(f"{path.stem}.{engine}{path.suffix}") if engine else path
    writer = StepLogWriter(str(file))
    stack.callback(writer.close)
    return writer.write


def _run_engine(
    config: SimulationConfig,
    deployment: Deployment,
    jobs: list[WorkloadRequest],
    open_log: LogOpener | None,
) -> tuple[RequestRecords, SimulationResult]:
    """Simulate one engine; return the requests by position in the workload, and the figures."""
    log = open_log("") if open_log else None
    turns: list[TurnResult] = []
    if has_pauses(jobs) or config.hindsight:
        run, turns = simulate_sessions(deployment, jobs, log, has_hindsight=config.hindsight)
    else:
        run = simulate(deployment, jobs, log)
    # Figures by operator are predictions too, which are not to be counted.
    below_range = dict(deployment.cost.num_below_range)
    summary = summarize_run(run, config.slo, deployment)
    if turns:
        summary["sessions"] = summarize_turns(turns)
    load = measure_load(list(run.requests.values()), summary["steady_requests_per_second"])
    return run.requests, SimulationResult(run, summary, {}, load, below_range)


def _run_cluster(
    config: SimulationConfig,
    deployment: Deployment,
    jobs: list[WorkloadRequest],
    open_log: LogOpener | None,
) -> tuple[RequestRecords, SimulationResult]:
    """Simulate equal engines; return the requests by position in the workload, and the figures."""
    run = _simulate_engines(config, deployment, jobs, open_log)
    below_range = dict(deployment.cost.num_below_range)
    deployments = dict.fromkeys(run.engines, deployment)
    summary = summarize_cluster(run, deployments, config.slo)
    start = next(iter(run.engines.values())).record.start
    return run.requests, SimulationResult(RunRecord(start, run.requests), *summary, below_range)


def _simulate_engines(
    config: SimulationConfig,
    deployment: Deployment,
    jobs: list[WorkloadRequest],
    open_log: LogOpener | None = None,
    check: Callable[[], None] | None = None,
) -> ClusterRun:
    if has_pauses(jobs) or config.hindsight:
        flag = "--hindsight" if config.hindsight else f"--workload {config.workload}"
        raise ValueError(f"{flag} is simulated with one engine: leave --engines out")
    names = [f"engine-{index}" for index in range(config.engines)]
    lengths = None
    if config.length_predictor is not None:
        lengths = make_simulated_predictor(jobs, config.length_predictor, config.seed)
        if isinstance(lengths, OracleLengthPredictor | NoisyLengthPredictor):
            # The requests carry its predictions, which schedulers read too.
            lengths = None
    limits = _read_slo_limits(config)
    slo: Slo | dict[str, Slo] | None = config.slo or None
    if limits:
        shares = parse_shares(config.slo_classes) if config.slo_classes else {}
        slo = {name: limits.get(name, NO_SLO).with_defaults(config.slo) for name in shares}
    heartbeat = config.placement_heartbeat
    router = make_router(config.routing_policy, config.seed, lengths, slo, heartbeat)
    return simulate_cluster(dict.fromkeys(names, deployment), jobs, router, (), open_log, check)


def simulate_requests(
    config: SimulationConfig,
    deployment: Deployment,
    jobs: list[WorkloadRequest],
    check: Callable[[], None] | None = None,
) -> RequestRecords:
    """Simulate a workload and return only the record of each request, by position in the workload.

    Args:
        config: Options of `gllm simulate`: number of engines, routing policy and seed are read.
        deployment: Model, cost model and scheduler configuration of each engine.
        jobs: Requests sorted by arrival time.
        check: Called now and then; an error that it raises ends the simulation.
    """
    if config.engines == 1:
        return simulate(deployment, jobs, check=check).requests
    return _simulate_engines(config, deployment, jobs, check=check).requests


def simulate_trial(
    config: SimulationConfig,
    deployment: Deployment,
    jobs: list[WorkloadRequest],
    rule: CapacityRule,
    check: Callable[[], None] | None = None,
) -> tuple[RateTrial, RequestRecords]:
    """Simulate a workload for a capacity search; return its scheduling delays and request records.

    A single engine's simulation stops as soon as its P99 delay is certain to exceed the limit of
    the rule. Its delays are then infinite and its requests unfinished, but whether the rate is
    sustained comes out the same as from a whole run.

    Args:
        config: Options of `gllm simulate`: number of engines, routing policy and seed are read.
        deployment: Model, cost model and scheduler configuration of each engine.
        jobs: Requests sorted by arrival time.
        rule: Limit of the P99 scheduling delay.
        check: Called now and then; an error that it raises ends the simulation.
    """
    if config.engines > 1:
        requests = simulate_requests(config, deployment, jobs, check)
        return measure_rate_trial(requests.values()), requests
    stop = DelayLimitStop([job.arrival_seconds for job in jobs], rule.max_p99_delay_seconds)
    run = simulate(deployment, jobs, stop=stop, check=check)
    if stop.has_stopped:
        return stopped_trial(len(jobs)), run.requests
    return measure_rate_trial(run.requests.values()), run.requests


class RunLatencies(NamedTuple):
    """Latency percentiles of a run in seconds, and the share of its requests that meet the SLO.

    A percentile is None if no request has a value.
    """

    ttft_p50: float | None
    ttft_p90: float | None
    tpot_p50: float | None
    itl_p99: float | None
    attainment: float
    """Share of the requests that meet all latency limits of a single request, 0..1."""
    is_within: bool
    """True if the run meets all limits, of single requests and of percentiles."""


def summarize_latencies(timelines: list[RequestTimeline], limits: Slo) -> RunLatencies:
    """Return the latency percentiles of a run and the share of its requests that meet the SLO.

    Args:
        timelines: Arrival and token times of each request.
        limits: Latency limits of single requests and of percentiles.
    """
    latencies = collect_latencies(timelines)

    def at(name: str, percent: float) -> float | None:
        return percentile(latencies[name], percent) if latencies[name] else None

    return RunLatencies(
        at("ttft", 50),
        at("ttft", 90),
        at("tpot", 50),
        at("itl", 99),
        slo_attainment(timelines, limits),
        meets_slo(timelines, limits),
    )


class SimulationAtRate:
    """Callable that simulates a configuration at a given request rate, for a capacity search.

    It returns the scheduling delays. They are infinite if the run exceeds a latency limit.

    Args:
        config: Options of `gllm simulate`; the request rate and the number of requests are
            replaced.
        rule: Gives the number of requests to simulate at a rate, and the limit of the delay.
        limits: Latency limits that a sustained rate has to meet.
        stops_early: True to stop a simulation whose P99 scheduling delay is certain to exceed the
            limit of the rule; such runs get no latency percentiles.
        check: Called now and then during a run; an error that it raises ends the run. To run in
            other processes it must be picklable.
    """

    def __init__(
        self,
        config: SimulationConfig,
        rule: CapacityRule,
        limits: Slo = NO_SLO,
        stops_early: bool = True,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._check = check
        self._config, self._rule, self._limits = config, rule, limits
        self._stops_early = stops_early
        self._deployment: Deployment | None = None

    def at_rate(self, rate: float) -> SimulationConfig:
        """Return the configuration with another rate and the number of requests that it needs."""
        requests = self._rule.num_requests(rate, self._config.requests)
        return replace(self._config, rate=rate, requests=requests)

    def __call__(self, rate: float) -> RateTrial:
        """Return the scheduling delays at a rate in requests per second, with a RunLatencies."""
        config = self.at_rate(rate)
        jobs = build_workload(config)
        longest = longest_job(jobs)
        deployment = self._deployment
        if deployment is None or longest > deployment.scheduler.max_model_len:
            # Profiles take seconds to be fitted.
            deployment = self._deployment = build_deployment(config, longest)
        if self._stops_early:
            trial, requests = simulate_trial(config, deployment, jobs, self._rule, self._check)
            if not self._rule.is_bounded(trial):
                return trial
        else:
            requests = simulate_requests(config, deployment, jobs, self._check)
            trial = measure_rate_trial(requests.values())
        figures = summarize_latencies([served.line for served in requests.values()], self._limits)
        delay = trial.p99_delay_seconds if figures.is_within else inf
        return trial._replace(p99_delay_seconds=delay, figures=figures)
