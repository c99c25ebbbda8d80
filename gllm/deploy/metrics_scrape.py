"""Parse Prometheus's text format into numbers by metric name."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "gllm:"


def _by_name() -> dict[str, dict[Any, float]]:
    return defaultdict(dict)


@dataclass
class MetricsScrape:
    """Parsed response of a server's /metrics: values by metric name, by stage, rank and engine."""

    time: float
    """Time of the scrape, in seconds of any clock."""
    model: str = ""
    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Gauges, counters, sums and counts; summed over labels other than the model's."""
    stages: dict[str, dict[int, float]] = field(default_factory=_by_name)
    """Metrics with a `stage` label: by name, then by stage."""
    ranks: dict[str, dict[tuple[int, int], float]] = field(default_factory=_by_name)
    """Metrics with a `stage` and a `rank` label: by name, then by stage and rank."""
    engines: dict[str, dict[str, float]] = field(default_factory=_by_name)
    """Metrics of a router with an `engine` label: by name, then by engine."""
    engine_states: dict[str, str] = field(default_factory=dict)
    """States of a router's engines."""
    finished: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Number of finished requests by reason."""
    node_counts: dict[str, float] = field(default_factory=dict)
    """Number of an engine's machines, by state."""
    buckets: dict[str, dict[float, float]] = field(default_factory=_by_name)
    """Histograms: cumulative number of observations by bucket bound."""
    counters: set[str] = field(default_factory=set)
    """Names in `values` of metrics that only increase."""

    def value(self, name: str) -> float:
        """Return the value of a metric without a label."""
        return self.values.get(name, 0.0)

    def stage(self, name: str, stage: int) -> float:
        """Return the value of a metric for one stage."""
        return self.stages.get(name, {}).get(stage, 0.0)

    def rank(self, name: str, stage: int, rank: int) -> float:
        """Return the value of a metric for one rank of a stage."""
        return self.ranks.get(name, {}).get((stage, rank), 0.0)

    def engine(self, name: str, engine: str) -> float:
        """Return the value of a metric for one engine of a router."""
        return self.engines.get(name, {}).get(engine, 0.0)

    def follows(self, before: "MetricsScrape") -> bool:
        """Return True if an earlier scrape is of the same process: no counter has decreased."""
        return self.model == before.model and all(
            self.value(name) >= before.value(name) for name in before.counters
        )


def parse_metrics(text: str, time: float) -> MetricsScrape:
    """Parse the Prometheus text of a server's /metrics.

    Args:
        text: body of the response.
        time: time of the scrape, in seconds of any clock.

    Raises:
        ValueError: the text contains no gllm metrics.
    """
    scrape = MetricsScrape(time)
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            name, labels = sample.name.removeprefix(PREFIX), sample.labels
            scrape.model = labels.get("model_name", scrape.model)
            if "le" in labels:
                bound = float(labels["le"])
                scrape.buckets[name.removesuffix("_bucket")][bound] = sample.value
            elif "engine" in labels:
                scrape.engines[name][labels["engine"]] = sample.value
                if "state" in labels:
                    scrape.engine_states[labels["engine"]] = labels["state"]
            elif "node" in labels:
                # Series of machines come and go, and their counters begin anew.
                continue
            elif name == "nodes":
                scrape.node_counts[labels["state"]] = sample.value
            elif "rank" in labels:
                scrape.ranks[name][int(labels["stage"]), int(labels["rank"])] = sample.value
            elif "stage" in labels:
                scrape.stages[name][int(labels["stage"])] = sample.value
            else:
                if name == "request_success_total":
                    scrape.finished[labels["finished_reason"]] += sample.value
                scrape.values[name] += sample.value
                if family.type == "counter":
                    scrape.counters.add(name)
    if not scrape.values:
        raise ValueError("its /metrics has no gllm metrics")
    return scrape
