"""Figures of a cluster's run: those of all engines together, and those of each one."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple

from gllm.sim.cluster.cluster import ClusterRun
from gllm.sim.deployment import Deployment
from gllm.sim.metrics.batch_figures import BatchFigures, summarize_batches
from gllm.sim.metrics.delays import RunLoad, measure_load
from gllm.sim.metrics.report import (
    format_table,
    get_figure,
    measure_batches,
    show_value,
    summarize_requests,
    summarize_with_batches,
)


class ClusterSummary(NamedTuple):
    """Figures of a cluster's run."""

    total: dict[str, Any]
    """Those of all requests and micro-batches; a request that several engines served counts once,
    with the latencies of its client."""
    engines: dict[str, dict[str, Any]]
    """Those of each engine, by its name."""
    load: RunLoad | None
    """Rates of the whole cluster; None with fewer than two requests."""


def summarize_cluster(
    run: ClusterRun,
    deployments: Mapping[str, Deployment],
    slo_ttft: float | None = None,
    slo_tpot: float | None = None,
) -> ClusterSummary:
    """Return the figures of a cluster's run.

    Args:
        run: The run.
        deployments: What each engine ran, by the name of the engine.
        slo_ttft: Limit of the time to the first token in seconds; None: no limit.
        slo_tpot: Limit of the mean time per output token in seconds; None: no limit.
    """
    requests = list(run.requests.values())
    total = summarize_requests(requests, slo_ttft, slo_tpot)
    batches = BatchFigures()
    engines = {}
    peak_flops = 0.0
    for name, engine in run.engines.items():
        deployment = deployments.get(name)
        own = measure_batches(engine.record, deployment)
        engines[name] = summarize_with_batches(engine.record, own, slo_ttft, slo_tpot, deployment)
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
    """Return a table with a row for each engine."""
    columns = [
        (label, [show_value(get_figure(figures, path), factor) for figures in engines.values()])
        for path, label, factor in ENGINE_TABLE_COLUMNS
    ]
    columns = [(label, cells) for label, cells in columns if any(cells)]
    rows = [list(row) for row in zip(engines, *(cells for _, cells in columns), strict=True)]
    return format_table(["engine", *(label for label, _ in columns)], rows)
