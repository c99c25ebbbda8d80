"""The driver sets the depth of its scheduler from reports of stages and links."""

from itertools import count
from math import inf
from unittest.mock import patch

import pytest

from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_for_worker, encode
from gllm.messages.reports import LinkTime, LinkTimes, StageTimes
from gllm.messages.requests import EngineOutputs, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RunStep, StepDone
from gllm.pacing.depth import LinkSeconds
from gllm.runtime.driver.driver import Driver, DriverPacing, convert_link_times
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult, StepTime
from gllm.scheduler.scheduler import Scheduler

STAGES = 2
STEP_SECONDS = 0.010
ROUND_TRIP_SECONDS = 0.060
BYTES_PER_TOKEN = 1000
LINK_TIMES = LinkTimes([LinkTime(1e6, ROUND_TRIP_SECONDS, 1e6)], [0.0, ROUND_TRIP_SECONDS])


class Channel:
    """Channel that keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[WireMessage] = []

    def send(self, message: WireMessage) -> None:
        self.messages.append(message)

    def send_encoded(self, payload: bytes) -> None:
        """Ignore messages of the other stage: stage 0 gets the same steps."""


class Engine:
    """Driver of two stages whose steps take STEP_SECONDS each on a clock of its own."""

    def __init__(self, has_pacing: bool, max_in_flight: int | None = None) -> None:
        config = SchedulerConfig(max_in_flight=max_in_flight)
        self.scheduler = Scheduler(config.resolve(STAGES, 1000, 500, has_tcp_edges=True))
        pacing = DriverPacing(self.scheduler, BYTES_PER_TOKEN) if has_pacing else None
        self.stage, self.frontend = Channel(), Channel()
        self.driver = Driver(
            self.scheduler, self.stage.send, [Channel()], self.frontend, pacing=pacing
        )
        self.now = 0.0
        self._seqs = count()

    @property
    def depth(self) -> int:
        """Depth that the frontend was told last."""
        outputs = [each for each in self.frontend.messages if isinstance(each, EngineOutputs)]
        return outputs[-1].stats.depth

    def submit(self, requests: int) -> None:
        for seq in range(requests):
            self.driver.submit(
                SubmitRequest(next(self._seqs), [seq + 1] * 4, SequenceSamplingParams(), 400, [])
            )

    def run_steps(self, steps: int) -> None:
        """Run turns of the driver; each commits the oldest step and reports its times."""
        with patch("gllm.runtime.driver.driver.time.monotonic", lambda: self.now):
            for _ in range(steps):
                self.driver.run_iteration()
                plans = [each.plan for each in self.stage.messages if isinstance(each, RunStep)]
                self.stage.messages = [RunStep(plan) for plan in plans[1:]]
                self._finish(plans[0])

    def _finish(self, plan: StepPlan) -> None:
        self.now += STEP_SECONDS
        for stage in range(STAGES):
            times = [StepTime(plan.step, self.now - STEP_SECONDS, self.now)]
            self.driver.on_stage_times(StageTimes(stage, times, self.now))
        tokens = [
            SampledToken(row.seq, row.num_preemptions, 7) for row in plan.rows if row.should_sample
        ]
        self.driver.commit(StepDone(StepResult(plan.step, tokens), []))


def test_the_first_depth_is_the_number_of_stages() -> None:
    engine = Engine(has_pacing=True)
    assert engine.scheduler.config.max_in_flight == 4 * STAGES
    engine.submit(20)
    engine.run_steps(100)
    assert engine.depth == STAGES, "no link has been measured"
    assert engine.scheduler.stats().in_flight <= STAGES


def test_the_depth_follows_the_times_of_stages_and_links() -> None:
    engine = Engine(has_pacing=True)
    engine.submit(40)
    engine.run_steps(40)
    engine.driver.handle(decode_for_worker(encode(LINK_TIMES)))
    engine.run_steps(40)
    # 2 x 10 ms, 30 ms there and 30 ms back: 8 micro-batches of 10 ms each.
    assert engine.depth == 8
    engine.driver.run_iteration()
    assert engine.scheduler.stats().in_flight == 8


@pytest.mark.parametrize("limit", [1, 3])
def test_max_in_flight_is_the_upper_limit(limit: int) -> None:
    engine = Engine(has_pacing=True, max_in_flight=limit)
    engine.submit(40)
    engine.driver.handle(LINK_TIMES)
    engine.run_steps(100)
    assert engine.depth == limit


def test_without_pacing_times_of_links_change_nothing() -> None:
    engine = Engine(has_pacing=False, max_in_flight=5)
    engine.driver.handle(LINK_TIMES)
    engine.submit(40)
    engine.run_steps(100)
    assert engine.depth == STAGES


def test_one_way_takes_half_of_the_round_trip() -> None:
    paths = convert_link_times(
        LinkTimes(
            [LinkTime(), LinkTime(2e6, 0.04, 2e6), LinkTime(None, 0.02, 0.0)],
            [0.0, 0.0, 0.04, 0.06],
        ),
        BYTES_PER_TOKEN,
    )
    assert paths.links == [
        LinkSeconds(),
        LinkSeconds(0.02, 0.0005, 0.0005),
        LinkSeconds(0.01, 0.0, inf),
    ]
    assert (paths.plan_latencies, paths.return_latency) == ([0.0, 0.0, 0.02, 0.03], 0.03)
