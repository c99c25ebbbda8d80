"""Unexpected ends of workers: causes in words, counters of recoveries, and crash reports."""

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gllm.messages.lifecycle import Heartbeat
from gllm.recovery.phase_times import RecoveryPhase
from gllm.recovery.placement import RankName

log = logging.getLogger(__name__)


class EngineError(Exception):
    """The engine could not start, or has ended after a failure; the message has the cause."""


MAX_CRASHES = 10
"""Number of crash reports in the folder; older ones are removed."""


KERNEL_LOG = Path("/dev/kmsg")
"""Log of the kernel; readable by root, or by everyone if kernel.dmesg_restrict is 0."""


MAX_KERNEL_LINES = 5
"""Lines of the kernel's log in a file, the last ones."""


_PREFIX = "gllm-crashes-"
"""Beginning of the names of private folders."""


_LOCK = ".lock"
"""File in a private folder that its process has locked as long as it lives; none in a folder that
is kept."""


_MEMORY_MARKS = ("Out of memory", "oom-kill", "oom_reaper", "Killed process")
"""Parts of the lines that the kernel logs when it kills a process for its memory."""


_RECORD_BYTES = 8192
"""Size limit of one record of the kernel's log."""


@dataclass(frozen=True)
class WorkerDeath:
    """Unexpected end of a worker that ran a stage: kind, cause, time, stacks of its threads."""

    sender: int
    place: RankName
    """Stage, rank and machine of the worker."""
    kind: str
    """killed, failed, frozen or lost."""
    cause: str
    """Complete description, which names the stage and rank."""
    time: float
    """Time at which it was noticed; time.monotonic()."""
    stacks: str = ""
    """Stacks of the process's threads, if it wrote any."""


class DeathLog:
    """Counts recoveries by cause, and writes a crash report for each unexpected end of a worker."""

    def __init__(self, crash_folder: str | None) -> None:
        self.recoveries: Counter[str] = Counter()
        """Recoveries that have begun, by kind of death."""
        self.recovery_seconds: list[float] = []
        """Pauses of the recoveries that have ended."""
        self.phase_seconds: dict[str, float] = {}
        """Sums of the durations of their phases; see `RecoveryPhase`."""
        self.cause = ""
        """Cause of the running recovery, or of the last one."""
        self.heartbeats: dict[int, Heartbeat] = {}
        """Latest heartbeat by sender."""
        self._crashes = CrashFolder(crash_folder)

    def begin_recovery(self, kind: str, cause: str) -> None:
        """Count a death, a loss or a planned change that ends an epoch which was ready.

        Args:
            kind: of the death; `node` for the loss of a node, `link` for that of its connections;
                rebalanced, drained or joined for a planned change.
            cause: complete description.
        """
        self.recoveries[kind] += 1
        self.cause = cause

    def end_recovery(self, since: float, phases: Mapping[RecoveryPhase, float]) -> float:
        """Record that the engine is ready again; return the duration of the recovery in seconds.

        Args:
            since: time of the death; time.monotonic().
            phases: seconds of each phase.
        """
        seconds = time.monotonic() - since
        self.recovery_seconds.append(seconds)
        for phase, duration in phases.items():
            self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + duration
        return seconds

    def keep_evidence(
        self, death: WorkerDeath, epoch: int, num_requests: int, suspects: Collection[int]
    ) -> Path | None:
        """Write a crash report about a worker; return its path, None if it cannot be written.

        Args:
            death: kind, cause and stacks of the worker's end.
            epoch: number of the epoch that it ended.
            num_requests: requests in the engine.
            suspects: ids of the sequences with rows in uncommitted plans.
        """
        heartbeat = self.heartbeats.pop(death.sender, None)
        try:
            sections = {
                "Cause": f"{death.cause}\nkind: {death.kind}, epoch {epoch}",
                "Requests": f"{num_requests} in the engine; sequences in uncommitted plans: "
                f"{', '.join(map(str, sorted(suspects))) or 'none'}",
                "Last heartbeat": "" if heartbeat is None else str(heartbeat),
                "Stacks": death.stacks,
                "Kernel log": read_memory_kills(),
            }
            return self._crashes.record(f"stage-{death.place.label}", sections)
        except Exception:
            # The recovery has begun, and nothing else would execute its actions.
            log.exception("the evidence of a death could not be kept")
            return None

    def close(self, has_given_up: bool) -> None:
        """Remove the crash reports, unless a folder was configured or the engine gave up."""
        folder = self._crashes.close(has_given_up)
        if has_given_up and folder is not None:
            log.error("evidence of the deaths of workers: %s", folder)


class CrashFolder:
    """Folder with the crash reports of the last workers that ended unexpectedly.

    Without a path it is a private folder under the system's temporary folder, which exists from the
    first crash on. Private folders of processes that were killed are removed.
    """

    def __init__(self, path: str | None, temporary: Path | None = None) -> None:
        """Create a folder without evidence.

        Args:
            path: None for a private folder.
            temporary: folder of private folders; None for the system's temporary folder.
        """
        self._temporary = temporary
        if path is None:
            remove_abandoned_folders(temporary)
        self._is_private = path is None
        self._path = None if path is None else Path(path)
        self._lock: int | None = None
        """Descriptor of the lock of the private folder."""
        self._num_crashes = 0
        self._has_warned = False
        """True once a warning has said that reports cannot be written."""
        self._files: list[Path] = []

    def record(self, subject: str, sections: dict[str, str]) -> Path | None:
        """Write a crash report.

        Args:
            subject: part of the file's name, such as `stage-1`.
            sections: title and text of each section; empty ones are left out.

        Returns:
            The file; None if it cannot be written.
        """
        self._num_crashes += 1
        name = f"crash-{os.getpid()}-{self._num_crashes:04d}-{subject}.txt"
        text = time.strftime("%Y-%m-%d %H:%M:%S %z\n")
        for title, section in sections.items():
            if section:
                text += f"\n{title}\n{'-' * len(title)}\n{section.rstrip()}\n"
        try:
            if self._path is None:
                self._path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._temporary))
                self._lock = _lock_folder(self._path)
            self._path.mkdir(parents=True, exist_ok=True)
            file = self._path / name
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            # A full disk has space for a part of it.
            if self._path is not None:
                with suppress(OSError):
                    (self._path / name).unlink(missing_ok=True)
            if not self._has_warned:
                self._has_warned = True
                folder = self._path or "a temporary folder"
                log.warning("crash reports cannot be written to %s: %s", folder, error.strerror)
            return None
        self._files.append(file)
        while len(self._files) > MAX_CRASHES:
            with suppress(OSError):
                self._files.pop(0).unlink()
        return file

    def close(self, keeps_files: bool) -> Path | None:
        """Remove a private folder unless `keeps_files` is set.

        Return the folder if it still exists.
        """
        if self._is_private and self._path is not None:
            if keeps_files:
                (self._path / _LOCK).unlink(missing_ok=True)
            else:
                shutil.rmtree(self._path, ignore_errors=True)
                self._path = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        return self._path if self._files else None


def remove_abandoned_folders(temporary: Path | None = None) -> None:
    """Remove the crash folders that killed processes of this user left in the temporary folder.

    Args:
        temporary: folder to search; None for the system's temporary folder.
    """
    with suppress(OSError):
        for folder in (temporary or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
            with suppress(OSError):
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a private folder if nobody holds its lock.

    Raises:
        OSError: it is in use, or kept, or cannot be read.
    """
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _lock_folder(folder: Path) -> int:
    """Create and lock the lock file of a new folder; return its descriptor.

    Raises:
        OSError: it cannot be created.
    """
    unlocked = folder / f"{_LOCK}.new"
    lock = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It gets its name when it is locked, so that nobody can lock it first.
        unlocked.rename(folder / _LOCK)
    except BaseException:
        os.close(lock)
        raise
    return lock


def read_memory_kills(path: Path = KERNEL_LOG) -> str:
    """Return the last lines of the kernel's log about processes killed by the out-of-memory killer.

    The text is empty if there are none, or if this process may not read the log.
    """
    lines: list[str] = []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        # One read returns one record; it raises BlockingIOError after the last one.
        with suppress(OSError):
            while record := os.read(descriptor, _RECORD_BYTES):
                text = record.decode("utf-8", "replace")
                lines += [
                    line
                    for line in text.splitlines()
                    if any(mark in line for mark in _MEMORY_MARKS)
                ]
    finally:
        os.close(descriptor)
    return "\n".join(lines[-MAX_KERNEL_LINES:])
