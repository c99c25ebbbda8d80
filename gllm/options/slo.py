"""Service-level objective of a request: limits of its latencies."""

from typing import NamedTuple


class Slo(NamedTuple):
    """Largest latencies of a request, in seconds; None: no objective."""

    ttft_seconds: float | None = None
    """Time to the first token, from the request's arrival."""
    tpot_seconds: float | None = None
    """Mean time per output token after the first."""

    def with_defaults(self, defaults: "Slo") -> "Slo":
        """Return this objective with missing limits replaced by those of `defaults`."""
        ttft, tpot = self
        return Slo(
            defaults.ttft_seconds if ttft is None else ttft,
            defaults.tpot_seconds if tpot is None else tpot,
        )


NO_SLO = Slo()
"""Objective without limits."""
