"""Figures and plots of a load on a server, with the lines and JSON keys of `vllm bench serve`."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from gllm.commands.bench.client import RequestResult
from gllm.commands.bench.options import METRICS
from gllm.observability.latency import (
    RequestTimeline,
    collect_latencies,
    percentile,
    slo_attainment,
)
from gllm.options.slo import NO_SLO, Slo
from gllm.sim.metrics.plots import ChartPanel, Series, plot_distributions, plot_grid

BINS = 30
PERCENTS = (50, 99)

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
WIDTH = 50
SHOWN_FAILURES = 3
"""Number of messages printed per kind of failure."""


def summarize(
    outcomes: Sequence[RequestResult],
    seconds: float,
    percents: Sequence[float] = (99.0,),
    slo: Slo = NO_SLO,
) -> dict[str, Any]:
    """Return the metrics of a benchmark run: throughput, latency percentiles and goodput.

    The keys are those of the JSON result file. Failed requests are excluded from latencies.

    Args:
        outcomes: results of all requests.
        seconds: duration of the run.
        percents: percentiles to compute of each latency, such as 99.
        slo: latency limits that a request has to meet to count for goodput.
    """
    done = [outcome for outcome in outcomes if not outcome.failure]
    lines = [outcome.timeline for outcome in done]
    prompt, output = sum(o.prompt_tokens for o in done), sum(line.num_tokens for line in lines)
    span = seconds or float("nan")
    figures: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(done) / span,
        "request_goodput": None,
        "output_throughput": output / span,
        "total_token_throughput": (prompt + output) / span,
        "max_output_tokens_per_s": max(tokens_by_second(lines).values(), default=0.0),
        "max_concurrent_requests": max_overlap((o.timeline.arrival, o.end) for o in outcomes),
    }
    if slo:
        figures["request_goodput"] = slo_attainment(lines, slo) * len(lines) / span
    for name, values in collect_latencies(lines).items():
        figures |= _spread(name, [value * 1e3 for value in values], percents)
    return figures


def _spread(name: str, values: list[float], percents: Sequence[float]) -> dict[str, float]:
    """Return mean, median, deviation and percentiles; 0 without values, as vLLM does."""
    some = values or [0.0]
    return {
        f"mean_{name}_ms": fmean(some),
        f"median_{name}_ms": median(some),
        f"std_{name}_ms": pstdev(some),
        **{f"p{percent:g}_{name}_ms": percentile(some, percent) for percent in percents},
    }


def tokens_by_second(lines: Sequence[RequestTimeline]) -> dict[int, float]:
    """Return the number of output tokens in each second since the first request was sent.

    The tokens of a request are distributed evenly over its chunks, because a chunk of text does not
    say how many tokens it contains.
    """
    begin = min((line.arrival for line in lines), default=0.0)
    counts: defaultdict[int, float] = defaultdict(float)
    for line in lines:
        for time in line.times:
            counts[int(time - begin)] += line.num_tokens / len(line.times)
    return dict(counts)


def max_overlap(spans: Iterable[tuple[float, float]]) -> int:
    """Return the largest number of (begin, end) time spans that overlap: the peak concurrency."""
    changes = [change for begin, end in spans for change in ((begin, 1), (end, -1))]
    # At equal times, ends sort before begins.
    return max(accumulate(step for _, step in sorted(changes)), default=0)


def report_lines(
    figures: dict[str, Any],
    request_rate: float,
    max_concurrency: int | None,
    metrics: Sequence[str] = METRICS,
    percents: Sequence[float] = (99.0,),
) -> list[str]:
    """Return the report that `gllm bench serve` prints, as lines.

    Args:
        figures: metrics as returned by `summarize`.
        request_rate: requested arrival rate, in requests per second.
        max_concurrency: limit of requests in progress; None for no limit.
        metrics: names of the latencies to print, such as ttft.
        percents: percentiles to print of each latency.
    """
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", figures["completed"]),
        ("Failed requests:", figures["failed"]),
    ]
    if max_concurrency is not None:
        rows.append(("Maximum request concurrency:", max_concurrency))
    if request_rate != float("inf"):
        rows.append(("Request rate configured (RPS):", float(request_rate)))
    rows += [
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("Request throughput (req/s):", figures["request_throughput"]),
    ]
    if figures["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", figures["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s):", figures["output_throughput"]),
        ("Peak output token throughput (tok/s):", float(figures["max_output_tokens_per_s"])),
        ("Peak concurrent requests:", float(figures["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", figures["total_token_throughput"]),
    ]
    return [
        f"{' Serving Benchmark Result ':=^{WIDTH}}",
        *(_row(*row) for row in rows),
        *(line for name in metrics for line in _latency_lines(figures, name, percents)),
        "=" * WIDTH,
    ]


def _latency_lines(figures: dict[str, Any], name: str, percents: Sequence[float]) -> list[str]:
    columns = {"Mean": "mean", "Median": "median"}
    columns |= {f"P{percent:g}": f"p{percent:g}" for percent in percents}
    return [
        f"{TITLES[name]:-^{WIDTH}}",
        *(
            _row(f"{word} {name.upper()} (ms):", figures[f"{key}_{name}_ms"])
            for word, key in columns.items()
        ),
    ]


def _row(label: str, value: float) -> str:
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
    return f"{label:<40} {shown}"


def failure_lines(outcomes: Sequence[RequestResult]) -> list[str]:
    """Return report lines with the number of failed requests by kind, and some error messages."""
    failed = [outcome for outcome in outcomes if outcome.failure]
    lines = []
    for kind, count in Counter(outcome.failure for outcome in failed).most_common():
        lines.append(f"{count} failed: {kind}")
        details = [outcome.detail for outcome in failed if outcome.failure == kind]
        lines += [f"  {detail}" for detail in list(dict.fromkeys(details))[:SHOWN_FAILURES]]
    return lines


def request_details(outcomes: Sequence[RequestResult]) -> dict[str, list[Any]]:
    """Return lists with one value per request, for the JSON result; times in seconds."""
    begin = min((outcome.timeline.arrival for outcome in outcomes), default=0.0)
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.timeline.num_tokens for outcome in outcomes],
        "start_times": [outcome.timeline.arrival - begin for outcome in outcomes],
        "ttfts": [outcome.timeline.ttft or 0.0 for outcome in outcomes],
        "itls": [outcome.timeline.itl for outcome in outcomes],
        "generated_texts": ["".join(outcome.text_parts) for outcome in outcomes],
        "errors": [
            f"{outcome.failure}: {outcome.detail}" if outcome.failure else ""
            for outcome in outcomes
        ],
    }


def plot_load(lines: Sequence[RequestTimeline], caption: str, folder: Path) -> list[str]:
    """Plot a benchmark run as latencies.svg and over-time.svg in a folder, created if needed.

    Args:
        lines: send and chunk times of the successful requests.
        caption: title of the plots.
        folder: folder of the files.

    Returns:
        The names of the files.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plot_distributions(lines, caption, folder / "latencies.svg")
    tokens = sorted(tokens_by_second(lines).items())
    seconds = "seconds since the first request"
    panels = [
        ChartPanel("TTFT by send time", seconds, "ms", _over_time(lines, "ttft")),
        ChartPanel("TPOT by send time", seconds, "ms", _over_time(lines, "tpot")),
        ChartPanel(
            "output", seconds, "tokens/s", {"tokens": [(s + 0.5, float(n)) for s, n in tokens]}
        ),
    ]
    plot_grid(panels, folder / "over-time.svg", columns=1)
    return ["latencies.svg", "over-time.svg"]


def _over_time(lines: Sequence[RequestTimeline], name: str) -> Series:
    """Return percentiles in milliseconds for the requests sent in each of BINS time intervals."""
    begin = min((line.arrival for line in lines), default=0.0)
    span = max((line.arrival for line in lines), default=0.0) - begin
    bins: dict[int, list[float]] = {}
    for line in lines:
        value: float | None = getattr(line, name)
        if value is not None:
            place = min(int((line.arrival - begin) / span * BINS), BINS - 1) if span else 0
            bins.setdefault(place, []).append(value * 1e3)
    return {
        f"p{percent}": [
            ((place + 0.5) * span / BINS, percentile(values, percent))
            for place, values in bins.items()
        ]
        for percent in PERCENTS
    }
