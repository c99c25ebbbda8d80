"""Step logs with two lanes, and those from before there were lanes."""

import json
from pathlib import Path
from random import Random

from gllm.observability.logged_scheduler import LoggedScheduler
from gllm.observability.step_log import (
    ScheduleEvent,
    StartEvent,
    StepLogEvent,
    StepLogWriter,
    read_step_log,
)
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import ScheduledRow, StepPlan
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.metrics.step_costs import measure_step_costs
from gllm.sim.replay import replay_calls
from tests.scheduler.test_properties import drive
from tests.sim.test_run import add, chunk, commit, decode, start, times
from tests.support.scheduler.lane_pipeline import LanePipeline
from tests.support.scheduler.pipeline import Pipeline


def record(path: Path, config: SchedulerConfig, seed: int) -> None:
    """Write the step log of a random load."""
    rng = Random(seed)
    pipeline = LanePipeline(config, rng) if config.num_lanes == 2 else Pipeline(config)
    log = StepLogWriter(path)
    log.write(StartEvent(0.0, "m", [1] * config.stages, config, "driver"))
    scheduler = LoggedScheduler(config, log.write, lambda: pipeline.now)
    pipeline.scheduler = scheduler
    drive(pipeline, rng, 600)
    pipeline.drain()
    log.close()


def resolved(lanes: str) -> SchedulerConfig:
    config = SchedulerConfig(
        policy="throttle",
        lanes=lanes,
        max_prefill_tokens=16,
        min_prefill_tokens=4,
        max_in_flight=4,
        block_size=4,
        expected_output_tokens=0,
    )
    return config.resolve(3, 24, 60)


def test_the_calls_of_both_lanes_replay(tmp_path: Path) -> None:
    for seed in range(2):
        record(tmp_path / "log", resolved("2"), seed)
        agreement = replay_calls(list(read_step_log(tmp_path / "log")))
        assert agreement.num_equal == agreement.num_plans > 50


def test_a_log_from_before_lanes_replays_with_one_lane(tmp_path: Path) -> None:
    """Its plans have three fields and its configuration no lanes."""
    record(tmp_path / "new", resolved("1"), 4)
    lines = []
    for line in (tmp_path / "new").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            del event["scheduler"]["lanes"]
        if event.get("plan"):
            assert event["plan"][3:] == [0, 0]
            del event["plan"][3:]
        lines.append(json.dumps(event, separators=(",", ":")))
    (tmp_path / "old").write_text("\n".join(lines) + "\n")
    agreement = replay_calls(list(read_step_log(tmp_path / "old")))
    assert agreement.num_equal == agreement.num_plans > 50


def lane_plan(time: float, step: int, lane: int, others: int, *rows: ScheduledRow) -> ScheduleEvent:
    return ScheduleEvent(time, StepPlan(step, list(rows), [], lane, others), 2)


def test_a_step_that_was_overtaken_counts_from_the_end_of_the_later_one() -> None:
    log: list[StepLogEvent] = [
        start(stages=2),
        add(9.0, 0, prompt=1, output=5),
        lane_plan(9.0, 0, 1, 0, chunk(0, 0, 1)),
        times(0, 0, 9.0, 9.5),
        times(1, 0, 9.5, 9.75),
        commit(10.0, 0, 0),
        add(10.0, 1, prompt=40, output=1),
        lane_plan(10.0, 1, 1, 0, chunk(1, 0, 40)),
        lane_plan(10.0, 2, 0, 2, decode(0, 1)),
        times(0, 1, 10.0, 11.0),
        times(0, 2, 11.0, 12.0),
        times(1, 2, 13.0, 14.0),
        commit(14.0, 2, 0),
        times(1, 1, 14.0, 18.0),
        commit(18.0, 1, 1),
    ]
    costs = {each.step.work.step: each for each in measure_step_costs(build_run_record(log))}
    assert costs[1].stage_seconds == [1.0, 4.0]
    assert costs[2].stage_seconds == [1.0, 1.0]
    # The overtaken step's link did not keep the stage waiting: it computed the other one.
    assert costs[1].link_seconds == [None]
    assert costs[2].link_seconds == [1.0]


def test_requests_of_a_log_are_those_of_the_load(tmp_path: Path) -> None:
    record(tmp_path / "log", resolved("2"), 1)
    run = build_run_record(list(read_step_log(tmp_path / "log")))
    assert run.micro_batches
    assert all(step.committed_time is not None for step in run.micro_batches)
