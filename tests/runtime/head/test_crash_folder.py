"""Private folders with evidence: removed at the end, or by the next process after a kill."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gllm.runtime.head.deaths import CrashFolder

PROCESS = """
import os, signal, sys
from pathlib import Path
from gllm.runtime.head.deaths import CrashFolder

crashes = CrashFolder(None, Path(sys.argv[1]))
print(crashes.record("stage-1", {"Cause": "it died"}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def begin(temporary: Path) -> tuple[CrashFolder, Path]:
    """A private folder with one file, and its path."""
    crashes = CrashFolder(None, temporary)
    file = crashes.record("stage-1", {"Cause": "it died"})
    assert file is not None
    assert "it died" in file.read_text()
    return crashes, file.parent


def folder_of_a_killed_process(temporary: Path) -> Path:
    """A private folder with one file, whose process was killed."""
    command = [sys.executable, "-c", PROCESS, str(temporary)]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = Path(killed.stdout.strip()).parent
    assert folder.parent == temporary
    return folder


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    living, other = begin(tmp_path)
    folder = folder_of_a_killed_process(tmp_path)
    CrashFolder(str(tmp_path / "configured"), tmp_path)
    assert folder.exists()
    last = CrashFolder(None, tmp_path)
    assert not folder.exists()
    assert other.exists(), "its process lives"
    living.close(keeps_files=False)
    last.close(keeps_files=False)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_kept_is_nobody_elses(tmp_path: Path) -> None:
    crashes, folder = begin(tmp_path)
    assert crashes.close(keeps_files=True) == folder
    CrashFolder(None, tmp_path)
    assert [file.name for file in folder.iterdir()] == [f"crash-{os.getpid()}-0001-stage-1.txt"]


def test_what_others_put_there_is_left_alone(tmp_path: Path) -> None:
    folder = folder_of_a_killed_process(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    (tmp_path / "gllm-crashes-link").symlink_to(elsewhere)
    (tmp_path / "gllm-crashes-file").touch()
    pipe = tmp_path / "gllm-crashes-pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "other")
    (pipe / ".lock").symlink_to(elsewhere / ".lock")
    CrashFolder(None, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert len(list(elsewhere.iterdir())) == 2


def test_a_full_disk_is_warned_of_once_and_leaves_no_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, limits = CrashFolder(str(tmp_path)), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        reports = [folder.record("stage-1", {"Cause": "a" * 100}) for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert reports == [None] * 3
    assert not list(tmp_path.iterdir())
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"crash reports cannot be written to {tmp_path}: ")
    assert folder.record("stage-1", {"Cause": "killed"}) is not None
