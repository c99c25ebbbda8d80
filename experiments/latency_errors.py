"""Errors of predicted latencies: the median, and Vidur's latency per output token."""

from statistics import median

from gllm.observability.latency import percentile
from gllm.sim.compare import RunComparison
from gllm.sim.metrics.run_record import RunRecord


def median_latency(run: RunRecord, metric: str) -> float:
    """Return the median over the requests in seconds."""
    values = (getattr(served.line, metric) for served in run.requests.values())
    return median([value for value in values if value is not None])


def median_latency_error(comparison: RunComparison, metric: str, at_speed: bool = False) -> float:
    """Return the relative error of the predicted median, with sign."""
    predicted = comparison.at_speed if at_speed else comparison.predicted
    return median_latency(predicted, metric) / median_latency(comparison.real, metric) - 1


def normalized_latency_error(
    comparison: RunComparison, percent: float, at_speed: bool = False
) -> float:
    """Return the relative error, with sign, of a predicted percentile of E2EL per output token.

    Vidur judges its fidelity by this figure (arXiv 2405.05465).
    """
    predicted = comparison.at_speed if at_speed else comparison.predicted
    expected, measured = (
        percentile(
            [
                served.line.e2el / served.line.num_tokens
                for served in run.requests.values()
                if served.line.e2el is not None and served.line.num_tokens
            ],
            percent,
        )
        for run in (predicted, comparison.real)
    )
    return expected / measured - 1
