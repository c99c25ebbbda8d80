"""Prometheus metrics of the data connections between machines."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gllm.messages.nodes import LinkState

PREFIX = "gllm:"
"""Prefix of all metric names."""
_GAUGES: tuple[tuple[str, str, Callable[[LinkState], float | None]], ...] = (
    ("link_bytes_per_second", "Payload that a connection to another machine carries, as measured",
     lambda link: link.bytes_per_second),
    ("link_round_trip_seconds", "Least round trip of a connection in the last seconds",
     lambda link: link.round_trip_seconds),
    ("link_loss_ratio", "Share of bytes that a connection sends again, 0 to 1",
     lambda link: link.loss_rate),
    ("link_queued_bytes", "Bytes of steps that wait for a connection",
     lambda link: link.num_queued_bytes),
    ("link_last_chunk_bytes", "Size of the chunk that a connection sent last",
     lambda link: link.last_chunk_bytes),
)  # fmt: skip
"""Names, texts and values of the measurements of sending ends."""


def link_metrics(
    labels: dict[str, str], links_by_node: Sequence[tuple[str, Sequence[LinkState]]]
) -> Iterator[Metric]:
    """Yield the metrics of the data connections of machines.

    Args:
        labels: common labels and their values.
        links_by_node: names of machines and their connections.
    """
    yield _link_bytes(labels, links_by_node)
    names = (*labels, "node", "peer", "edge")
    sending = [
        ([*labels.values(), node, link.peer, str(link.edge)], link)
        for node, links in links_by_node
        for link in links
        if link.is_sender
    ]
    failures = CounterMetricFamily(
        PREFIX + "link_failures", "Connections to other machines that have broken", labels=names
    )
    for values, link in sending:
        failures.add_metric(values, link.num_failures)
    yield failures
    for name, text, measure in _GAUGES:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=names)
        for values, link in sending:
            if (value := measure(link)) is not None:
                gauge.add_metric(values, value)
        yield gauge


def _link_bytes(
    labels: dict[str, str], links_by_node: Sequence[tuple[str, Sequence[LinkState]]]
) -> Metric:
    """Return the bytes of connections by the machine at the other end."""
    counter = CounterMetricFamily(
        PREFIX + "link_bytes",
        "Bytes that a machine sent to and received from another one over data connections",
        labels=(*labels, "node", "peer", "transport"),
    )
    for node, links in links_by_node:
        totals: Counter[tuple[str, str]] = Counter()
        for link in links:
            totals[link.peer, link.transport] += link.num_bytes
        for (peer, transport), num_bytes in sorted(totals.items()):
            counter.add_metric([*labels.values(), node, peer, transport], num_bytes)
    return counter
