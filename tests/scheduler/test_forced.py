"""Tokens that come with a drawn one: computed together, emitted at once, cut where a text ends."""

import pytest

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest


def scheduler(stages: int = 2, **options) -> Scheduler:
    config = SchedulerConfig(policy="throttle", **{"async_scheduling": False, **options})
    return Scheduler(config.resolve(stages, 64, 200))


def plan_of(made: Scheduler) -> StepPlan:
    plan = made.schedule(0.0)
    assert plan is not None
    return plan


def answer(made: Scheduler, plan: StepPlan, token: int, *forced: int, seq: int = 0):
    """The plan's result, where only one sequence samples."""
    return made.commit(StepResult(plan.step, [SampledToken(seq, 0, token, "", forced)]))


def test_they_are_emitted_at_once_and_computed_in_one_row() -> None:
    made = scheduler()
    made.add(SchedulerRequest(0, [1, 2, 3], 10), 0.0)
    outcome = answer(made, plan_of(made), 7, 8, 9)
    assert (outcome.seqs, outcome.token_ids) == ([0, 0, 0], [7, 8, 9])
    assert [first.seq for first in outcome.first_tokens] == [0]
    (row,) = plan_of(made).rows
    assert (row.start, row.num_tokens, row.token_ids, row.should_sample) == (3, 3, [7, 8, 9], True)
    assert made.stats().decode_tokens == 3


def test_a_text_takes_as_many_steps_as_tokens_were_drawn() -> None:
    made = scheduler()
    made.add(SchedulerRequest(0, [1], 12), 0.0)
    steps = 0
    while made.stats().unfinished:
        answer(made, plan_of(made), 5, 6, 7)
        steps += 1
    assert steps == 4


@pytest.mark.parametrize(
    ("limit", "stops", "tokens", "end_of_text"),
    [
        (2, set(), [7, 8], ("length", None)),
        (3, set(), [7, 8, 9], ("length", None)),
        (9, {8}, [7, 8], ("stop", 8)),
        (9, {7, 8}, [7], ("stop", 7)),
        (2, {8}, [7, 8], ("stop", 8)),
    ],
)
def test_the_text_ends_within_them(limit, stops, tokens, end_of_text) -> None:
    made = scheduler()
    made.add(SchedulerRequest(0, [1], limit, frozenset(stops)), 0.0)
    outcome = answer(made, plan_of(made), 7, 8, 9)
    assert outcome.token_ids == tokens
    assert [(end.finish_reason, end.stop_token_id) for end in outcome.finished] == [end_of_text]
    assert not made.stats().unfinished
    assert made.stats().kv_usage == 0


def test_with_async_scheduling_rows_under_way_bring_what_is_known() -> None:
    made = scheduler(stages=1, async_scheduling=True, max_in_flight=3)
    made.add(SchedulerRequest(0, [1, 2], 20), 0.0)
    plans = [plan_of(made) for _ in range(3)]
    assert [plan.rows[0].start for plan in plans] == [0, 2, 3]
    assert answer(made, plans[0], 7, 8, 9).token_ids == [7, 8, 9]
    fourth = plan_of(made)
    assert (fourth.rows[0].start, fourth.rows[0].token_ids) == (4, [9])
    assert answer(made, plans[1], 8).token_ids == []
    assert answer(made, plans[2], 9).token_ids == []
    assert answer(made, fourth, 4).token_ids == [4]


def test_a_budget_cuts_them_and_only_their_last_part_samples() -> None:
    made = scheduler(max_num_batched_tokens=2)
    made.add(SchedulerRequest(0, [1, 2], 20), 0.0)
    answer(made, plan_of(made), 3, 4, 5)
    part = plan_of(made)
    assert (part.rows[0].num_tokens, part.rows[0].should_sample) == (2, False)
    assert made.commit(StepResult(part.step, [])).token_ids == []
    rest = plan_of(made)
    assert (rest.rows[0].token_ids, rest.rows[0].should_sample) == ([5], True)


def test_rows_with_them_come_behind_plain_decodes() -> None:
    made = scheduler(stages=1)
    for seq in range(3):
        made.add(SchedulerRequest(seq, [seq + 1], 20), 0.0)
    drawn = [
        SampledToken(0, 0, 5, "", (6, 7)),
        SampledToken(1, 0, 5),
        SampledToken(2, 0, 5, "", (6,)),
    ]
    made.commit(StepResult(plan_of(made).step, drawn))
    assert [(row.seq, row.num_tokens) for row in plan_of(made).rows] == [(1, 1), (0, 3), (2, 2)]
