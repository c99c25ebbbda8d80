"""The doors of a real server of one stage: keys, TLS, a client that does not read."""

import json
import socket
import urllib.error
from pathlib import Path

import pytest

from tests.support.network.certificates import make_certificate
from tests.support.servers.server import Server, alive, serving, wait_until

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


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--api-key-file", "/nowhere/keys"], "--api-key-file /nowhere/keys cannot be read"),
        (["--api-key", "two words"], "api_key 1"),
        (["--ssl-certfile", "/nowhere", "--ssl-keyfile", "/nowhere"], "--ssl-certfile"),
    ],
)
def test_doors_that_cannot_be(tiny_model: Path, flags: list[str], reason: str) -> None:
    code, errors = Server(str(tiny_model), *flags).end()
    assert code == 2
    assert reason in errors
    assert "Traceback" not in errors
    assert "two words" not in errors


@pytest.mark.full
def test_a_client_that_never_reads_holds_up_no_end(tiny_model: Path) -> None:
    fields = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "n": 4, "logprobs": 20}
    body = json.dumps({**fields, "stream": True}).encode()
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
        wait_until(lambda: not any(map(alive, workers)))
