"""Stages that change their speed."""

import pytest

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.constant import ConstantCostModel
from gllm.sim.costs.slowed import SlowedCostModel
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.workloads.requests import WorkloadRequest, to_scheduler_requests
from tests.support.sim.observers import RecordedStages


@pytest.mark.parametrize(
    ("now", "seconds"),
    [
        (0.0, 2.0),
        (2.0, 2.0),
        # One second of three is slow.
        (3.0, 1.0 + 3.0),
        (4.0, 6.0),
        # The period ends when 4/3 of the 2 seconds are done.
        (6.0, 4.0 + 2.0 - 4.0 / 3),
        (10.0, 2.0),
    ],
)
def test_a_stage_is_slow_for_the_part_of_a_step_in_the_period(now: float, seconds: float) -> None:
    cost = SlowedCostModel(ConstantCostModel(2.0), 1, 3.0, 4.0, 10.0)
    work = StageWork(0, 1, (), 1, 1, 1)
    assert cost.stage_seconds(1, work, now) == pytest.approx(seconds)
    assert cost.stage_seconds(0, work, now) == 2.0
    # The whole period, of 1 s, is within the step.
    short = SlowedCostModel(ConstantCostModel(2.0), 1, 3.0, now + 0.5, now + 1.5)
    assert short.stage_seconds(1, work, now) == pytest.approx(2.0 + 1.0 - 1.0 / 3)


def test_a_pipeline_asks_for_costs_at_the_time_of_each_step() -> None:
    cost = SlowedCostModel(ConstantCostModel(0.25), 1, 2.0, 1.0, 2.0)
    config = SchedulerConfig(policy="sarathi", prefix_cache=False).resolve(2, 1000, 200)
    stages = RecordedStages()
    pipeline = SimulatedPipeline(config, cost, [stages])
    pipeline.submit_each(to_scheduler_requests([WorkloadRequest(0.0, 4, 9)]))
    pipeline.loop.run()
    lengths = {start: end - start for (stage, _), (start, end) in stages.times.items() if stage}
    assert lengths[0.25] == lengths[0.75] == lengths[2.0] == 0.25
    assert lengths[1.25] == 0.5
    for slow in ({"factor": 0.0}, {"factor": 2.0, "begin_seconds": 3.0, "end_seconds": 3.0}):
        with pytest.raises(ValueError, match=r"factor is 0|begin_seconds has to be less"):
            SlowedCostModel(ConstantCostModel(0.25), 0, **slow)
