"""Metrics under the names of vLLM, beside gllm's own, for routers, autoscalers and dashboards.

docs/router.md has the table. The values are those of gllm's metrics at the same scrape.
"""

import re
import time
from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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


_BLOCK = re.compile(r"^# HELP gllm:(\w+) .*\n(?:(?!# HELP ).*\n)*", re.MULTILINE)
"""A metric in Prometheus's text format: its comments and its samples."""


def repeat_with_aliases(text: str) -> str:
    """Return those metrics of a text in Prometheus's format that have vLLM's names, with these.

    Works on the text, because writing the samples again takes as long as writing all of them.
    """
    parts = []
    for block in _BLOCK.finditer(text):
        name = block[1] if block[1] in ALIASES else block[1].removesuffix("_total")
        for alias in ALIASES.get(name, ()):
            # Label values may contain anything, so only the beginnings of lines are changed.
            pattern = rf"^(# (?:HELP|TYPE) )?{OWN_PREFIX}{name}"
            parts.append(re.sub(pattern, rf"\g<1>{PREFIX}{alias}", block[0], flags=re.MULTILINE))
    return "".join(parts)


class AdapterCollector(Collector):
    """Collector of the metric by which llm-d selects servers with a LoRA adapter: there are none.

    Args:
        model: Name of the served model.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Yield the metric."""
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters", "model_name")
        text = "LoRA adapters in use; the value is the time of the scrape"
        gauge = GaugeMetricFamily(f"{PREFIX}lora_requests_info", text, labels=labels)
        gauge.add_metric(["0", "", "", self._model], time.time())
        yield gauge
