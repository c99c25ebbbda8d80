"""Virtual engines in simulated time: a pipeline served by several schedulers that share it.

Source: the pipeline parallelism of vLLM's V0 engine, on which MoLink and its baselines build. Each
virtual engine has a scheduler, sequences and a part of the KV cache of its own and at most one
micro-batch in flight; an arriving request goes to the engine with the fewest unfinished ones.
"""

from collections.abc import Iterable, Sequence

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.costs.base import CostModel
from gllm.sim.event_loop import ARRIVAL, EventLoop
from gllm.sim.observer import PipelineObserver
from gllm.sim.pipeline import PipelineLinks, SimulatedDevice, SimulatedPipeline, make_pipeline_links


class VirtualEngines:
    """Pipelines on the same devices and links.

    Args:
        num_engines: Number of virtual engines: the micro-batches in flight.
        config: Configuration of each engine, resolved with its part of the KV cache and with
            max_in_flight 1.
        cost: Predictor of all times.
        observers: Receivers of what happens in any of the engines.
        link_policy: An argument of `make_link_policy`, for every link.

    Raises:
        ValueError: There is no engine, an engine would have several micro-batches in flight, or the
            link policy is unknown.
    """

    def __init__(
        self,
        num_engines: int,
        config: SchedulerConfig,
        cost: CostModel,
        observers: Sequence[PipelineObserver] = (),
        link_policy: str = "serial",
    ) -> None:
        if num_engines < 1:
            raise ValueError(f"num_engines is {num_engines}: give at least 1")
        if config.max_in_flight != 1:
            raise ValueError(
                f"max_in_flight is {config.max_in_flight}, but a virtual engine has one "
                "micro-batch in flight: set 1"
            )
        self.loop = EventLoop()
        links: PipelineLinks = make_pipeline_links(self.loop, config.stages, link_policy)
        devices = [SimulatedDevice() for _ in range(config.stages)]
        self.pipelines = [
            SimulatedPipeline(config, cost, observers, loop=self.loop, links=links, devices=devices)
            for _ in range(num_engines)
        ]

    def submit_each(self, requests: Iterable[tuple[float, SchedulerRequest]]) -> None:
        """Submit requests at their times in seconds, sorted by time."""
        self.loop.push_each(requests, ARRIVAL, self._on_arrival)

    def _on_arrival(self, now: float, request: SchedulerRequest) -> None:
        pipeline = min(self.pipelines, key=lambda pipeline: pipeline.scheduler.stats().unfinished)
        pipeline.submit(request, now)
