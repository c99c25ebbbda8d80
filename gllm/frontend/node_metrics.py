"""Prometheus metrics of machines: of all nodes on the head, and of one on its own server."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gllm.engine.interface import EngineInterface
from gllm.messages.node_report import NODE_STATES, NodeReport
from gllm.messages.nodes import LinkState, NodeLoad

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


class NodeCollector(Collector):
    """Collector of the metrics of an engine's machines, read at each scrape."""

    def __init__(self, engine: EngineInterface) -> None:
        self._engine = engine
        self._labels = {"model_name": engine.model.name}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        reports, status = self._engine.nodes(), self._engine.status()
        model = self._labels["model_name"]
        states = GaugeMetricFamily(
            PREFIX + "nodes", "Machines of the engine by state", labels=("model_name", "state")
        )
        for state in NODE_STATES:
            states.add_metric([model, state], sum(each.state == state for each in reports))
        yield states
        for name, text, count in (
            ("node_losses", "Losses of machines, each time counted", status.num_node_losses),
            ("refused_peers", "Connections of other machines that the head refused",
             sum(status.refused_peers.values())),
            ("malformed_frames",
             "Frames of other machines that could not be read, or that their sender may not send",
             status.num_malformed_frames),
        ):  # fmt: skip
            counter = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
            counter.add_metric([model], count)
            yield counter
        yield from self._clocks(reports)
        yield from link_metrics(self._labels, [(each.name, each.links) for each in reports])
        # Other machines report their own load, if their agents are scraped.
        yield from machine_load(self._labels, [(each.name, each.load) for each in reports[:1]])

    def _clocks(self, reports: Sequence[NodeReport]) -> Iterator[Metric]:
        for name, text, values in (
            ("node_clock_offset_seconds", "Clock of a machine minus that of the head",
             [each.clock_offset_seconds for each in reports]),
            ("node_round_trip_seconds", "Round trip between the head and a machine",
             [each.round_trip_seconds for each in reports]),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=(*self._labels, "node"))
            for report, value in zip(reports, values, strict=True):
                if value is not None:
                    gauge.add_metric([*self._labels.values(), report.name], value)
            yield gauge


def machine_load(labels: dict[str, str], loads: Sequence[tuple[str, NodeLoad]]) -> Iterator[Metric]:
    """Yield the load of machines; what cannot be read is left out.

    Args:
        labels: common labels and their values.
        loads: names of machines and their load.
    """
    common = list(labels.values())
    for name, text, values in (
        ("node_cpu_utilization", "Share of all cores of a machine in use, 0 to 1",
         [load.cpu_utilization for _, load in loads]),
        ("node_memory_available_bytes", "Memory of a machine that is available",
         [load.memory_available_bytes for _, load in loads]),
        ("node_power_watts", "Power of the processors and GPUs of a machine, where it is readable",
         [load.power_watts for _, load in loads]),
        ("node_temperature_celsius", "Highest temperature of a machine's processors and GPUs",
         [load.temperature_celsius for _, load in loads]),
    ):  # fmt: skip
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=(*labels, "node"))
        for (node, _), value in zip(loads, values, strict=True):
            if value is not None:
                gauge.add_metric([*common, node], value)
        yield gauge
    gpus = GaugeMetricFamily(
        PREFIX + "node_gpu_utilization",
        "Share of time in which a GPU computed, 0 to 1",
        labels=(*labels, "node", "gpu"),
    )
    for node, load in loads:
        for gpu, share in enumerate(load.gpu_utilization):
            if share is not None:
                gpus.add_metric([*common, node, str(gpu)], share)
    yield gpus
