"""PromQL expressions of the Grafana dashboard, and the panels that show them."""

from typing import NamedTuple

CHOSEN = 'model_name=~"$model", instance=~"$instance"'
WINDOW = "[$__rate_interval]"


class Query(NamedTuple):
    """A line, or several by a label of `legend`."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A chart."""

    title: str
    unit: str
    """As Grafana calls it."""
    queries: list[Query]
    text: str = ""
    """Description shown beside the title."""


def _by(label: str) -> str:
    return f" by ({label})" if label else ""


def gauge(name: str) -> str:
    """Return a gauge, summed over servers."""
    return f"sum (gllm:{name}{{{CHOSEN}}})"


def rate(name: str, by: str = "") -> str:
    """Return a counter per second, summed over servers."""
    return f"sum{_by(by)} (rate(gllm:{name}{{{CHOSEN}}}{WINDOW}))"


def quantile(q: float, name: str) -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({q}, {rate(name + '_bucket', 'le')})"


def mean(name: str) -> str:
    """Return the mean of a histogram's observations."""
    return f"{rate(name + '_sum')} / {rate(name + '_count')}"


def latency(title: str, name: str, text: str) -> Panel:
    """Quantiles of a latency."""
    lines = [Query(quantile(q, name), f"p{100 * q:.0f}") for q in (0.5, 0.9, 0.99)]
    return Panel(title, "s", lines, text)


def each_rate(name: str) -> str:
    """Return a counter per second, of each series."""
    return f"rate(gllm:{name}{{{CHOSEN}}}{WINDOW})"


def of_stages(expression: str) -> list[Query]:
    """Return a line for each stage of each server."""
    return [Query(expression, "{{instance}} stage {{stage}}")]


def node_load(name: str) -> Query:
    """Return a gauge of each machine: heads and agents report their own."""
    return Query(f"max by (node) (gllm:{name})", "{{node}}")
