"""States of recurrent layers on a stage: the scheduler's segments as tensors."""

import torch

from gllm.kernels.state_plan import NO_SLOT
from gllm.runtime.worker.batch import build_state_plan
from gllm.scheduler.plan import ScheduledRow, StateSegment, StepPlan
from gllm.scheduler.state_slots import NO_STATE_SLOT


def test_segments_have_the_rows_of_the_batch() -> None:
    lengths = (1, 10, 1)
    rows = [ScheduledRow(seq, 0, 8, length, [], [], True) for seq, length in enumerate(lengths)]
    segments = (
        StateSegment(0, 1, 4, 4),
        StateSegment(1, 8, NO_STATE_SLOT, 7),
        StateSegment(1, 2, 7, 2),
        StateSegment(2, 1, 5, 3),
    )
    plan = build_state_plan(StepPlan(0, rows, [], state_segments=segments))
    assert NO_STATE_SLOT == NO_SLOT
    expected = [[0, 1, 4, 4], [1, 8, NO_SLOT, 7], [9, 2, 7, 2], [11, 1, 5, 3]]
    assert plan.segments.tolist() == expected
    assert plan.groups.tolist() == [0, 1, 3, 4]
    assert plan.segments.dtype == plan.groups.dtype == torch.int32
    assert plan.segments.is_contiguous()
