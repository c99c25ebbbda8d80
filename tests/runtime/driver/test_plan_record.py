"""The record of uncommitted plans, read after its writer was killed at any moment."""

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gllm.runtime.driver.plan_record import PlanRecord, read_uncommitted
from gllm.scheduler.plan import ScheduledRow, StepPlan

MAX_IN_FLIGHT, MAX_ROWS = 4, 200


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("test-plans")
    yield descriptor
    os.close(descriptor)


def plan_of(step: int, seqs: list[int], lane: int = 0, num_other_steps: int = 0) -> StepPlan:
    rows = [ScheduledRow(seq, 0, 5, 1, [], [7], True) for seq in seqs]
    return StepPlan(step, rows, [], lane, num_other_steps)


def test_rows_are_recorded_from_the_plan_to_the_commit(descriptor: int) -> None:
    assert read_uncommitted(descriptor) == set()
    record = PlanRecord(descriptor, 2, MAX_ROWS)
    assert read_uncommitted(descriptor) == set()
    record.on_scheduled(plan_of(0, [1, 2]))
    record.on_scheduled(plan_of(1, [3, 2**40]))
    assert read_uncommitted(descriptor) == {1, 2, 3, 2**40}
    record.on_committed(0)
    assert read_uncommitted(descriptor) == {3, 2**40}
    record.on_scheduled(plan_of(2, [4]))
    record.on_committed(1)
    assert read_uncommitted(descriptor) == {4}
    record.close()
    assert read_uncommitted(descriptor) == {4}, "it outlives the writer"


def test_a_step_that_is_overtaken_keeps_its_slot(descriptor: int) -> None:
    record = PlanRecord(descriptor, 2, MAX_ROWS, num_lanes=2)
    prefills = [plan_of(step, [step], lane=1) for step in range(2)]
    for plan in prefills:
        record.on_scheduled(plan)
    record.on_held([99])
    for step in range(2, 20):
        record.on_scheduled(plan_of(step, [step], num_other_steps=2))
        assert read_uncommitted(descriptor) == {0, 1, step, 99}
        record.on_committed(step)
    record.on_committed(0)
    record.on_scheduled(plan_of(20, [20], lane=1, num_other_steps=18))
    assert read_uncommitted(descriptor) == {1, 20, 99}


def test_held_requests_are_recorded_beside_the_plans(descriptor: int) -> None:
    record = PlanRecord(descriptor, 2, 3)
    record.on_held([7, 8])
    for step in range(5):
        record.on_scheduled(plan_of(step, [step]))
        assert read_uncommitted(descriptor) == {7, 8, step}
        record.on_committed(step)
    record.on_held([8, 10, 11, 12])
    assert read_uncommitted(descriptor) == {8, 10, 11}
    record.on_held([])
    assert read_uncommitted(descriptor) == set()


def test_rows_beyond_the_slot_are_left_out(descriptor: int) -> None:
    record = PlanRecord(descriptor, 2, 3)
    record.on_scheduled(plan_of(0, [1, 2, 3, 4, 5]))
    record.on_scheduled(plan_of(1, [6]))
    assert read_uncommitted(descriptor) == {1, 2, 3, 6}


@pytest.mark.parametrize("content", [b"", b"\xff" * 7, b"\xff" * 16, bytes(range(256)) * 16])
def test_a_file_of_anything_else_is_no_record(descriptor: int, content: bytes) -> None:
    os.write(descriptor, content)
    assert read_uncommitted(descriptor) == set()


def write_for_ever(descriptor: int, seed: int) -> None:
    """Plan and commit; all rows of a plan are equal modulo 1000, and slots differ in that."""
    rng = random.Random(seed)
    record = PlanRecord(descriptor, MAX_IN_FLIGHT, MAX_ROWS)
    for step in range(10**9):
        seqs = [1000 * i + step % 997 for i in range(rng.randint(1, MAX_ROWS))]
        record.on_scheduled(plan_of(step, seqs))
        if step >= MAX_IN_FLIGHT - 1:
            record.on_committed(step - MAX_IN_FLIGHT + 1)


@pytest.mark.parametrize("num_lives", [6, pytest.param(20, marks=pytest.mark.full)])
def test_a_writer_killed_in_the_middle_leaves_whole_plans(descriptor: int, num_lives: int) -> None:
    rng = random.Random(1)
    num_read = 0
    for seed in range(num_lives):
        os.ftruncate(descriptor, 0)
        child = os.fork()
        if not child:
            write_for_ever(descriptor, seed)
        while not (live := read_uncommitted(descriptor)):
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for seqs in (live, read_uncommitted(descriptor)):
            check_whole(seqs)
            num_read += bool(seqs)
    assert num_read > 1.5 * num_lives


def check_whole(seqs: set[int]) -> None:
    """Every plan has all rows from the first on, and there are few plans."""
    by_step: dict[int, list[int]] = {}
    for seq in seqs:
        by_step.setdefault(seq % 1000, []).append(seq // 1000)
    # A reader beside a living writer may meet slots of different moments.
    assert len(by_step) <= MAX_IN_FLIGHT
    for rows in by_step.values():
        assert sorted(rows) == list(range(len(rows)))


def test_a_slot_that_changes_is_read_again(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of a living writer's slot may be replaced between two reads."""
    from gllm.runtime.driver import plan_record

    class Words:
        """Memory whose slot gets another plan while its rows are read."""

        def __init__(self) -> None:
            self.numbers = iter([1, 5, 5, 5])

        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, slice):
                return memoryview(b"\x09").cast("B")
            return 1 if key == 1 else next(self.numbers)

    words: Any = Words()
    assert plan_record._read_slot(words, 0, MAX_ROWS) == [9]
    assert next(words.numbers, None) is None


def test_as_many_held_requests_are_read_as_are_recorded(descriptor: int) -> None:
    record, seqs = PlanRecord(descriptor, 2, MAX_ROWS), iter(range(10**6))
    record.on_held(seqs)
    assert read_uncommitted(descriptor) == set(range(MAX_ROWS))
    assert next(seqs) == MAX_ROWS, "the others cost no time"
    record.close()
