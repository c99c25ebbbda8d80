"""A run in numbers: the metrics table and its JSON.

Owns which figures describe a run and how they are printed. Knows nothing of plots and files.
"""

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from gllm.observability.latency import collect_latencies, percentile, slo_attainment
from gllm.sim.metrics.run_record import RunRecord

PERCENTS = (50, 90, 99)


def summary_statistics(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles; nothing of no values."""
    if not values:
        return {}
    return {"mean": fmean(values), **{f"p{p}": percentile(values, p) for p in PERCENTS}}


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation over mean; 0 of no values."""
    mean = fmean(values) if values else 0.0
    return pstdev(values) / mean if mean else 0.0


STEADY_TOKEN_SHARE = 0.8
"""Share of a run's tokens that counts as its steady part: what comes after is a tail of few long
requests, during which no system is at its best."""


def steady_throughput(run: RunRecord) -> tuple[float, float]:
    """(tokens, requests) a second while the first STEADY of all tokens were computed."""
    tokens = sum(step.work.num_tokens for step in run.micro_batches)
    done = 0
    for step in run.micro_batches:
        done += step.work.num_tokens
        if done >= STEADY_TOKEN_SHARE * tokens and step.committed_time is not None:
            seconds = step.committed_time - run.begin
            return done / seconds, done / tokens * len(run.requests) / seconds
    return 0.0, 0.0


def summarize_run(
    run: RunRecord, slo_ttft: float | None = None, slo_tpot: float | None = None
) -> dict[str, Any]:
    """Return the figures of a run: seconds, tokens, shares in [0, 1]; SLO limits are seconds."""
    lines = [served.line for served in run.requests.values()]
    span = (run.end - run.begin) or float("nan")
    prompt = sum(
        served.num_prompt_tokens for served in run.requests.values() if served.line.num_tokens
    )
    output = sum(line.num_tokens for line in lines)
    uses = run.stage_usages()
    figures: dict[str, Any] = {
        "requests": len(lines),
        "finished": sum(s.line.num_tokens == s.max_tokens for s in run.requests.values()),
        "seconds": span,
        "requests_per_second": len(lines) / span,
        "output_tokens_per_second": output / span,
        "total_tokens_per_second": (prompt + output) / span,
        "steady_tokens_per_second": steady_throughput(run)[0],
        **{name: summary_statistics(values) for name, values in collect_latencies(lines).items()},
        "steps": len(run.micro_batches),
        "tokens_per_step": summary_statistics(
            [float(step.work.num_tokens) for step in run.micro_batches]
        ),
        "tokens_per_step_variation": coefficient_of_variation(
            [step.work.num_tokens for step in run.micro_batches]
        ),
        "preemptions": sum(served.num_preemptions for served in run.requests.values()),
        "busy_share": [use.busy_share for use in uses],
        "bubble_share": [use.bubble_share for use in uses],
    }
    if run.restarts:
        figures["restarts"] = len(run.restarts)
        figures["resumed_requests"] = sum(s.num_resumptions > 0 for s in run.requests.values())
    if slo_ttft is not None or slo_tpot is not None:
        figures["slo_attainment"] = slo_attainment(lines, slo_ttft, slo_tpot)
    return figures


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
    ("steps", "micro-batches", 1),
    ("tokens_per_step.mean", "tokens per micro-batch", 1),
    ("tokens_per_step_variation", "their coefficient of variation", 1),
    ("preemptions", "preemptions", 1),
    ("restarts", "recoveries", 1),
    ("resumed_requests", "resumed requests", 1),
    ("slo_attainment", "SLO attainment, %", 100),
    ("busy_share", "stages busy, %", 100),
    ("bubble_share", "bubbles, %", 100),
]
"""(path in the summary, label, factor)."""


def get_figure(summary: dict[str, Any], path: str) -> Any:
    """Return a figure by its dotted path, or None."""
    value: Any = summary
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """Columns side by side, as Markdown shows them."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def show_value(value: Any, factor: float = 1) -> str:
    """Format a figure with four significant digits; a list has one per stage."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(show_value(each, factor) for each in value)
    scaled = value * factor
    if isinstance(value, int) or abs(scaled) >= 1000:
        return f"{scaled:.0f}"
    return f"{scaled:.4g}"


def format_metrics_table(summaries: dict[str, dict[str, Any]]) -> str:
    """Return a table of runs side by side, by name."""
    rows = []
    for path, label, factor in METRICS_TABLE_ROWS:
        cells = [show_value(get_figure(summary, path), factor) for summary in summaries.values()]
        if any(cells):
            rows.append([label, *cells])
    return format_table(["", *summaries], rows)
