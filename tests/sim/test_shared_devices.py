"""Engines that share the devices of their stages."""

from itertools import pairwise

import pytest

from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.event_loop import EventLoop
from gllm.sim.pipeline import SimulatedDevice, SimulatedPipeline
from gllm.sim.workloads.requests import WorkloadRequest
from tests.support.sim.observers import CommitTimes, RecordedStages
from tests.support.sim.requests import to_scheduler_requests

STAGE_SECONDS = 0.25
CONFIG = SchedulerConfig(policy="sarathi", max_in_flight=1, prefix_cache=False).resolve(2, 99, 99)


class SharedEngines:
    """Engines with one micro-batch in flight each, on two devices."""

    def __init__(self, num_engines: int) -> None:
        self.loop = EventLoop()
        self.stages = [RecordedStages() for _ in range(num_engines)]
        self.commits = [CommitTimes() for _ in range(num_engines)]
        devices = [SimulatedDevice(), SimulatedDevice()]
        self.pipelines = [
            SimulatedPipeline(
                CONFIG,
                ConstantCostModel(STAGE_SECONDS),
                observers,
                loop=self.loop,
                devices=devices,
            )
            for observers in zip(self.stages, self.commits, strict=True)
        ]

    def submit(self, engine: int, *jobs: WorkloadRequest) -> None:
        """Submit requests to an engine."""
        self.pipelines[engine].submit_each(to_scheduler_requests(list(jobs)))


@pytest.mark.parametrize(("num_engines", "seconds"), [(1, 0.5), (2, 0.5), (3, 0.75), (5, 1.25)])
def test_devices_compute_one_micro_batch_at_a_time_in_their_order(
    num_engines: int, seconds: float
) -> None:
    """A token takes two stages, or as many steps of one stage as there are engines."""
    shared = SharedEngines(num_engines)
    for engine in range(num_engines):
        shared.submit(engine, WorkloadRequest(0.0, 4, 20))
    shared.loop.run()
    for stage in range(2):
        spans = sorted(
            span
            for recorded in shared.stages
            for (each, _), span in recorded.times.items()
            if each == stage
        )
        assert len(spans) == 20 * num_engines
        assert all(end - start == STAGE_SECONDS for start, end in spans)
        assert all(after[0] >= before[1] for before, after in pairwise(spans))
    for commits in shared.commits:
        steady = commits.times[5:]
        assert steady[-1] - steady[0] == pytest.approx(seconds * (len(steady) - 1))


def test_stopped_engine_leaves_its_devices_to_the_others() -> None:
    shared = SharedEngines(3)
    for engine in range(3):
        shared.submit(engine, WorkloadRequest(0.0, 4, 20))
    # Engine 0 computes on the first device, and engine 1 waits for it.
    shared.loop.run(until=0.875)
    for engine in (0, 1):
        assert shared.pipelines[engine].stop(0.875)
    shared.loop.run()
    assert [len(commits.times) for commits in shared.commits][2] == 20
    last = shared.commits[2].times
    assert last[-1] - last[-5] == pytest.approx(4 * 2 * STAGE_SECONDS)
