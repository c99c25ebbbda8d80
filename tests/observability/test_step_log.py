"""The step log as a file over the epochs of an engine."""

import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gllm.observability.step_log import (
    AbortEvent,
    AddEvent,
    RestartEvent,
    StartEvent,
    StepLogError,
    StepLogEvent,
    StepLogWriter,
    continue_step_log,
    read_step_log,
    split_epochs,
)
from gllm.scheduler.config import SchedulerConfig

CONFIG = SchedulerConfig().resolve(2, 100, 100)
START = StartEvent(1.0, "m", [1, 1], CONFIG, "driver", warm_ups=1)
RESTART = RestartEvent(
    9.0, 2, "stage 1 was killed", 3, [2, 0], SchedulerConfig().resolve(2, 50, 100), 1
)


def add(seq: int, prompt: int = 3) -> AddEvent:
    return AddEvent(2.0 + seq, seq, [5] * prompt, 4)


def test_the_first_driver_starts_the_log_and_later_ones_restart_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    for seq in range(3):
        log = continue_step_log(path, START, RESTART)
        log.write(add(seq))
        log.close()
    assert list(read_step_log(path)) == [START, add(0), RESTART, add(1), RESTART, add(2)]


def test_epochs_know_their_ranks(tmp_path: Path) -> None:
    """Each has its own; a file of earlier versions says nothing of them."""
    path = tmp_path / "log"
    start, restart = replace(START, degrees=[2, 1]), replace(RESTART, degrees=[1, 2])
    log = StepLogWriter(path)
    for event in (start, restart, RESTART):
        log.write(event)
    log.close()
    heads = [events[0] for events in split_epochs(read_step_log(path))]
    assert [isinstance(head, StartEvent) and head.degrees for head in heads] == [[2, 1], [1, 2], []]
    path.write_bytes(path.read_bytes().replace(b',"degrees":[2,1]', b""))
    assert next(iter(read_step_log(path))) == START


@given(cut=st.integers(0, 2000), last_prompt=st.integers(1, 300))
def test_a_killed_driver_s_last_line_is_removed(
    tmp_path_factory: pytest.TempPathFactory, cut: int, last_prompt: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "log"
    events: list[StepLogEvent] = [START, add(0), add(1), add(2, last_prompt)]
    log = StepLogWriter(path)
    for event in events:
        log.write(event)
    log.close()
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    continued = continue_step_log(path, START, RESTART, buffer_bytes=64)
    continued.write(add(3))
    continued.close()
    whole = events[: data.count(b"\n")]
    expected = [*whole, RESTART, add(3)] if whole else [START, add(3)]
    assert list(read_step_log(path)) == expected


def test_a_log_begins_with_a_start(tmp_path: Path) -> None:
    log = StepLogWriter(tmp_path / "log")
    log.write(RESTART)
    log.close()
    with pytest.raises(StepLogError, match="one start, as line 1"):
        list(read_step_log(tmp_path / "log"))


def test_each_epoch_is_a_log_of_its_own() -> None:
    abort = AbortEvent(3.0, [0])
    assert split_epochs([START, add(0)]) == [[START, add(0)]]
    first, second, third = split_epochs([START, add(0), abort, RESTART, RESTART, add(1), add(2)])
    assert first == [START, add(0), abort]
    start = StartEvent(9.0, "m", [2, 0], RESTART.scheduler, "driver", warm_ups=1)
    assert second == [start]
    assert third == [start, add(1), add(2)]


FULL = Path("/dev/full")
"""A device without space: each write to it fails."""


def test_a_driver_whose_log_finds_no_space_warns_once_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = continue_step_log(FULL, START, RESTART)
    for seq in range(2000):
        log.write(add(seq, 100))
        log.flush()
    log.close()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("the step log /dev/full ends")
    assert "No space left on device" in warning


def test_a_disk_that_becomes_full_ends_the_log_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, limits = tmp_path / "log", resource.getrlimit(resource.RLIMIT_FSIZE)
    log = continue_step_log(path, START, RESTART)
    log.write(add(0))
    log.flush()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
        for seq in range(1, 9):
            log.write(add(seq, 10_000))
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.records) == 1
    assert list(read_step_log(path)) == [START, add(0)]
    # The next epoch has space again.
    log = continue_step_log(path, START, RESTART)
    log.close()
    assert list(read_step_log(path)) == [START, add(0), RESTART]


def test_a_log_that_cannot_be_opened_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = continue_step_log(tmp_path / "nowhere" / "log", START, RESTART)
    log.write(add(0))
    log.flush()
    log.close()
    assert "No such file or directory" in caplog.text


def test_the_writer_of_a_simulation_raises() -> None:
    log = StepLogWriter(FULL)
    log.write(START)
    with pytest.raises(OSError, match="No space left"):
        log.flush()
    with pytest.raises(OSError, match="No space left"):
        log.close()
