"""Metric of the server process itself: the tasks of its event loop, whose growth is a leak."""

import asyncio
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class EventLoopCollector(Collector):
    """Collector of the number of asyncio tasks, read at each scrape on the event loop.

    Args:
        model: Name of the served model.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge; 0 if the calling thread has no running event loop."""
        try:
            num_tasks = len(asyncio.all_tasks())
        except RuntimeError:
            num_tasks = 0
        text = "Tasks of the event loop: one per open connection, and those of the server itself"
        gauge = GaugeMetricFamily("gllm:event_loop_tasks", text, labels=("model_name",))
        gauge.add_metric([self._model], num_tasks)
        yield gauge
