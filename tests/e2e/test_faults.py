"""What becomes of a server when its parts are killed, stopped, or told to end."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.server import DEADLINE, Server, alive, serving, wait_until

LONG = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True}
"""About 500 steps: it is still running when a test acts."""
SLOW = ["--pp", "2", "--debug-step-seconds", "0.01"]
"""Two stages, whose LONG takes five seconds or longer on any machine."""
PATIENT = ["--health-timeout", "600", "--freeze-timeout", "600"]
"""Time-outs longer than a test: what is noticed is a death itself, not the silence after it."""


class Streaming:
    """A long streamed request on a thread of its own."""

    def __init__(self, server: Server, *, has_begun: bool = True) -> None:
        """Start the request and wait for its first event, if there is to be one."""
        self.events: list[dict[str, Any]] = []
        self.ended = 0.0
        self._server = server
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if has_begun:
            wait_until(lambda: self.events)

    def _run(self) -> None:
        try:
            for event in self._server.stream("/v1/completions", LONG):
                self.events.append(event)
        except OSError:
            pass
        self.ended = time.monotonic()

    def join(self) -> dict[str, Any]:
        """The last event, once the stream has ended."""
        self._thread.join(DEADLINE)
        assert self.ended
        return self.events[-1]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder that no other process writes to."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def places() -> set[Path]:
    """All that a run may leave outside its processes, and what others have there."""
    return {*Path("/dev/shm").glob("*"), *Path(os.environ["TMPDIR"]).glob("gllm-*")}


def maps(pid: str) -> str:
    """Files that a process has mapped; nothing of a process that has ended."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def leftovers(before: set[Path]) -> set[Path]:
    """Files added since, without those of processes that live: other servers may run."""
    if not (added := places() - before):
        return set()
    mapped = "".join(maps(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {path for path in added & places() if str(path) not in mapped}


@pytest.mark.parametrize("victim", [0, 1], ids=["driver", "last stage"])
def test_a_killed_worker_ends_the_server_with_its_cause(tiny_model: Path, victim: int) -> None:
    before = places()
    with serving(tiny_model, *SLOW, *PATIENT, "--max-restarts", "0") as server:
        request = Streaming(server)
        workers = server.workers()
        killed = time.monotonic()
        os.kill(workers[victim], signal.SIGKILL)
        wait_until(lambda: server.status("/health") == 503)
        last = request.join()
        assert server.post("/v1/completions", LONG)[0] == 503
        code, errors = server.end()
        lived = time.monotonic() - killed
    assert f"stage {victim}" in last["error"]["message"]
    assert "SIGKILL" in last["error"]["message"]
    assert lived > 4.5, "it answers 503 for five seconds"
    assert code == 1
    causes = [line for line in errors.splitlines() if line.startswith("ERROR")]
    assert len(causes) == 1
    assert f"stage {victim}" in causes[0]
    assert "SIGKILL" in causes[0]
    assert not any(alive(pid) for pid in workers)
    assert not leftovers(before)


def test_workers_die_with_their_parent(tiny_model: Path) -> None:
    before = places()
    with serving(tiny_model, *SLOW, *PATIENT) as server:
        Streaming(server)
        workers = server.workers()
        server.process.kill()
        wait_until(lambda: not any(alive(pid) for pid in workers))
    assert not leftovers(before)


def test_a_stopped_worker_makes_the_server_unhealthy(tiny_model: Path) -> None:
    timeout = 1.0
    flags = [*PATIENT, "--health-timeout", str(timeout)]
    with serving(tiny_model, "--pp", "2", *flags) as server:
        worker = server.workers()[1]
        request = Streaming(server)
        os.kill(worker, signal.SIGSTOP)
        wait_until(lambda: server.status("/health") == 503)
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: server.status("/health") == 200)
        assert request.join()["choices"][0]["finish_reason"] == "length"
        os.kill(worker, signal.SIGSTOP)
        begin = time.monotonic()
        request = Streaming(server, has_begun=False)
        wait_until(lambda: server.status("/health") == 503)
        assert time.monotonic() - begin >= timeout
        os.kill(worker, signal.SIGCONT)
        assert request.join()["choices"][0]["finish_reason"] == "length"


def test_sigterm_drains(tiny_model: Path) -> None:
    before = places()
    with serving(tiny_model, "--pp", "2", "--shutdown-timeout", "300") as server:
        request = Streaming(server)
        workers = server.workers()
        server.process.terminate()
        wait_until(lambda: server.status("/ready") != 200)
        code, _ = server.end()
        assert request.join()["choices"][0]["finish_reason"] == "length"
    assert code == 0
    assert not any(alive(pid) for pid in workers)
    assert not leftovers(before)


def test_drain_has_an_end(tiny_model: Path) -> None:
    with serving(tiny_model, *SLOW, "--shutdown-timeout", "0.2") as server:
        request = Streaming(server)
        os.kill(server.workers()[1], signal.SIGSTOP)
        server.process.terminate()
        code, _ = server.end()
        assert "error" in request.join()
    assert code == 0


def test_a_second_signal_ends_at_once(tiny_model: Path) -> None:
    with serving(tiny_model, *SLOW, "--shutdown-timeout", "300") as server:
        Streaming(server)
        workers = server.workers()
        os.kill(workers[0], signal.SIGSTOP)
        server.process.terminate()
        wait_until(lambda: server.status("/ready") != 200)
        server.process.terminate()
        server.end()
        wait_until(lambda: not any(alive(pid) for pid in workers))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--pp", "9"], "only 4 layers"),
        (["--layers", "1,1"], "layers"),
        (["--max-model-len", "100000"], "context is 512"),
        (["--kv-cache-memory", "64KiB"], "raise --kv-cache-memory"),
        (["--policy", "throttle", "--kv-threshold", "1.5"], "--kv-threshold"),
    ],
)
def test_a_configuration_that_cannot_be(tiny_model: Path, flags: list[str], reason: str) -> None:
    server = Server(str(tiny_model), *flags)
    code, errors = server.end()
    assert code == 2
    assert reason in errors
    assert "Traceback" not in errors


def test_a_broken_checkpoint_says_so(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").unlink()
    code, errors = Server(str(tmp_path)).end()
    assert code == 1
    assert "safetensors" in errors
    assert "Traceback" not in errors


def test_a_model_that_is_not_here() -> None:
    code, errors = Server("./no/such/model").end()
    assert (code, "Traceback" in errors) == (2, False)
    assert "check the path" in errors
