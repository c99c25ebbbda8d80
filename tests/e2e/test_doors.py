"""The doors of a real server: keys, TLS, what becomes of connections at its end."""

import http.client
import json
import os
import resource
import signal
import socket
import urllib.error
from pathlib import Path

import pytest

from tests.e2e.test_faults import LONG, Streaming
from tests.support.network.certificates import make_certificate
from tests.support.servers.server import DEADLINE, Server, alive, serving, wait_until

SHOWN, FILED, HIDDEN = "key-of-the-command-line", "key-of-the-file", "key-of-the-environment"
SHORT = json.dumps({"prompt": [5, 6], "max_tokens": 3}).encode()


def status(server: Server, key: str) -> int:
    """The status of a short request with a key."""
    try:
        with server.open("/v1/completions", SHORT, Authorization=f"Bearer {key}") as answer:
            assert answer.headers["x-ratelimit-limit-requests"] == "500"
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_keys_and_tls(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    (tmp_path / "keys").write_text(f"# clients\n{FILED}\n")
    monkeypatch.setenv("GLLM_API_KEY", HIDDEN)
    flags = ["--ssl-certfile", certificate, "--ssl-keyfile", key, "--rate-limit", "500"]
    flags += ["--api-key-file", str(tmp_path / "keys"), "--api-key", SHOWN]
    with serving(tiny_model, *flags, certificate=certificate) as server:
        assert [status(server, given) for given in (SHOWN, FILED, HIDDEN)] == [200] * 3
        assert [status(server, given) for given in ("", "other")] == [401] * 2
        assert server.status("/v1/models") == 401
        assert server.status("/health") == 200
        for pid in server.workers():
            seen = Path(f"/proc/{pid}/environ").read_bytes()
            seen += Path(f"/proc/{pid}/cmdline").read_bytes()
            assert not [given for given in (SHOWN, FILED, HIDDEN) if given.encode() in seen]
        assert SHOWN.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        server.process.terminate()
        code, errors = server.end()
    assert code == 0
    assert f"curl -N https://127.0.0.1:{server.port}/" in errors
    assert not [given for given in (SHOWN, FILED, HIDDEN) if given in errors]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--api-key-file", "/nowhere/keys"], "--api-key-file /nowhere/keys cannot be read"),
        (["--api-key", "two words"], "api_key 1"),
        (["--ssl-certfile", "x"], "ssl_certfile is given without ssl_keyfile"),
        (["--ssl-certfile", "/nowhere", "--ssl-keyfile", "/nowhere"], "--ssl-certfile"),
        (["--allowed-origins", "example.com"], "allowed_origins"),
    ],
)
def test_doors_that_cannot_be(tiny_model: Path, flags: list[str], reason: str) -> None:
    code, errors = Server(str(tiny_model), *flags).end()
    assert code == 2
    assert reason in errors
    assert "Traceback" not in errors
    assert "two words" not in errors


def test_kept_connections_while_draining(tiny_model: Path) -> None:
    # On a busy machine the running request needs more than the default.
    with serving(tiny_model, "--shutdown-timeout", "300") as server:
        # As many open files as the system allows, for every connection is one.
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        request = Streaming(server)
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE)
        kept.request("GET", "/v1/models")
        with kept.getresponse() as first:
            first.read()
            assert (first.status, first.will_close) == (200, False)
        os.kill(server.workers()[0], signal.SIGSTOP)
        server.process.terminate()
        wait_until(lambda: server.status("/ready") == 503)
        kept.request("POST", "/v1/completions", SHORT)
        with kept.getresponse() as second:
            error = json.load(second)["error"]
            assert (second.status, error["code"]) == (503, "engine_draining")
            assert int(second.headers["Retry-After"]) > 0
            assert second.will_close
        os.kill(server.workers()[0], signal.SIGCONT)
        assert request.join()["choices"][0]["finish_reason"] == "length"
        assert server.end()[0] == 0


def test_a_client_that_never_reads_holds_up_no_end(tiny_model: Path) -> None:
    body = json.dumps({**LONG, "n": 4, "logprobs": 20, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with serving(tiny_model, "--shutdown-timeout", "2") as server, socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", server.port))
        stuck.sendall(head.encode() + body)
        assert stuck.recv(1, socket.MSG_PEEK)
        workers = server.workers()
        server.process.terminate()
        assert server.end()[0] == 0
        assert not any(alive(pid) for pid in workers)
