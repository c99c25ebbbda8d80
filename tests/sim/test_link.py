"""Links in simulated time: occupancy and propagation, policies, and pipelines between them."""

import pytest

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import NO_TRANSFER, TransferCost
from gllm.sim.costs.constant import ConstantCostModel
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.workloads.requests import WorkloadRequest, to_scheduler_requests
from tests.sim.observers import CommitTimes

STAGE_SECONDS = 0.005
DELAY = TransferCost(0.0, 0.030)


class DelayedCost(ConstantCostModel):
    """Constant stages between links that only delay."""

    def __init__(self, back: TransferCost) -> None:
        super().__init__(STAGE_SECONDS)
        self._back = back

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the delay."""
        return DELAY

    def return_transfer(self, work: StageWork) -> TransferCost:
        """Return the cost of the way back."""
        return self._back


@pytest.mark.parametrize(
    ("back", "round_trip_seconds"),
    [(NO_TRANSFER, 0.110), (DELAY, 0.140)],
    ids=["free way back", "30 ms back"],
)
def test_depth_hides_propagation(back: TransferCost, round_trip_seconds: float) -> None:
    """Micro-batches per second of 4 stages of 5 ms, 30 ms apart, by the number in flight.

    Depths 4, 8, 16 and 32 give 36, 73, 145 and 200 with a free way back, and 29, 57, 114 and 200
    with 30 ms back; a stage permits 200.
    """
    for depth in (4, 8, 16, 32):
        config = SchedulerConfig(
            policy="sarathi", max_in_flight=depth, max_num_batched_tokens=1, prefix_cache=False
        ).resolve(4, 10_000, 200)
        commits = CommitTimes()
        pipeline = SimulatedPipeline(config, DelayedCost(back), [commits])
        jobs = [WorkloadRequest(0.0, 1, 20)] * 64
        pipeline.submit_each(to_scheduler_requests(jobs))
        pipeline.loop.run()
        begin, end = 4 * depth, 24 * depth
        rate = (end - begin) / (commits.times[end] - commits.times[begin])
        assert rate == pytest.approx(min(depth / round_trip_seconds, 1 / STAGE_SECONDS), rel=0.01)
