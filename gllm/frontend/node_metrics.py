"""Prometheus metrics of machines: of all nodes on the head, and of one on its own server."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gllm.engine.interface import EngineInterface
from gllm.messages.node_report import NODE_STATES
from gllm.messages.nodes import LinkState, NodeLoad

PREFIX = "gllm:"
"""Prefix of all metric names."""
Samples = Iterable[tuple[Sequence[str], float | None]]
"""Values of labels and of the metric; a value of None is left out."""
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


def gauge(
    name: str, text: str, common: Mapping[str, str], values: Samples | float, names: str = ""
) -> Metric:
    """Return a Prometheus gauge with its samples.

    Args:
        name: Name of the metric without the prefix PREFIX.
        text: Help text.
        common: Labels that all samples have, by name.
        values: Samples as pairs of label values and value; or the value of the only sample.
        names: Names of the samples' own labels, separated by spaces.
    """
    family = GaugeMetricFamily(PREFIX + name, text, labels=(*common, *names.split()))
    return _add_samples(family, common, values)


def counter(
    name: str, text: str, common: Mapping[str, str], values: Samples | float, names: str = ""
) -> Metric:
    """Return a Prometheus counter with its samples; arguments as in `gauge`."""
    family = CounterMetricFamily(PREFIX + name, text, labels=(*common, *names.split()))
    return _add_samples(family, common, values)


def _add_samples(
    family: GaugeMetricFamily | CounterMetricFamily,
    common: Mapping[str, str],
    values: Samples | float,
) -> Metric:
    for labels, value in [((), values)] if isinstance(values, int | float) else values:
        if value is not None:
            family.add_metric([*common.values(), *labels], value)
    return family


def link_metrics(
    labels: dict[str, str], links_by_node: Sequence[tuple[str, Sequence[LinkState]]]
) -> Iterator[Metric]:
    """Yield Prometheus metrics of data connections between machines: bytes, failures, round trip.

    Args:
        labels: Labels of all samples, by name.
        links_by_node: Pairs of a machine's name and its connections.
    """
    totals: Counter[tuple[str, str, str]] = Counter()
    for node, links in links_by_node:
        for link in links:
            totals[node, link.peer, link.transport] += link.num_bytes
    text = "Bytes that a machine sent to and received from another one over data connections"
    yield counter("link_bytes", text, labels, totals.items(), "node peer transport")
    sending = [
        ((node, link.peer, str(link.edge)), link)
        for node, links in links_by_node
        for link in links
        if link.is_sender
    ]
    failures = [(values, link.num_failures) for values, link in sending]
    text = "Connections to other machines that have broken"
    yield counter("link_failures", text, labels, failures, "node peer edge")
    for name, text, measure in _GAUGES:
        samples = [(values, measure(link)) for values, link in sending]
        yield gauge(name, text, labels, samples, "node peer edge")


class NodeCollector(Collector):
    """Prometheus collector of the machines of an engine, read at each scrape."""

    def __init__(self, engine: EngineInterface) -> None:
        self._engine = engine
        self._labels = {"model_name": engine.model.name}

    def collect(self) -> Iterator[Metric]:
        """Yield state, clock offset, round trip, data connections and load of the machines."""
        reports, status = self._engine.nodes(), self._engine.status()
        labels = self._labels
        counts = Counter(report.state for report in reports)
        states = [((state,), counts[state]) for state in NODE_STATES]
        yield gauge("nodes", "Machines of the engine by state", labels, states, "state")
        for name, text, count in (
            ("node_losses", "Losses of machines, each time counted", status.num_node_losses),
            ("refused_peers", "Connections of other machines that the head refused",
             sum(status.refused_peers.values())),
            ("malformed_frames",
             "Frames of other machines that could not be read, or that their sender may not send",
             status.num_malformed_frames),
        ):  # fmt: skip
            yield counter(name, text, labels, count)
        text = "Clock of a machine minus that of the head"
        offsets = [((report.name,), report.clock_offset_seconds) for report in reports]
        yield gauge("node_clock_offset_seconds", text, labels, offsets, "node")
        text = "Round trip between the head and a machine"
        round_trips = [((report.name,), report.round_trip_seconds) for report in reports]
        yield gauge("node_round_trip_seconds", text, labels, round_trips, "node")
        yield from link_metrics(labels, [(report.name, report.links) for report in reports])
        # Other machines report their own load, if their agents are scraped.
        yield from node_load_metrics(labels, [(report.name, report.load) for report in reports[:1]])


def node_load_metrics(
    labels: dict[str, str], loads: Sequence[tuple[str, NodeLoad]]
) -> Iterator[Metric]:
    """Yield Prometheus metrics of machines' load, such as CPU, memory, power and temperature.

    Values that cannot be read are left out.

    Args:
        labels: Labels of all samples, by name.
        loads: Pairs of a machine's name and its load.
    """
    for name, text, read in (
        ("node_cpu_utilization", "Share of all cores of a machine in use, 0 to 1",
         lambda load: load.cpu_utilization),
        ("node_memory_available_bytes", "Memory of a machine that is available",
         lambda load: load.memory_available_bytes),
        ("node_power_watts", "Power of the processors and GPUs of a machine, where it is readable",
         lambda load: load.power_watts),
        ("node_temperature_celsius", "Highest temperature of a machine's processors and GPUs",
         lambda load: load.temperature_celsius),
    ):  # fmt: skip
        yield gauge(name, text, labels, [((node,), read(load)) for node, load in loads], "node")
    shares = [
        ((node, str(gpu)), share)
        for node, load in loads
        for gpu, share in enumerate(load.gpu_utilization)
    ]
    text = "Share of time in which a GPU computed, 0 to 1"
    yield gauge("node_gpu_utilization", text, labels, shares, "node gpu")
