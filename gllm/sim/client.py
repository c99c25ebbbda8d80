"""Simulated client of an engine, whose requests cross a frontend before the driver has them."""

from collections.abc import Iterable

from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.event_loop import ARRIVAL
from gllm.sim.pipeline import SimulatedPipeline


class SimulatedClient:
    """Client and frontend of a simulated engine: requests pass one after the other, in order.

    The times are those of the cost model's `request_transfer`. At the driver a request has the age
    of its way, so that its latencies are those of the client.

    Args:
        pipeline: Pipeline of the engine.
    """

    def __init__(self, pipeline: SimulatedPipeline) -> None:
        self._pipeline = pipeline
        self._free_time = self._received_time = 0.0
        """When the requests so far have passed the frontend, and the newest is at the driver."""

    def send_each(self, requests: Iterable[tuple[float, SchedulerRequest]]) -> None:
        """Send requests at their times in seconds.

        Args:
            requests: Sorted by time. May be a generator: only the next request is in memory.
        """
        self._pipeline.loop.push_each(requests, ARRIVAL, self.send)

    def send(self, now: float, request: SchedulerRequest) -> None:
        """Send a request now; `now` is the present time of the event loop in seconds."""
        cost = self._pipeline.cost.request_transfer(self._pipeline.is_busy)
        self._free_time = max(self._free_time, now) + cost.occupancy_seconds
        # A connection between two processes keeps the order.
        time = max(self._received_time, self._free_time + cost.propagation_seconds)
        self._received_time = time
        aged = request._replace(age_seconds=request.age_seconds + time - now)
        self._pipeline.loop.push(time, ARRIVAL, self._submit, aged)

    def _submit(self, now: float, request: SchedulerRequest) -> None:
        self._pipeline.submit(request, now)
