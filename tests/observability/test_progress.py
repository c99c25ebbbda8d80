"""Progress of commands: lines where standard error is no terminal, a bar where it is one."""

import io
from contextlib import redirect_stderr

import pytest

from experiments.parallel import map_parallel
from gllm.observability.progress import (
    MAX_SECONDS,
    MIN_SECONDS,
    ProgressLines,
    show_progress,
    throttle,
)


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines_after_each_tenth_of_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    lines = ProgressLines("profile", 200, lambda: now)
    for _ in range(200):
        now += 1.0
        lines.update()
    printed = capsys.readouterr().err.splitlines()
    assert printed[:2] == ["profile: 20 of 200, 20 s", "profile: 40 of 200, 40 s"]
    assert printed[-1] == "profile: 200 of 200, 200 s"
    assert len(printed) == 10


def test_fast_work_prints_nothing_and_slow_work_a_line_per_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    with ProgressLines("fast", 4, lambda: now) as lines:
        for _ in range(4):
            now += 0.2 * MIN_SECONDS
            lines.update()
    assert capsys.readouterr().err == ""
    with ProgressLines("slow", None, lambda: now) as lines:
        for _ in range(5):
            now += 0.5 * MAX_SECONDS
            lines.update(3)
    assert capsys.readouterr().err == "slow: 6, 60 s\nslow: 12, 120 s\n"


def test_total_may_be_set_later(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = ProgressLines("profile", None, lambda: now)
    lines.total = 8
    now = MIN_SECONDS
    lines.update()
    assert capsys.readouterr().err == "profile: 1 of 8, 10 s\n"


def test_terminal_gets_a_bar() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal):
        assert map_parallel(abs, [-1, -2], 1, unit="search") == [1, 2]
        assert "100%" in terminal.getvalue()
        assert "2/2" in terminal.getvalue()
        with show_progress("search", 2, is_shown=False) as bar:
            bar.update()
    assert terminal.getvalue().count("0/2") == 1


def test_a_line_shows_that_time_passes_while_no_unit_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    lines = ProgressLines("simulated", None, lambda: now)
    for _ in range(25):
        now += 0.1 * MIN_SECONDS
        lines.refresh()
    assert capsys.readouterr().err == "simulated: 0, 10 s\nsimulated: 0, 20 s\n"


def test_frequent_calls_are_throttled() -> None:
    now = 0.0
    times: list[float] = []
    call = throttle(lambda: times.append(now), 2.0, lambda: now)
    for _ in range(9):
        call()
        now += 0.5
    assert times == [0.0, 2.0, 4.0]
