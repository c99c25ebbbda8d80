"""Plot a load on a server: latency distributions and figures over time. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from gllm.commands.bench.report import tokens_by_second
from gllm.observability.latency import RequestTimeline, percentile
from gllm.sim.metrics.plots import ChartPanel, Series, plot_distributions, plot_grid

BINS = 30
PERCENTS = (50, 99)


def plot_load(lines: Sequence[RequestTimeline], caption: str, folder: Path) -> list[str]:
    """Write latencies.svg and over-time.svg into a folder, which is created if necessary.

    Returns:
        The names of the files.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: A file cannot be written.
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
