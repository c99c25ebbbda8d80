"""Changed step logs for tests of their replay."""

from gllm.scheduler.plan import ScheduledRow, StepPlan


def lengthen_first_row(plan: StepPlan) -> StepPlan:
    """Return a plan whose only row is its first one, with one token more."""
    row = plan.rows[0]
    longer = ScheduledRow(row.seq, row.num_preemptions, row.start, row.num_tokens + 1, *row[4:])
    return StepPlan(plan.step, [longer], *plan[2:])
