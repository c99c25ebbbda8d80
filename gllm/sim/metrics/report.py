"""Figures that describe a run or a cluster's run, and their tables."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from gllm.observability.latency import collect_latencies, slo_attainment
from gllm.options.slo import NO_SLO, Slo
from gllm.sim.cluster.cluster import ClusterRun
from gllm.sim.deployment import Deployment
from gllm.sim.metrics.batch_statistics import (
    BatchStatistics,
    measure_micro_batches,
    operator_shares,
    summarize_batches,
)
from gllm.sim.metrics.delays import RunLoad, measure_load, scheduling_delays
from gllm.sim.metrics.run_record import RunRecord, ServedRequest
from gllm.sim.metrics.statistics import summary_statistics


def summarize_run(
    run: RunRecord,
    slo: Slo = NO_SLO,
    deployment: Deployment | None = None,
) -> dict[str, Any]:
    """Return the metrics of a run by name: throughput, latencies, batch sizes, stage utilization.

    Times are in seconds, shares in 0..1.

    Args:
        run: Record of the run.
        slo: Latency limits of each request, to compute the SLO attainment.
        deployment: Engine configuration of a simulated run; adds the model FLOP/s utilization and
            the time by operator class, if they are known. None: left out.
    """
    batches = measure_batches(run, deployment)
    return summarize_with_batches(run, batches, slo, deployment)


def summarize_with_batches(
    run: RunRecord,
    batches: BatchStatistics,
    slo: Slo,
    deployment: Deployment | None,
) -> dict[str, Any]:
    """Return the metrics of `summarize_run`, from micro-batch sizes that are already computed.

    Args:
        run: Record of the run.
        batches: Sizes and times of the run's micro-batches (`measure_batches`).
        slo: Latency limits of each request.
        deployment: Engine configuration of a simulated run, or None.
    """
    uses = run.stage_usages()
    begin, end = run.begin_time(), run.end_time()
    figures = summarize_requests(list(run.requests.values()), slo)
    tokens, requests = batches.steady_rates(begin, len(run.requests))
    figures["steady_tokens_per_second"] = tokens
    figures["steady_requests_per_second"] = requests
    figures |= summarize_batches(batches)
    figures["busy_share"] = [use.busy_share for use in uses]
    figures["bubble_share"] = [use.bubble_share for use in uses]
    if deployment and deployment.peak_flops and end > begin:
        peak = deployment.peak_flops * (end - begin)
        figures["model_flops_utilization"] = batches.flops / peak
    if deployment:
        figures["time_by_operator"] = operator_shares(
            run.micro_batches, len(deployment.layers), deployment.cost
        )
    if run.restarts:
        figures["restarts"] = len(run.restarts)
        figures["resumed_requests"] = sum(s.num_resumptions > 0 for s in run.requests.values())
    return figures


def measure_batches(run: RunRecord, deployment: Deployment | None) -> BatchStatistics:
    """Return the sizes, compute times and KV usage of a run's micro-batches.

    Args:
        run: Record of the run.
        deployment: Engine configuration, to count FLOPs; None: not counted.
    """
    hardware = deployment.hardware if deployment else None
    return measure_micro_batches(run.micro_batches, hardware.model if hardware else None)


def summarize_requests(requests: Sequence[ServedRequest], slo: Slo = NO_SLO) -> dict[str, Any]:
    """Return the metrics of a run's requests by name: throughput, latencies, preemptions.

    Times are in seconds, shares in 0..1.

    Args:
        requests: All requests of the run.
        slo: Latency limits of each request, to compute the SLO attainment.
    """
    lines = [served.line for served in requests]
    begin = min((line.arrival for line in lines), default=0.0)
    end = max((line.times[-1] for line in lines if line.times), default=begin)
    span = (end - begin) or float("nan")
    prompt = sum(served.num_prompt_tokens for served in requests if served.line.num_tokens)
    output = sum(line.num_tokens for line in lines)
    delays = [delay for delay in scheduling_delays(requests) if delay is not None]
    latencies = collect_latencies(lines) | {"scheduling_delay": delays}
    figures: dict[str, Any] = {
        "requests": len(lines),
        "finished": sum(request.line.num_tokens == request.max_tokens for request in requests),
        "seconds": span,
        "requests_per_second": len(lines) / span,
        "output_tokens_per_second": output / span,
        "total_tokens_per_second": (prompt + output) / span,
        **{name: summary_statistics(values) for name, values in latencies.items()},
        "preemptions": sum(request.num_preemptions for request in requests),
        "preempted_seconds": sum(request.preempted_seconds for request in requests),
    }
    if slo:
        figures["slo_attainment"] = slo_attainment(lines, slo)
    return figures


def class_attainment(
    requests: Mapping[int, ServedRequest],
    classes: Mapping[int, str],
    limits: Mapping[str, Slo],
    default: Slo = NO_SLO,
) -> dict[str, dict[str, Any]]:
    """Return the number of requests and the SLO attainment (0..1) of each SLO class.

    Args:
        requests: Requests of a run by id.
        classes: SLO class of each request by id; empty text for none.
        limits: Latency limits of each class.
        default: Latency limits of classes without their own.
    """
    members: dict[str, list[ServedRequest]] = {}
    for seq, served in requests.items():
        if name := classes.get(seq):
            members.setdefault(name, []).append(served)
    attainment: dict[str, dict[str, Any]] = {}
    for name, served_requests in sorted(members.items()):
        slo = limits.get(name, NO_SLO).with_defaults(default)
        attainment[name] = {
            "requests": len(served_requests),
            "slo_ttft": slo.ttft_seconds,
            "slo_tpot": slo.tpot_seconds,
            "slo_attainment": slo_attainment(
                (served_request.line for served_request in served_requests), slo
            ),
        }
    return attainment


METRICS_TABLE_ROWS: list[tuple[str, str, float]] = [
    ("requests", "requests", 1),
    ("requests_per_second", "requests/s", 1),
    ("output_tokens_per_second", "output tokens/s", 1),
    ("total_tokens_per_second", "total tokens/s", 1),
    ("steady_tokens_per_second", "total tokens/s, first 80 %", 1),
    *((f"ttft.{p}", f"TTFT {p}, ms", 1e3) for p in ("mean", "p50", "p90", "p99")),
    *((f"tpot.{p}", f"TPOT {p}, ms", 1e3) for p in ("mean", "p50", "p90", "p99")),
    *((f"itl.{p}", f"ITL {p}, ms", 1e3) for p in ("p50", "p99")),
    *((f"e2el.{p}", f"E2EL {p}, s", 1) for p in ("mean", "p50", "p90", "p99")),
    *((f"scheduling_delay.{p}", f"scheduling delay {p}, ms", 1e3) for p in ("mean", "p50", "p99")),
    ("steps", "micro-batches", 1),
    ("requests_per_step.mean", "requests per micro-batch", 1),
    ("tokens_per_step.mean", "tokens per micro-batch", 1),
    ("tokens_per_step_variation", "tokens per micro-batch, std / mean", 1),
    ("seconds_per_step_variation", "time per micro-batch, std / mean", 1),
    *((f"tokens_by_time_p{p}", f"tokens per micro-batch, by time p{p}", 1) for p in (50, 90)),
    ("kv_usage.mean", "KV cache in use, mean, %", 100),
    ("kv_usage.max", "KV cache in use, max, %", 100),
    ("preemptions", "preemptions", 1),
    ("preempted_seconds", "preempted time, s", 1),
    ("restarts", "recoveries", 1),
    ("resumed_requests", "resumed requests", 1),
    ("slo_attainment", "SLO attainment, %", 100),
    ("busy_share", "stages busy, %", 100),
    ("bubble_share", "bubbles, %", 100),
    ("model_flops_utilization", "model FLOP/s utilization, %", 100),
]
"""(path in the summary, label, factor)."""


def _group_rows(
    summaries: dict[str, dict[str, Any]],
) -> list[tuple[tuple[str, ...], str, float]]:
    """Return the rows of figures whose names depend on the run: operators and SLO classes."""
    operators, classes = (
        sorted({name for summary in summaries.values() for name in summary.get(group, {})})
        for group in ("time_by_operator", "slo_classes")
    )
    return [
        *(
            (("slo_classes", name, "slo_attainment"), f"SLO attainment of {name}, %", 100.0)
            for name in classes
        ),
        *((("time_by_operator", name), f"time of {name}, %", 100.0) for name in operators),
    ]


def look_up_metric(summary: dict[str, Any], path: str | tuple[str, ...]) -> Any:
    """Return a metric from nested dicts by its path; None if it is missing.

    Args:
        summary: Metrics by name; values may be dicts of metrics.
        path: Names from the outermost dict to the metric, as a tuple or separated by dots.
    """
    value: Any = summary
    for part in path.split(".") if isinstance(path, str) else path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def show_value(value: Any, factor: float = 1) -> str:
    """Format a metric with four significant digits; lists are joined with spaces, None is empty.

    Args:
        value: Number, list of numbers (one per stage) or None.
        factor: Factor of the unit conversion, such as 1000 for seconds in milliseconds.
    """
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(show_value(item, factor) for item in value)
    scaled = value * factor
    if isinstance(value, int) or abs(scaled) >= 1000:
        return f"{scaled:.0f}"
    return f"{scaled:.4g}"


def format_metrics_table(summaries: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table that compares the metrics of several runs, one column per run.

    Args:
        summaries: Metrics of each run by name of the run (`summarize_run`).
    """
    rows = []
    table: list[tuple[str | tuple[str, ...], str, float]] = [*METRICS_TABLE_ROWS]
    for path, label, factor in [*table, *_group_rows(summaries)]:
        cells = [
            show_value(look_up_metric(summary, path), factor) for summary in summaries.values()
        ]
        if any(cells):
            rows.append([label, *cells])
    return format_table(["", *summaries], rows)


class ClusterSummary(NamedTuple):
    """Metrics of a cluster simulation: of all engines together and of each engine."""

    total: dict[str, Any]
    """Metrics of all requests and micro-batches by name. A request that several engines served
    counts once, with the latencies that its client saw."""
    engines: dict[str, dict[str, Any]]
    """Metrics of each engine by engine name."""
    load: RunLoad | None
    """Offered and sustained request rate of the whole cluster; None with fewer than two
    requests."""


def summarize_cluster(
    run: ClusterRun,
    deployments: Mapping[str, Deployment],
    slo: Slo = NO_SLO,
) -> ClusterSummary:
    """Return the metrics of a cluster simulation, in total and by engine.

    Args:
        run: Result of the simulation.
        deployments: Configuration of each engine by engine name.
        slo: Latency limits of each request, to compute the SLO attainment.
    """
    requests = list(run.requests.values())
    total = summarize_requests(requests, slo)
    batches = BatchStatistics()
    engines = {}
    peak_flops = 0.0
    for name, engine in run.engines.items():
        deployment = deployments.get(name)
        own = measure_batches(engine.record, deployment)
        engines[name] = summarize_with_batches(engine.record, own, slo, deployment)
        batches.extend(own)
        peak_flops += (deployment.peak_flops if deployment else None) or 0.0
    for rate in ("steady_tokens_per_second", "steady_requests_per_second"):
        total[rate] = sum(figures[rate] for figures in engines.values())
    total |= summarize_batches(batches)
    for share in ("busy_share", "bubble_share"):
        total[share] = fmean(fmean(figures[share]) for figures in engines.values())
    if batches.flops:
        total["model_flops_utilization"] = batches.flops / (peak_flops * total["seconds"])
    total["unserved"] = len(run.unserved)
    return ClusterSummary(
        total, engines, measure_load(requests, total["steady_requests_per_second"])
    )


ENGINE_TABLE_COLUMNS: list[tuple[str, str, float]] = [
    ("requests", "requests", 1),
    ("requests_per_second", "requests/s", 1),
    ("output_tokens_per_second", "output tokens/s", 1),
    ("ttft.mean", "TTFT mean, ms", 1e3),
    ("tpot.mean", "TPOT mean, ms", 1e3),
    ("e2el.mean", "E2EL mean, s", 1),
    ("scheduling_delay.p99", "scheduling delay p99, ms", 1e3),
    ("slo_attainment", "SLO attainment, %", 100),
    ("kv_usage.mean", "KV in use, mean, %", 100),
    ("kv_usage.max", "max, %", 100),
    ("preemptions", "preemptions", 1),
    ("busy_share", "busy, %", 100),
]
"""(path in the summary, label, factor)."""


def format_engine_table(engines: Mapping[str, dict[str, Any]]) -> str:
    """Return a Markdown table of metrics with one row per engine.

    Args:
        engines: Metrics of each engine by engine name.
    """
    columns = [
        (label, [show_value(look_up_metric(figures, path), factor) for figures in engines.values()])
        for path, label, factor in ENGINE_TABLE_COLUMNS
    ]
    columns = [(label, cells) for label, cells in columns if any(cells)]
    rows = [list(row) for row in zip(engines, *(cells for _, cells in columns), strict=True)]
    return format_table(["engine", *(label for label, _ in columns)], rows)
