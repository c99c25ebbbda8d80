"""`gllm top` before servers that answer, go and come back."""

import itertools
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gllm.commands.top.command import ServerView, main
from gllm.deploy.server_client import ServerClient, ServerError
from tests.support.exit_status import exit_status
from tests.support.full_cases import full_but

SECONDS = 60.0


def metrics(tokens: int) -> bytes:
    label = '{model_name="fake/model"}'
    return (
        "# TYPE gllm:generation_tokens_total counter\n"
        f"gllm:generation_tokens_total{label} {tokens}\n"
        "# TYPE gllm:num_requests_running gauge\n"
        f"gllm:num_requests_running{label} 7\n"
    ).encode()


class Fake:
    """A server with nothing but /metrics."""

    def __init__(self) -> None:
        counts = itertools.count(0, 100)
        fake = self
        self.status, self.key = 200, ""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path == "/metrics"
                fake.key = self.headers.get("Authorization", "")
                self.send_response(fake.status if found else 404)
                self.end_headers()
                self.wfile.write(metrics(next(counts)))

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Fake]:
    fake = Fake()
    yield fake
    fake.close()


def command(*arguments: str) -> list[str]:
    code = "import sys; from gllm.__main__ import main; sys.exit(main())"
    return [sys.executable, "-c", code, "top", *arguments]


def test_the_view_outlives_its_server(server: Fake) -> None:
    view = ServerView(ServerClient(f"{server.url}/v1/", "secret"))
    assert view.lines(80, 24, "not there")[2] == "not there"
    view.refresh()
    view.refresh()
    assert server.key == "Bearer secret"
    assert "7 running, 0 waiting" in view.lines(80, 24)[2]
    server.status = 401
    with pytest.raises(ServerError, match="API key: set --api-key"):
        view.refresh()
    server.status = 200
    old = view.lines(80, 24, "gone")
    assert old[0].startswith("gllm top: fake/model")
    assert old[-1].startswith("gone; metrics are ")
    view.refresh()


def test_once_prints_one_table(server: Fake) -> None:
    run = subprocess.run(
        command("--once", "--interval", "0.1", "--url", server.url),
        capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    assert run.stdout.startswith("gllm top: fake/model")
    assert "\x1b" not in run.stdout
    rate = next(line for line in run.stdout.splitlines() if line.startswith("tokens/s"))
    assert float(rate.split()[3]) > 0


def test_once_without_a_server() -> None:
    run = subprocess.run(
        command("--once", "--url", "http://127.0.0.1:9"),
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (1, "")
    assert "http://127.0.0.1:9" in run.stderr
    assert "Traceback" not in run.stderr


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command says to arguments that cannot be."""
    assert exit_status(main, arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "nan", "often"])
def test_intervals_that_cannot_be(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--interval" in refusal(["--interval", interval], capsys)


def test_a_reader_that_has_enough(server: Fake) -> None:
    process = subprocess.Popen(
        command("--interval", "0.1", "--url", server.url),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("gllm top: fake/model")
    process.stdout.close()
    assert process.wait(SECONDS) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


class Terminal:
    """A terminal with a command in it."""

    def __init__(self, arguments: list[str]) -> None:
        self._master, end = pty.openpty()
        self.before = termios.tcgetattr(self._master)
        self.process = subprocess.Popen(arguments, stdout=end, stderr=end, stdin=end)
        os.close(end)
        self.text = ""
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self, condition: Callable[[str], bool]) -> None:
        """Until what was shown fulfils a condition."""
        deadline = time.monotonic() + SECONDS
        while not condition(self.text):
            assert time.monotonic() < deadline, self.text[-2000:]
            time.sleep(0.01)

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._master, keys)

    @property
    def modes(self) -> list[Any]:
        """How the terminal treats what is typed."""
        return termios.tcgetattr(self._master)

    def _read(self) -> None:
        try:
            while part := os.read(self._master, 65536):
                self.text += part.decode(errors="replace")
        except OSError:
            pass  # the other end is closed
        os.close(self._master)


@pytest.mark.parametrize("number", full_but([signal.SIGINT], [signal.SIGINT, signal.SIGTERM]))
def test_in_a_terminal(server: Fake, number: signal.Signals) -> None:
    terminal = Terminal(command("--interval", "0.1", "--url", server.url))
    terminal.wait(lambda text: text.count("\x1b[H") > 2 and "7 running" in text)
    assert "\x1b[?1049h" in terminal.text
    server.status = 503
    terminal.wait(lambda text: "returned 503; metrics are" in text)
    server.status = 200
    terminal.wait(lambda text: "503" not in text.rsplit("\x1b[H", 2)[1])
    terminal.process.send_signal(number)
    assert terminal.process.wait(SECONDS) == 0
    terminal.wait(lambda text: text.endswith("\x1b[?25h\x1b[?1049l"))
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize("key", full_but([b"q"], [b"q", b"Q", b"\x1b[Axq"]))
def test_q_leaves_at_once(server: Fake, key: bytes) -> None:
    terminal = Terminal(command("--interval", "3600", "--url", server.url))
    terminal.wait(lambda text: "7 running" in text)
    terminal.wait(lambda text: terminal.modes != terminal.before)
    terminal.type(b"xyz")  # other keys do nothing
    assert terminal.process.poll() is None
    terminal.type(key)
    assert terminal.process.wait(SECONDS) == 0
    terminal.wait(lambda text: text.endswith("\x1b[?25h\x1b[?1049l"))
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize("url", ["nonsense", "http://[::1", "file:///etc/passwd", "http://", ""])
def test_urls_that_cannot_be(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(["--once", "--url", url], capsys)
    assert len(error.splitlines()) == 1
    assert "--url" in error
    assert "http://127.0.0.1:8000" in error


def test_a_key_that_no_header_holds(server: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--once", "--url", server.url, "--api-key", "schl\u00fcssel"]
    assert "--api-key" in refusal(arguments, capsys)
