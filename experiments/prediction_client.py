"""Raw errors of predicted latencies at the client of a server: nothing is divided out."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from experiments.claims import ExpectedLimit, PaperClaim
from experiments.logged_servers import WAKE_UP, ServedLoad
from gllm.observability.latency import RequestTimeline
from gllm.sim.compare import METRICS
from gllm.sim.costs.fitted import FittedCostModel
from gllm.sim.costs.profile import CostProfile
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.metrics.run_record import build_run_record

ALLOWED = 0.15
"""Largest raw error of a mean."""


class ClientLatencies(NamedTuple):
    """Timelines of the same requests at the client: real, and predicted from a profile."""

    real: list[RequestTimeline]
    predicted: list[RequestTimeline]

    def error(self, metric: str, average: Callable[[list[float]], float] = fmean) -> float:
        """Return the relative error of an average latency, with sign."""
        return average(_values(self.predicted, metric)) / average(_values(self.real, metric)) - 1


def _values(lines: Sequence[RequestTimeline], metric: str) -> list[float]:
    values = (getattr(line, metric) for line in lines)
    return [value for value in values if value is not None]


def predict_client(load: ServedLoad, profile: CostProfile) -> ClientLatencies:
    """Simulate the requests of a load, sent when the client sent them.

    The requests that wake the server up are simulated and not compared.
    """
    start = build_run_record(load.events).start
    cost = FittedCostModel(profile, start.layers)
    deployment = Deployment(start.model, start.layers, cost, start.scheduler, degrees=start.degrees)
    requests = sorted(load.requests, key=lambda request: request.line.arrival)
    jobs = [each.job._replace(arrival_seconds=each.line.arrival) for each in requests]
    predicted = [served.line for served in simulate(deployment, jobs).requests.values()]
    pairs = zip(requests, predicted, strict=True)
    compared = [(each.line, line) for each, line in pairs if each.job is not WAKE_UP]
    return ClientLatencies([real for real, _ in compared], [line for _, line in compared])


def client_section(latencies: Mapping[str, ClientLatencies]) -> str:
    """Return text and table of the raw errors by title of the load, with the misses by name."""
    rows, misses = [], []
    for title, each in latencies.items():
        for metric in METRICS:
            means = [1e3 * fmean(_values(lines, metric)) for lines in each]
            error = each.error(metric)
            if abs(error) > ALLOWED:
                misses.append(f"{title}: {metric.upper()} {100 * error:+.1f} %")
            rows.append(
                [
                    title,
                    f"mean {metric.upper()}, ms",
                    *map(show_value, means),
                    f"{100 * error:+.1f} %",
                    f"{100 * each.error(metric, median):+.1f} %",
                ]
            )
    missed = f"Above {100 * ALLOWED:.0f} %: {'; '.join(misses)}." if misses else "None is above."
    return (
        "## Raw errors at the client\n\nLatencies from the client's send until it has the token, "
        "beside those that the profile predicts; nothing is divided out. The client shares the "
        f"cores with the server, here as in the profile. {missed}\n\n"
        + format_table(["load", "", "real", "predicted", "error", "error of the median"], rows)
    )


def client_claims(latencies: Mapping[str, ClientLatencies]) -> list[PaperClaim]:
    """Return the claim of each load and metric that the raw error of the mean is small."""
    return [
        PaperClaim(
            f"{title}: mean {metric.upper()} at the client, raw",
            ExpectedLimit(ALLOWED),
            abs(each.error(metric)),
            f"({100 * each.error(metric):+.1f} %, median {100 * each.error(metric, median):+.1f})",
        )
        for title, each in latencies.items()
        for metric in METRICS
    ]
