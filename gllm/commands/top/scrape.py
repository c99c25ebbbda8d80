"""What /metrics said at one moment.

Owns reading Prometheus's text format into numbers by name. Knows nothing of what they mean.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "gllm:"


@dataclass(frozen=True)
class Scrape:
    """Numbers by name, without the prefix. One that is not there counts as 0."""

    time: float
    """When, in seconds on any clock."""
    model: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    """Gauges, counters, sums and counts; summed over labels other than the model's."""
    stages: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """What each stage has of its own, by stage."""
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """Of histograms: observations up to each bound."""
    counters: frozenset[str] = frozenset()
    """Which of `values` only grow."""

    def value(self, name: str) -> float:
        """A number without a stage."""
        return self.values.get(name, 0.0)

    def stage(self, name: str, stage: int) -> float:
        """A stage's number."""
        return self.stages.get(name, {}).get(stage, 0.0)

    def follows(self, before: "Scrape") -> bool:
        """Whether no counter fell since the one before: else another process answered that one."""
        return self.model == before.model and all(
            self.value(name) >= before.value(name) for name in before.counters
        )


def parse(text: str, time: float) -> Scrape:
    """A scrape from what /metrics answered. Raises ValueError for what is not gllm's."""
    values: dict[str, float] = defaultdict(float)
    stages: dict[str, dict[int, float]] = defaultdict(dict)
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
            elif "stage" in labels:
                stages[name][int(labels["stage"])] = sample.value
            else:
                values[name] += sample.value
                if family.type == "counter":
                    counters.add(name)
    if not values:
        raise ValueError("its /metrics has none of gllm's metrics")
    return Scrape(time, model, values, stages, buckets, frozenset(counters))
