"""Work folder of a comparison: its layout, its logs, and how its commands run."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.cpu.model import DENSE

ROOT = Path(__file__).parents[2]
"""Root of the project, from which modules of benchmarks/ run in any environment."""
OURS = "gllm"
"""Name of the environment that this process runs in."""
END_SECONDS = 20.0
"""Seconds from SIGTERM to SIGKILL."""
LOG_LINES = 3
"""Lines of a log's end that an error quotes."""


class PeerError(Exception):
    """Error that a peer cannot be installed, started or queried; the message says why."""


@dataclass(frozen=True)
class Workplace:
    """The work folder and the settings that all peers share."""

    folder: Path
    threads: int
    kv_bytes: int
    """KV cache bytes of each peer."""
    llama_bin: Path | None = None
    """Folder of llama.cpp's binaries; None: built in the work folder."""
    shape: str = DENSE
    """Shape of the model, a key of SHAPES."""

    def with_shape(self, shape: str) -> Self:
        """Return the same workplace with a model of another shape."""
        return dataclasses.replace(self, shape=shape)

    @property
    def model(self) -> Path:
        """Path of the model's Hugging Face folder."""
        return self.folder / ("model" if self.shape == DENSE else f"model-{self.shape}")

    def environment(self, name: str) -> Path:
        """Return the folder of a virtual environment."""
        return self.folder / name

    def python(self, name: str) -> Path:
        """Return the interpreter of an environment."""
        return Path(sys.executable) if name == OURS else self.environment(name) / "bin" / "python"

    def log(self, name: str) -> Path:
        """Return the path of a log file and create its folder."""
        folder = self.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"


def variables(python: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a command; the interpreter's folder is first in PATH."""
    path = f"{python.parent}:{os.environ.get('PATH', '')}"
    return os.environ | {"PATH": path, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"} | dict(more)


def run(
    command: Sequence[object],
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> None:
    """Run a command to completion and append its output to a log.

    Raises:
        PeerError: The command does not run or fails.
    """
    words = [str(word) for word in command]
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(words)}\n")
        out.flush()
        try:
            done = subprocess.run(words, stdout=out, stderr=out, env=env, cwd=cwd, check=False)
        except OSError as error:
            raise PeerError(f"{words[0]} does not run: {error}") from None
    if done.returncode:
        raise PeerError(f"{Path(words[0]).name} failed ({done.returncode}): {tail(log)}")


@contextmanager
def background(
    command: Sequence[object], log: Path, env: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process with an empty log; stop it and its descendants at the end of the block.

    Raises:
        PeerError: The command does not run.
    """
    words = [str(word) for word in command]
    with log.open("wb") as out:
        try:
            # A new session: one process group to kill, and no Ctrl-C from the terminal.
            process = subprocess.Popen(
                words, stdout=out, stderr=out, env=env, cwd=ROOT, start_new_session=True
            )
        except OSError as error:
            raise PeerError(f"{words[0]} does not run: {error}") from None
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(log: Path) -> str:
    """Return the end of a log and its path."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    # A line without letters only underlines the line above it.
    messages = [
        line.strip() for line in lines if re.search("[a-z]", line) and "WARNING" not in line
    ]
    return " / ".join(line[:200] for line in messages[-LOG_LINES:]) + f" (all of it: {log})"
