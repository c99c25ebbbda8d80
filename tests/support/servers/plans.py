"""`gllm up plan.yaml` in a process of its own, as a user starts it."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gllm.plan.serving_plan import ServingPlan, write_plan
from tests.support.servers.nodes import descendants
from tests.support.servers.server import DEADLINE, alive, end_with_the_tests, wait_until


class UpProcess:
    """`gllm up PLAN FLAGS`; its output is in files, so that nobody has to read it."""

    def __init__(self, plan: Path, folder: Path, *flags: str, name: str = "up") -> None:
        self.output = folder / f"{name}.out"
        self.log_path = folder / f"{name}.log"
        with self.output.open("wb") as output, self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gllm", "up", str(plan), *flags],
                stdout=output,
                stderr=log,
                preexec_fn=end_with_the_tests(),
            )

    @property
    def log(self) -> str:
        """All lines of the processes, and of the command itself."""
        return self.log_path.read_text()

    def wait_until_ready(self) -> None:
        """Wait until the command says so. Fails if it ends."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log[-3000:]
            return "ready" in self.output.read_text()

        wait_until(is_ready)

    def terminate(self) -> int:
        """Let it end as a user does; the exit status. No process is left."""
        pids = self.pids()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(DEADLINE)
        wait_until(lambda: not any(map(alive, pids)))
        return status

    def pids(self) -> list[int]:
        """The processes that live."""
        return [pid for pid in descendants(self.process.pid) if alive(pid)]

    def close(self) -> None:
        """Kill all processes that still run."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running_up(plan: ServingPlan, folder: Path, *flags: str) -> Iterator[UpProcess]:
    """The processes of a plan, not yet ready."""
    path = folder / "plan.yaml"
    write_plan(plan, path)
    process = UpProcess(path, folder, *flags)
    try:
        yield process
    finally:
        process.close()


def complete(url: str, prompt: str, num_tokens: int = 12) -> Any:
    """The answer of a completion."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        return json.load(answer)
