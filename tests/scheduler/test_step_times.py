"""Step times for those who learn from them."""

from random import Random

import pytest

from gllm.scheduler.plan import ScheduledRow, StepPlan, StepTime
from gllm.scheduler.stage_work import compute_stage_work
from gllm.scheduler.step_cost import (
    REFIT_INTERVAL_STEPS,
    REPORTED_STEP_INTERVAL,
    StepCostCoefficients,
    StepCostMeter,
)

TRUTH = StepCostCoefficients(step=2e-3, token=5e-5, pair=3e-8, decode=1e-5, context_token=4e-8)


def random_plan(rng: Random, step: int) -> StepPlan:
    """Decodes with contexts and a prefill chunk."""
    rows = [
        ScheduledRow(seq, 0, rng.randrange(4000), 1, [], [], True)
        for seq in range(rng.randrange(60))
    ]
    rows.append(ScheduledRow(99, 0, rng.randrange(2000), rng.randint(2, 900), [], [], False))
    return StepPlan(step, rows, [])


@pytest.mark.parametrize("stages", [1, 4])
def test_the_meter_fits_the_time_of_the_slowest_stage(stages: int) -> None:
    rng, meter = Random(5), StepCostMeter(stages)
    reports = []
    num_steps = 4 * REFIT_INTERVAL_STEPS * REPORTED_STEP_INTERVAL
    for step in range(num_steps):
        plan = random_plan(rng, step)
        meter.on_scheduled(plan)
        seconds = TRUTH.predict_seconds(compute_stage_work(step, plan.rows))
        slowest = rng.randrange(stages)
        for stage in range(stages):
            time = seconds if stage == slowest else seconds * rng.uniform(0.2, 0.9)
            if (report := meter.on_stage_times([StepTime(step, 1.0, 1.0 + time)])) is not None:
                reports.append((step, report))
    # One report per fit, and a fit only after so many steps that count.
    assert len(reports) == 4
    assert reports[0][0] >= (REFIT_INTERVAL_STEPS - 1) * REPORTED_STEP_INTERVAL
    work = compute_stage_work(0, random_plan(rng, 0).rows)
    assert reports[-1][1].predict_seconds(work) == pytest.approx(
        TRUTH.predict_seconds(work), rel=0.05
    )


def test_several_steps_of_a_report_give_one_fit_at_most() -> None:
    rng, meter = Random(6), StepCostMeter(1)
    times = []
    for step in range(2 * REFIT_INTERVAL_STEPS * REPORTED_STEP_INTERVAL):
        plan = random_plan(rng, step)
        meter.on_scheduled(plan)
        seconds = TRUTH.predict_seconds(compute_stage_work(step, plan.rows))
        times.append(StepTime(step, 0.0, seconds))
    assert meter.on_stage_times(times) is not None
    assert meter.on_stage_times(times) is None
