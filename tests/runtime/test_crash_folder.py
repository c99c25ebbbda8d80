"""Private folders with evidence: removed at the end, or by the next process after a kill."""

import os
from pathlib import Path

import pytest

from gllm.runtime.crash_folder import CrashFolder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def begin() -> tuple[CrashFolder, Path]:
    """A private folder with one file, and its path."""
    crashes = CrashFolder(None)
    file = crashes.record("stage-1", {"Cause": "it died"})
    assert file is not None
    assert "it died" in file.read_text()
    return crashes, file.parent


def kill(crashes: CrashFolder) -> None:
    """Do what the kernel does at the death of the process that has a folder."""
    assert crashes._lock is not None
    os.close(crashes._lock)


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(temporary: Path) -> None:
    crashes, folder = begin()
    living, other = begin()
    kill(crashes)
    CrashFolder(str(temporary / "configured"))
    assert folder.exists()
    last = CrashFolder(None)
    assert not folder.exists()
    assert other.exists(), "its process lives"
    living.close(keeps_files=False)
    last.close(keeps_files=False)
    assert not list(temporary.iterdir())


def test_a_folder_that_is_kept_is_nobody_elses() -> None:
    crashes, folder = begin()
    assert crashes.close(keeps_files=True) == folder
    CrashFolder(None)
    assert [file.name for file in folder.iterdir()] == [f"crash-{os.getpid()}-0001-stage-1.txt"]


def test_what_others_put_there_is_left_alone(temporary: Path) -> None:
    crashes, folder = begin()
    kill(crashes)
    elsewhere = temporary / "elsewhere"
    folder.rename(elsewhere)
    (temporary / "gllm-crashes-link").symlink_to(elsewhere)
    (temporary / "gllm-crashes-file").touch()
    pipe = temporary / "gllm-crashes-pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "other")
    (pipe / ".lock").symlink_to(elsewhere / ".lock")
    CrashFolder(None)
    assert len(list(temporary.iterdir())) == 4
    assert len(list(elsewhere.iterdir())) == 2
