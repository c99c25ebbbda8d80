"""Exits of child processes: as events, and in words."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gllm.observability.child_process import (
    IMPORT_FAILURE,
    ChildProcess,
    describe_exit,
    has_import_failure,
    module_command,
)
from gllm.observability.child_start import IMPORT_ERROR_STATUS

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def num_open() -> int:
    gc.collect()  # Descriptors of earlier tests.
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("status", "lines", "cause"),
    [
        (0, ["bye"], "it exited with 0"),
        (1, ["start", "gllm: no memory", " "], "it exited with 1: gllm: no memory"),
        (2, [], "it exited with 2"),
        (IMPORT_ERROR_STATUS, ["x"], f"it exited with {IMPORT_ERROR_STATUS}: {IMPORT_FAILURE}"),
        (-9, ["x"], "it was killed by SIGKILL"),
        (-99, ["x"], "it was killed by signal 99"),
    ],
)
def test_causes_of_exits(status: int, lines: list[str], cause: str) -> None:
    assert describe_exit(status, last_lines=lines) == cause
    assert describe_exit(status, "process 7", lines) == cause.replace("it", "process 7", 1)
    assert has_import_failure(cause) == (status == IMPORT_ERROR_STATUS)


def test_code_in_the_current_directory_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = [entry for entry in sys.path if entry not in ("", os.getcwd())]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "argparse.py").write_text("open('executed', 'w')\n")
    command = module_command("json.tool", "-h")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("entry", ["", "current"])
def test_a_child_imports_from_the_current_directory_if_its_parent_does(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = [item for item in sys.path if item]
    for before, after, is_safe in ((path, [], True), ([], path, False)):
        monkeypatch.setattr(sys, "path", [*before, entry and str(tmp_path), *after])
        assert module_command("m", "x") == [sys.executable, *["-P"] * is_safe, "-m", "m", "x"]


def test_a_deleted_current_directory_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert module_command("m")[1:] == ["-P", "-m", "m"]


async def test_an_exit_is_an_event_of_a_process_that_was_reaped() -> None:
    before = num_open()
    child = ChildProcess(SLEEP)
    exits: asyncio.Queue[int | None] = asyncio.Queue()
    child.watch(lambda: exits.put_nowait(0))
    child.watch(lambda: exits.put_nowait(child.returncode))
    child.kill()
    async with asyncio.timeout(60):
        assert await exits.get() == -signal.SIGKILL
        await child.exited()
    assert child.describe_exit("the child") == "the child was killed by SIGKILL"
    assert exits.empty()
    assert num_open() == before


async def test_an_exit_that_is_not_watched_any_more_is_no_event() -> None:
    before = num_open()
    child = ChildProcess(SLEEP)
    exits: list[None] = []
    child.watch(lambda: exits.append(None))
    child.unwatch()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(child.exited(), 0.01)
    child.kill()
    await child.exited()
    await asyncio.sleep(0)
    assert exits == []
    assert num_open() == before


def test_an_exit_may_be_watched_no_more_after_the_loop_has_ended() -> None:
    before = num_open()

    async def start() -> ChildProcess:
        child = ChildProcess(SLEEP)
        child.watch(lambda: pytest.fail("the loop has ended"))
        return child

    child = asyncio.run(start())
    child.kill()
    assert child.describe_exit() == "it was killed by SIGKILL"
    child.unwatch()
    assert num_open() == before
