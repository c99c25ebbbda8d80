"""Where everything of a comparison lies, and how its commands are run.

Owns the layout of the work folder and the logs. Knows nothing of peers.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The project's, from where modules of benchmarks/ run in any environment."""
OURS = "gllm"
"""The environment that this process runs in."""
END_SECONDS = 20.0
"""That a process gets to end after SIGTERM."""
LOG_LINES = 3
"""Of a log's end, told with an error."""


class PeerError(Exception):
    """A peer cannot be installed, started or asked; the message says why."""


@dataclass(frozen=True)
class Workplace:
    """The work folder, and what all peers are given."""

    folder: Path
    threads: int
    kv_bytes: int
    """KV cache of each."""
    llama_bin: Path | None = None
    """Folder with llama.cpp's binaries; None: built in the work folder."""

    @property
    def model(self) -> Path:
        """The model's Hugging Face folder."""
        return self.folder / "model"

    def environment(self, name: str) -> Path:
        """A virtual environment's folder."""
        return self.folder / name

    def python(self, name: str) -> Path:
        """The interpreter of an environment."""
        return Path(sys.executable) if name == OURS else self.environment(name) / "bin" / "python"

    def log(self, name: str) -> Path:
        """A log file; its folder is made."""
        folder = self.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"


def variables(python: Path, more: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a command: its interpreter's tools come first."""
    path = f"{python.parent}:{os.environ.get('PATH', '')}"
    return os.environ | {"PATH": path, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"} | dict(more)


def run(
    command: Sequence[object],
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> None:
    """Run a command to its end, its output appended to a log. Raises PeerError where it fails."""
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
    """A process with an empty log; it and all that it started are ended with the block.

    Raises PeerError where the command does not run.
    """
    words = [str(word) for word in command]
    with log.open("wb") as out:
        try:
            # A session of its own: a process group to end, and no Ctrl-C from the terminal.
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
    """The end of a log, and where to read the rest."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    # Lines without a letter underline the one above.
    told = [line.strip() for line in lines if re.search("[a-z]", line) and "WARNING" not in line]
    return " / ".join(line[:200] for line in told[-LOG_LINES:]) + f" (all of it: {log})"
