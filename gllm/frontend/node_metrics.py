"""Prometheus metrics of machines: of all nodes on the head, and of one on its own server."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gllm.engine.interface import EngineInterface
from gllm.frontend.link_metrics import PREFIX, link_metrics
from gllm.messages.node_report import NODE_STATES, NodeReport
from gllm.messages.nodes import NodeLoad


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
