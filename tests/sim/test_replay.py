"""Replay and comparison, on logs whose every time is known."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from experiments.latency_errors import median_latency_error, normalized_latency_error
from gllm.observability.logged_scheduler import LoggedScheduler
from gllm.observability.step_log import (
    ScheduleEvent,
    StageTimesEvent,
    StepLogEvent,
    StepLogWriter,
)
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult, StepTime
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.sim.compare import (
    MachineSpeedCostModel,
    SpeedWindow,
    compare_runs,
    compare_with_profile,
    comparison_table,
    median_request_error,
    request_errors,
)
from gllm.sim.costs.base import CostModel, DelegatingCostModel
from gllm.sim.costs.fitted import FittedCostModel
from gllm.sim.costs.profile import CostProfile, build_profile, read_profile, write_profile
from gllm.sim.deployment import (
    Deployment,
    roofline_deployment,
    simulate,
    simulate_scheduler_requests,
)
from gllm.sim.metrics.run_record import RunRecord, StageReport
from gllm.sim.replay import main, replay_calls, replay_step_times
from gllm.sim.workloads.requests import make_workload
from tests.support.full_cases import full_but
from tests.support.scheduler.pipeline import EVERY_POLICY
from tests.support.sim.requests import to_scheduler_requests
from tests.support.sim.step_logs import lengthen_first_row


def deployment(policy: str = "throttle", stages: int = 4) -> Deployment:
    config = SchedulerConfig(policy=policy)
    return roofline_deployment("qwen2.5-14b", "A100-40G", stages, 16384, scheduler=config)


def simulated(
    policy: str = "throttle", stages: int = 4, seed: int = 0, num_requests: int = 24
) -> tuple[RunRecord, list[StepLogEvent]]:
    jobs = make_workload("sharegpt-like", num_requests, 4.0, "gamma:2", seed)
    return simulate_scheduler_requests(deployment(policy, stages), to_scheduler_requests(jobs))


QUICK_RUNS = [("throttle", 4), ("balance", 4), ("orca+", 4), ("tetri", 4)]
"""Policies of unlike kinds: by tokens, by predicted time, static batches, prompts by length."""


def write(events: list[StepLogEvent], path: Path) -> Path:
    log = StepLogWriter(path)
    for event in events:
        log.write(event)
    log.close()
    return path


@pytest.mark.parametrize(
    ("policy", "stages"),
    [
        *full_but(QUICK_RUNS, [(policy, 4) for policy in EVERY_POLICY]),
        ("throttle", 1),
        *(
            pytest.param(policy, 1, marks=pytest.mark.long)
            for policy in EVERY_POLICY
            if policy != "throttle"
        ),
    ],
)
def test_a_run_comes_again(policy: str, stages: int) -> None:
    _, events = simulated(policy, stages)
    calls, times = replay_calls(events), replay_step_times(events)
    assert calls.num_plans > 100
    assert calls.num_equal == calls.num_plans
    assert times.share == 1.0
    assert times.latency_errors == {"ttft": 0.0, "e2el": 0.0}


def test_requests_that_the_driver_receives_together_keep_their_arrivals() -> None:
    """The driver schedules after a batch of messages; policies order by each one's arrival."""
    start = deployment(stages=1).start_event(0.0)
    clock = iter(range(1, 100))
    events: list[StepLogEvent] = [start]
    scheduler = LoggedScheduler(start.scheduler, events.append, lambda: float(next(clock)))
    for seq, num_tokens in enumerate((50, 300, 20)):
        scheduler.add(SchedulerRequest(2 - seq, [7] * num_tokens, 1), 0.1 * seq)
    now = 1.0
    while (plan := scheduler.schedule(now)) is not None:
        sampled = [
            SampledToken(row.seq, row.num_preemptions, 1) for row in plan.rows if row.should_sample
        ]
        now = float(next(clock))
        scheduler.record_step_times(0, [StepTime(plan.step, now, now + 0.5)])
        scheduler.commit(StepResult(plan.step, sampled))
        now = float(next(clock))
    assert next(row.seq for row in _first_plan(events).rows) == 2
    assert replay_step_times(events).share == 1.0


def _first_plan(events: list[StepLogEvent]) -> StepPlan:
    return next(e.plan for e in events if isinstance(e, ScheduleEvent) and e.plan is not None)


def test_reports_of_steps_that_are_not_planned_are_left_out() -> None:
    """As in a replay with fewer plans than its recording has."""
    jobs = make_workload("sharegpt-like", 4, 4.0)
    report = StageReport(0, [StepTime(0, 0.0, 0.1), StepTime(10**6, 0.0, 0.1)], 100.0)
    run, events = simulate_scheduler_requests(
        deployment(), to_scheduler_requests(jobs), stage_reports=[report]
    )
    assert all(served.line.num_tokens == served.max_tokens for served in run.requests.values())
    reported = [event.steps for event in events if isinstance(event, StageTimesEvent)]
    assert reported == [[StepTime(0, 0.0, 0.1)]]


def test_a_changed_plan_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, events = simulated(num_requests=4)
    assert main([str(write(events, tmp_path / "log"))]) == 0
    index, event = next(
        (i, e) for i, e in enumerate(events) if isinstance(e, ScheduleEvent) and e.plan is not None
    )
    assert isinstance(event.plan, StepPlan)
    forged = lengthen_first_row(event.plan)
    events[index] = ScheduleEvent(event.time, forged, event.parallelism)
    agreement = replay_calls(events)
    assert agreement.num_equal == agreement.num_plans - 1
    times = replay_step_times(events)
    assert times.num_equal == times.num_plans - 1
    assert main([str(write(events, tmp_path / "log"))]) == 1
    assert (
        f"{agreement.num_equal} of {agreement.num_plans} plans bit-identical"
        in capsys.readouterr().out
    )


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    """Of several runs' variety in one: the roofline stands for the machine."""
    jobs = make_workload("uniform:1,2000,1,100", 300, 3.0)
    config = SchedulerConfig(ridge_tokens=10**6, prefix_cache=False)
    made = roofline_deployment("qwen2.5-14b", "A100-40G", 4, 16384, scheduler=config)
    return build_profile([simulate(made, jobs)], {"device": "roofline_deployment"})


def test_a_profile_survives_its_file(profile: CostProfile, tmp_path: Path) -> None:
    write_profile(profile, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile


def test_a_fit_predicts_another_run(profile: CostProfile) -> None:
    real, _ = simulated(seed=5)
    cost = FittedCostModel(profile)
    errors = []
    for step in real.micro_batches:
        for stage, times in enumerate(step.stage_times):
            assert times is not None
            errors.append(cost.stage_seconds(stage, step.work) / (times.end - times.start) - 1)
    assert sum(abs(error) for error in errors) / len(errors) < 0.05
    assert sum(cost.activation_transfer(0, real.micro_batches[0].work)) > 0


class BusyDriverCost(DelegatingCostModel):
    """Each arriving request prolongs the running step of the first stage."""

    def arrival_seconds(self, stage: int) -> float:
        """The constant of the first stage."""
        return 0.05 if stage == 0 else 0.0


def test_a_fit_tells_arrivals_from_the_steps_that_they_slow_down() -> None:
    config = SchedulerConfig(ridge_tokens=10**6, prefix_cache=False)
    made = roofline_deployment("qwen2.5-14b", "A100-40G", 2, 16384, scheduler=config)
    jobs = make_workload("uniform:1,2000,1,100", 300, 3.0)
    run = simulate(replace(made, cost=BusyDriverCost(made.cost)), jobs)
    cost = FittedCostModel(build_profile([run], {}))
    assert cost.arrival_seconds(0) == pytest.approx(0.05, rel=0.05)
    assert cost.arrival_seconds(1) < 0.005


def test_real_beside_predicted(profile: CostProfile, tmp_path: Path) -> None:
    _, events = simulated(seed=5)
    log, file = write(events, tmp_path / "log"), tmp_path / "profile.json"
    write_profile(profile, file)
    both = compare_with_profile(log, file)
    assert set(both.real.requests) == set(both.predicted.requests)
    for metric in ("ttft", "tpot", "e2el"):
        assert abs(median_latency_error(both, metric)) < 0.08
        assert median_request_error(both, metric) < 0.08
    table = comparison_table(both)
    for words in ("TTFT mean, ms", "E2EL p99, ms", "bubbles, %", "micro-batches"):
        assert words in table


def run_slow(cost: CostModel) -> list[StepLogEvent]:
    """Return the log of a machine that is slower by 1.3."""
    slow_cost = MachineSpeedCostModel(cost, [SpeedWindow(0.0, 1.3)])
    slow = Deployment("qwen2.5-14b", [12] * 4, slow_cost, deployment().scheduler)
    jobs = make_workload("sharegpt-like", 24, 4.0, "gamma:2", 5)
    return simulate_scheduler_requests(slow, to_scheduler_requests(jobs))[1]


@pytest.mark.full
def test_a_slower_machine_is_divided_out(profile: CostProfile) -> None:
    both = compare_runs(run_slow(deployment().cost), profile)
    assert both.slowdown == pytest.approx(1.3, rel=0.05)
    for metric in ("ttft", "tpot", "e2el"):
        error, at_speed = (median_latency_error(both, metric, each) for each in (False, True))
        assert error < -0.15
        assert abs(at_speed) < 0.1
        errors = request_errors(both, metric, at_speed=True)
        assert len(errors) == 24
        assert sorted(errors)[12] < 0.1
    for percent in (50, 95):
        error, at_speed = (normalized_latency_error(both, percent, each) for each in (False, True))
        assert error < -0.15
        assert abs(at_speed) < 0.1
    interrupted = compare_runs(run_slow(InterruptedCostModel(deployment().cost)), profile)
    # Interruptions delay requests too, so they are part of the machine's speed.
    assert interrupted.slowdown == pytest.approx(both.slowdown * (0.99 + 0.01 * 20), rel=0.05)


def test_each_part_of_a_run_has_the_speed_of_the_machine_then(profile: CostProfile) -> None:
    cost = deployment().cost
    windows = [SpeedWindow(float(second), 3.0 if second % 2 else 1.0) for second in range(200)]
    slow_cost = MachineSpeedCostModel(cost, windows)
    slow = Deployment("qwen2.5-14b", [12] * 4, slow_cost, deployment().scheduler)
    jobs = make_workload("sharegpt-like", 24, 4.0, "gamma:2", 5)
    both = compare_runs(simulate_scheduler_requests(slow, to_scheduler_requests(jobs))[1], profile)
    assert 1.3 < both.slowdown < 2.7
    for metric in ("tpot", "e2el"):
        errors = request_errors(both, metric, at_speed=True)
        assert sorted(errors)[12] < 0.1


@pytest.mark.full
def test_a_profile_leaves_interrupted_steps_out(profile: CostProfile) -> None:
    steps = [
        msgspec.structs.replace(step, stages=[20 * seconds for seconds in step.stages])
        if index % 50 == 7
        else step
        for index, step in enumerate(profile.steps)
    ]
    interrupted = FittedCostModel(msgspec.structs.replace(profile, steps=steps))
    cost = FittedCostModel(profile)
    for tokens in (1, 3, 6):
        work = StageWork(0, tokens, (), tokens, 500 * tokens, tokens)
        for stage in range(4):
            assert interrupted.stage_seconds(stage, work) == pytest.approx(
                cost.stage_seconds(stage, work), rel=0.03
            )


class InterruptedCostModel(DelegatingCostModel):
    """Costs of another model, but every hundredth step takes twenty times as long."""

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        factor = 20 if work.step % 100 == 50 else 1
        return factor * super().stage_seconds(stage, work, now)


def test_files_that_do_not_fit_are_refused(profile: CostProfile, tmp_path: Path) -> None:
    _, events = simulated(stages=1, num_requests=2)
    log = write(events, tmp_path / "log")
    write_profile(profile, tmp_path / "p.json")
    with pytest.raises(ValueError, match="same --pp"):
        compare_with_profile(log, tmp_path / "p.json")
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no\.json is not a profile"):
        read_profile(tmp_path / "no.json")
    (tmp_path / "old.json").write_bytes(b"")
    with pytest.raises(ValueError, match="is not a profile"):
        read_profile(tmp_path / "old.json")
    for number in (1, 99):
        write_profile_of_format(profile, tmp_path / "other.json", number)
        with pytest.raises(ValueError, match=f"format {number}, not 3: measure it again"):
            read_profile(tmp_path / "other.json")


def write_profile_of_format(profile: CostProfile, path: Path, number: int) -> None:
    values = {name: getattr(profile, name) for name in profile.__struct_fields__}
    write_profile(CostProfile(**values | {"format": number}), path)
