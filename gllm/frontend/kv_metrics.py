"""Prometheus metrics of KV blocks that engines give to each other."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gllm.engine.interface import EngineStatus

PREFIX = "gllm:"
"""Prefix of all metric names."""


def kv_transfer_metrics(labels: dict[str, str], status: EngineStatus) -> Iterator[Metric]:
    """Yield the metrics of an engine's transfers; none if it neither gives nor fetches blocks.

    Args:
        labels: common labels and their values.
        status: of the engine.
    """
    stats, totals, values = status.stats, status.kv_transfers, [*labels.values()]
    if totals is None:
        return
    fetches = CounterMetricFamily(
        PREFIX + "kv_fetches",
        "Fetches of KV blocks from other engines that have ended, by outcome",
        labels=(*labels, "outcome"),
    )
    fetches.add_metric([*values, "complete"], totals.num_fetched)
    fetches.add_metric([*values, "failed"], totals.num_failed)
    yield fetches
    for name, value, text in (
        ("kv_fetched_bytes", totals.num_bytes, "Bytes of KV blocks that fetches have got"),
        ("kv_fetch_seconds", totals.seconds, "Seconds of the complete fetches"),
        ("kv_fetched_tokens", stats.fetched_tokens,
         "Tokens that were not computed because another engine had their KV blocks"),
        ("kv_computed_fetches", stats.failed_fetches,
         "Requests whose prompt was computed in spite of a source: the fetch has failed, or was "
         "predicted to take longer"),
        ("kv_served_tickets", totals.num_served,
         "Requests whose KV blocks other engines were allowed to read"),
        ("kv_pushed_tickets", totals.num_pushed,
         "Those of them whose KV blocks could be read while their prompt was computed"),
    ):  # fmt: skip
        counter = CounterMetricFamily(PREFIX + name, text, labels=[*labels])
        counter.add_metric(values, value)
        yield counter
    for name, value, text in (
        ("kv_fetches_running", stats.fetching, "Sequences that wait for KV blocks"),
        ("kv_held_blocks", stats.held_blocks, "KV blocks that are kept for other engines"),
    ):
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=[*labels])
        gauge.add_metric(values, value)
        yield gauge
