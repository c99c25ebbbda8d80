"""Counter of hand-offs that routers of other projects direct."""

from prometheus_client import CollectorRegistry, Counter

from gllm.frontend.metrics import LABELS, PREFIX

OUTCOMES = {
    "prefill": ("held", "not_held"),
    "decode": ("granted", "no_grant", "unfit_grant"),
}
"""Outcomes by half. `granted`: the KV blocks may be fetched; the others are ordinary prefills."""


class HandoffTotals:
    """Counts halves of hand-offs by outcome."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        """Create the metric.

        Args:
            model: name of the served model.
            registry: of the server's metrics.
        """
        self._model = model
        self._counter = Counter(
            PREFIX + "http_handoffs",
            "Halves of hand-offs that routers of other projects direct, by outcome",
            (*LABELS, "half", "outcome"),
            registry=registry,
        )
        for half, outcomes in OUTCOMES.items():
            for outcome in outcomes:
                self._counter.labels(model, half, outcome)

    def count(self, half: str, outcome: str) -> None:
        """Count a half of a hand-off: a key of OUTCOMES, and one of its outcomes."""
        self._counter.labels(self._model, half, outcome).inc()
