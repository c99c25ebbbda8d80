"""Parse Prometheus's text format into numbers by metric name."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "gllm:"


@dataclass(frozen=True)
class MetricsScrape:
    """Metrics at one moment, by name without the prefix. A missing metric counts as 0."""

    time: float
    """Time of the scrape, in seconds of any clock."""
    model: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    """Gauges, counters, sums and counts; summed over labels other than the model's."""
    stages: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Metrics with a `stage` label: by name, then by stage."""
    ranks: Mapping[str, Mapping[tuple[int, int], float]] = field(default_factory=dict)
    """Metrics with a `stage` and a `rank` label: by name, then by stage and rank."""
    engines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of a router with an `engine` label: by name, then by engine."""
    engine_states: Mapping[str, str] = field(default_factory=dict)
    """States of a router's engines."""
    finished: Mapping[str, float] = field(default_factory=dict)
    """Number of finished requests by reason."""
    node_counts: Mapping[str, float] = field(default_factory=dict)
    """Number of an engine's machines, by state."""
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """Histograms: cumulative number of observations by bucket bound."""
    counters: frozenset[str] = frozenset()
    """Names in `values` of metrics that only increase."""

    def value(self, name: str) -> float:
        """Return the value of a metric without a stage."""
        return self.values.get(name, 0.0)

    def stage(self, name: str, stage: int) -> float:
        """Return the value of a metric of one stage."""
        return self.stages.get(name, {}).get(stage, 0.0)

    def rank(self, name: str, stage: int, rank: int) -> float:
        """Return the value of a metric of one rank of a stage."""
        return self.ranks.get(name, {}).get((stage, rank), 0.0)

    def engine(self, name: str, engine: str) -> float:
        """Return the value of a metric of one of a router's engines."""
        return self.engines.get(name, {}).get(engine, 0.0)

    def follows(self, before: "MetricsScrape") -> bool:
        """Return whether the same process answered the earlier scrape: no counter decreased."""
        return self.model == before.model and all(
            self.value(name) >= before.value(name) for name in before.counters
        )


def parse_metrics(text: str, time: float) -> MetricsScrape:
    """Parse the response of /metrics.

    Raises:
        ValueError: It contains no gllm metrics.
    """
    values: dict[str, float] = defaultdict(float)
    stages: dict[str, dict[int, float]] = defaultdict(dict)
    ranks: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    engines: dict[str, dict[str, float]] = defaultdict(dict)
    states: dict[str, str] = {}
    finished: dict[str, float] = defaultdict(float)
    node_counts: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = defaultdict(dict)
    counters: set[str] = set()
    model = ""
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            name, labels = sample.name.removeprefix(PREFIX), sample.labels
            model = labels.get("model_name", model)
            if "le" in labels:
                buckets[name.removesuffix("_bucket")][float(labels["le"])] = sample.value
            elif "engine" in labels:
                engines[name][labels["engine"]] = sample.value
                if "state" in labels:
                    states[labels["engine"]] = labels["state"]
            elif "node" in labels:
                # Series of machines come and go, and their counters begin anew.
                continue
            elif name == "nodes":
                node_counts[labels["state"]] = sample.value
            elif "rank" in labels:
                ranks[name][int(labels["stage"]), int(labels["rank"])] = sample.value
            elif "stage" in labels:
                stages[name][int(labels["stage"])] = sample.value
            else:
                if name == "request_success_total":
                    finished[labels["finished_reason"]] += sample.value
                values[name] += sample.value
                if family.type == "counter":
                    counters.add(name)
    if not values:
        raise ValueError("its /metrics has no gllm metrics")
    return MetricsScrape(
        time,
        model,
        values,
        stages,
        ranks,
        engines,
        states,
        finished,
        node_counts,
        buckets,
        frozenset(counters),
    )
