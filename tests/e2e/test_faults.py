"""What becomes of a server when its parts are killed, stopped, or told to end."""

import http.client
import json
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gllm.frontend.server import DEAD_ANSWER_SECONDS
from tests.support.servers.residue import Residue
from tests.support.servers.server import DEADLINE, Server, alive, serving, stages, wait_until

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
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder that no other process writes to."""
    # Not below tmp_path: paths of sockets have at most 107 characters.
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))


@pytest.mark.full
def test_a_killed_worker_ends_the_server_with_its_cause(tiny_model: Path) -> None:
    with serving(tiny_model, *SLOW, *PATIENT, "--max-restarts", "0") as server:
        request = Streaming(server)
        residue, killed = Residue(server), time.monotonic()
        os.kill(stages(server.pid)[0], signal.SIGKILL)
        wait_until(lambda: server.status("/health") == 503)
        last = request.join()
        assert server.post("/v1/completions", LONG)[0] == 503
        code, errors = server.end()
        lived = time.monotonic() - killed
    assert "stage 0" in last["error"]["message"]
    assert "SIGKILL" in last["error"]["message"]
    assert lived > 0.9 * DEAD_ANSWER_SECONDS, "it answers 503 meanwhile"
    assert code == 1
    causes = [line for line in errors.splitlines() if line.startswith("ERROR")]
    assert len(causes) == 1
    assert "stage 0" in causes[0]
    assert "SIGKILL" in causes[0]
    wait_until(lambda: not residue.remains())


def test_workers_die_with_their_parent(tiny_model: Path) -> None:
    """A frontend that is killed leaves nothing behind."""
    with serving(tiny_model, *SLOW, *PATIENT) as server:
        Streaming(server)
        residue = Residue(server)
        server.process.kill()
        wait_until(lambda: not residue.remains())


@pytest.mark.full
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
    """What runs ends, connections that are kept are told, and nothing is left behind."""
    # On a busy machine the running request needs more than the default.
    with serving(tiny_model, "--pp", "2", "--shutdown-timeout", "300") as server:
        # As many open files as the system allows, for every connection is one.
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        request = Streaming(server)
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE)
        kept.request("GET", "/v1/models")
        with kept.getresponse() as first:
            first.read()
            assert (first.status, first.will_close) == (200, False)
        residue, driver = Residue(server), stages(server.pid)[0]
        os.kill(driver, signal.SIGSTOP)
        server.process.terminate()
        wait_until(lambda: server.status("/ready") == 503)
        kept.request("POST", "/v1/completions", json.dumps({"prompt": [5], "max_tokens": 3}))
        with kept.getresponse() as second:
            error = json.load(second)["error"]
            assert (second.status, error["code"]) == (503, "engine_draining")
            assert int(second.headers["Retry-After"]) > 0
            assert second.will_close
        os.kill(driver, signal.SIGCONT)
        assert request.join()["choices"][0]["finish_reason"] == "length"
        assert server.end()[0] == 0
    wait_until(lambda: not residue.remains())


@pytest.mark.full
def test_drain_has_an_end(tiny_model: Path) -> None:
    with serving(tiny_model, *SLOW, "--shutdown-timeout", "0.2") as server:
        request = Streaming(server)
        os.kill(server.workers()[1], signal.SIGSTOP)
        server.process.terminate()
        code, _ = server.end()
        assert "error" in request.join()
    assert code == 0


@pytest.mark.full
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
        pytest.param(
            ["--kv-cache-memory", "64KiB"], "raise --kv-cache-memory", marks=pytest.mark.full
        ),
    ],
)
def test_a_configuration_that_cannot_be(tiny_model: Path, flags: list[str], reason: str) -> None:
    server = Server(str(tiny_model), *flags)
    code, errors = server.end()
    assert code == 2
    assert reason in errors
    assert "Traceback" not in errors


@pytest.mark.full
def test_a_broken_checkpoint_says_so(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").unlink()
    code, errors = Server(str(tmp_path)).end()
    assert code == 1
    assert "safetensors" in errors
    assert "Traceback" not in errors


@pytest.mark.full
def test_a_model_that_is_not_here() -> None:
    code, errors = Server("./no/such/model").end()
    assert (code, "Traceback" in errors) == (2, False)
    assert "check the path" in errors
