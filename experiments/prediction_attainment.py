"""Predicted SLO attainment beside that of the real run, at each rate.

DistServe judges its simulator by this figure (arXiv 2401.09670, Table 2: within 2 points).
"""

from collections.abc import Mapping
from typing import NamedTuple

from experiments.claims import ExpectedLimit, PaperClaim
from gllm.observability.latency import collect_latencies, percentile, slo_attainment
from gllm.options.slo import Slo
from gllm.sim.compare import RunComparison
from gllm.sim.metrics.report import format_table, show_value

LIMIT_PERCENT = 85.0
"""Percentile of the predicted TTFT, and of the predicted TPOT, that is a load's limit. Between 70
and 85 % of the requests meet both, and many miss or meet them by little; limits that all requests
meet would agree with any prediction."""
ALLOWED_POINTS = 5.0
"""Largest difference of two attainments in percentage points."""


class AttainmentComparison(NamedTuple):
    """Attainments (0..1) of one load under the limits that its prediction sets."""

    ttft: float
    """Limit in seconds."""
    tpot: float
    """Limit in seconds."""
    real: float
    predicted: float
    at_speed: float
    """Predicted on a machine of the speed that it had in the run."""

    @property
    def error_points(self) -> float:
        """Predicted at speed less real, in percentage points."""
        return 100 * (self.at_speed - self.real)


def compare_attainment(comparison: RunComparison) -> AttainmentComparison:
    """Return the attainments of a real run and of its predictions."""
    real, predicted, at_speed = (
        [served.line for served in run.requests.values()]
        for run in (comparison.real, comparison.predicted, comparison.at_speed)
    )
    latencies = collect_latencies(at_speed)
    ttft, tpot = (percentile(latencies[name], LIMIT_PERCENT) for name in ("ttft", "tpot"))
    shares = [slo_attainment(lines, Slo(ttft, tpot)) for lines in (real, predicted, at_speed)]
    return AttainmentComparison(ttft, tpot, *shares)


def attainment_section(attainments: Mapping[str, AttainmentComparison]) -> str:
    """Return text and table of the attainments by title of the load."""
    rows = [
        [
            title,
            *(show_value(limit, 1e3) for limit in (each.ttft, each.tpot)),
            *(f"{100 * share:.1f}" for share in (each.real, each.predicted, each.at_speed)),
            f"{each.error_points:+.1f}",
        ]
        for title, each in attainments.items()
    ]
    head = ["load", "TTFT limit, ms", "TPOT limit, ms", "real, %", "predicted, %", "at speed, %"]
    return (
        "## SLO attainment\n\nThe share of requests that meet both limits of their load: "
        f"P{LIMIT_PERCENT:.0f} of TTFT and of TPOT as predicted at speed. Few requests are far "
        "from such limits, so that an error of the times shows.\n\n"
        + format_table([*head, "error at speed, points"], rows)
    )


def attainment_claims(attainments: Mapping[str, AttainmentComparison]) -> list[PaperClaim]:
    """Return the claim of each load, by title, that its attainment errs by at most the allowed."""
    limit = ExpectedLimit(ALLOWED_POINTS, unit="points", name="aim (DistServe: 2)")
    return [
        PaperClaim(
            f"{title}: SLO attainment at speed",
            limit,
            abs(each.error_points),
            f"({100 * each.real:.1f} % real, {each.error_points:+.1f})",
        )
        for title, each in attainments.items()
    ]
