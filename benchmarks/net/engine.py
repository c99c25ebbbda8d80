"""An engine whose stages run on the machines of a rig, one stage each."""

import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import STDOUT, Popen, TimeoutExpired
from typing import Any, Self

from benchmarks.net.rig import NamespaceRig
from gllm.runtime.messaging.security import create_secret_file

HTTP_PORT, HEAD_PORT = 8000, 29600
"""Ports, which nobody else uses in namespaces."""
START_SECONDS, STOP_SECONDS, POLL_SECONDS = 120.0, 10.0, 0.1
LOG_CHARACTERS = 3000
"""End of a process's log in an error message."""


class RigEngine:
    """`gllm serve` on each machine of a rig, from entering the context to leaving it.

    Machine 0 is the head's. Clients have to be inside that machine (`rig.inside(0)`).

    Args:
        rig: one machine per stage.
        model: folder of the model.
        folder: for the logs and the node secret.
        flags: of `gllm serve`, in addition to those that connect the machines.
    """

    def __init__(self, rig: NamespaceRig, model: Path, folder: Path, flags: Sequence[str]) -> None:
        self.url = f"http://127.0.0.1:{HTTP_PORT}"
        self.step_log = folder / "steps.jsonl"
        """Step log of the driver."""
        self._rig, self._folder = rig, folder
        self._flags = ["--log-level", "warning", *flags]
        self._command = [sys.executable, "-m", "gllm.serve", str(model)]
        self._processes: list[Popen[Any]] = []

    def __enter__(self) -> Self:
        secret = self._folder / "secret"
        create_secret_file(secret)
        count = len(self._rig.addresses)
        shared = ["--pp", str(count), "--nnodes", str(count), "--node-secret-file", str(secret)]
        shared += ["--master-addr", f"{self._rig.addresses[0]}:{HEAD_PORT}"]
        try:
            for rank in range(count):
                own = ["--node-rank", str(rank), "--node-name", f"machine-{rank}"]
                own += ["--port", str(HTTP_PORT)]
                own += ["--step-log", str(self.step_log)] if rank == 0 else []
                with self._log(rank).open("wb") as log:
                    command = [*self._command, *shared, *own, *self._flags]
                    process = self._rig.popen(rank, command, stdout=log, stderr=STDOUT)
                self._processes.append(process)
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def read_logs(self) -> str:
        """Return the end of each machine's log."""
        texts = [self._log(rank).read_text()[-LOG_CHARACTERS:] for rank in range(self._num_started)]
        return "\n".join(f"machine {rank}: {text}" for rank, text in enumerate(texts))

    @property
    def _num_started(self) -> int:
        return len(self._processes)

    def _log(self, rank: int) -> Path:
        return self._folder / f"machine-{rank}.log"

    def _wait_until_ready(self) -> None:
        """Wait until the engine answers.

        Raises:
            RuntimeError: a process has ended; the message is the end of the logs.
            TimeoutError: START_SECONDS are over.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"the engine has ended: {self.read_logs()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine is not ready: {self.read_logs()}")
            time.sleep(POLL_SECONDS)

    def _is_ready(self) -> bool:
        with self._rig.inside(0):
            try:
                urllib.request.urlopen(f"{self.url}/ready", timeout=START_SECONDS).close()
            except OSError:  # An HTTPError too.
                return False
        return True

    def _stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes:
            with suppress(TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()
            process.wait()
