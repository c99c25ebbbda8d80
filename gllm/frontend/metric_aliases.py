"""Metrics under the names of vLLM, beside gllm's own, for routers, autoscalers and dashboards.

docs/router.md has the table. The values are those of gllm's metrics at the same scrape.
"""

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from gllm.engine.interface import EngineInterface

PREFIX = "vllm:"
OWN_PREFIX = "gllm:"
SAME_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "iteration_tokens_total",
    "request_success",
    "request_prompt_tokens",
    "request_generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "prefix_cache_queries",
    "prefix_cache_hits",
)
"""Metrics that have the same name after either prefix."""
ALIASES: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in SAME_NAMES},
    # Names of earlier releases, which production-stack and SMG still read.
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    # vLLM's time per output token is that between tokens; the mean of a request has its own name.
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
}
"""Names after vLLM's prefix by the name after gllm's."""


class AliasCollector(Collector):
    """Collector that repeats the metrics of another registry under vLLM's names."""

    def __init__(self, registry: CollectorRegistry, engine: EngineInterface) -> None:
        self._registry = registry
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        for family in self._registry.collect():
            name = family.name.removeprefix(OWN_PREFIX)
            for alias in ALIASES.get(name, ()):
                yield _renamed(family, PREFIX + alias)
        yield self._adapters()

    def _adapters(self) -> Metric:
        """Return the metric by which llm-d selects servers with a LoRA adapter: there are none."""
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters", "model_name")
        text = "LoRA adapters in use; the value is the time of the scrape"
        gauge = GaugeMetricFamily(f"{PREFIX}lora_requests_info", text, labels=labels)
        gauge.add_metric(["0", "", "", self._engine.model.name], time.time())
        return gauge


def _renamed(family: Metric, name: str) -> Metric:
    """Return a copy of a metric with another name, without the times of its creation."""
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [
        Sample(name + sample.name.removeprefix(family.name), *sample[1:])
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return renamed
