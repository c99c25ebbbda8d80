"""The command blocks of the pages for users run, in their order, against a server of the demo.

They run in a copy of the checkout's surface and in a network namespace of their own, whose ports
8000 and 8001 are free. Benchmarks send fewer requests than the pages say.
"""

import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from benchmarks.net.namespaces import unsupported_reason
from tests.support.command_blocks import ACTIVATION, ENTRY_PAGES, command_blocks, words_of
from tests.support.servers.server import DEADLINE, end_with_the_tests
from tests.support.sources import ROOT, text_of

pytestmark = pytest.mark.full

PAGES = (
    "README.md",
    "docs/tutorial.md",
    "docs/tools.md",
    "docs/structured-output.md",
    "docs/bench.md",
    "docs/operations.md",
)
SHORTER: dict[tuple[str, ...], list[str]] = {
    ("gllm", "bench", "serve"): ["--num-prompts", "3"],
    ("gllm", "bench", "throughput"): ["--num-prompts", "8"],
    ("gllm", "bench", "latency"): ["--num-iters", "2", "--num-iters-warmup", "1"],
}
"""Flags that end a benchmark after seconds."""
SAVED_FILE = re.compile(r"`([\w-]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)```", re.DOTALL)
"""Name and content of a file that a page has its reader save."""
DEMO_PORT = 8000


class Checkout:
    """A folder like the checkout, with an environment in .venv, and the servers that run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("examples", "gllm"):
            (folder / name).symlink_to(ROOT / name)
        self._programs = folder / ".venv" / "bin"
        self._programs.mkdir(parents=True)
        python = shlex.quote(sys.executable)
        for name, command in (("python", python), ("gllm", f"{python} -m gllm")):
            (self._programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (self._programs / name).chmod(0o755)
        (self._programs / "activate").write_text(f'PATH="{self._programs}:$PATH"\n')
        (folder / ".curlrc").write_text("fail-with-body\n")
        self.is_activated = True
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        self._namespace = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"], preexec_fn=end_with_the_tests()
        )
        while os.readlink(f"/proc/{self._namespace.pid}/ns/net") == os.readlink(
            "/proc/self/ns/net"
        ):
            time.sleep(0.01)
        self.run("ip link set lo up")

    def popen(self, command: str, **options: object) -> subprocess.Popen[bytes]:
        """Start a command of the shell in the checkout."""
        environment = {**os.environ, "CURL_HOME": str(self.folder), "PYTHONPATH": str(ROOT)}
        if self.is_activated:
            environment["PATH"] = f"{self._programs}:{environment['PATH']}"
        inside = ["nsenter", f"--net=/proc/{self._namespace.pid}/ns/net"]
        return subprocess.Popen(  # type: ignore[call-overload]
            [*inside, "bash", "-c", command],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            preexec_fn=end_with_the_tests(),
            **options,
        )

    def run(self, command: str) -> str:
        """Run a command and return its output; fails unless its exit status is 0."""
        process = self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, f"{command}\n{output.decode()}\n{errors.decode()}"
        return output.decode()

    def watch(self, command: str) -> str:
        """Run a command that goes on until Ctrl-C, until it has written; return its output."""
        process = self.popen(f"exec {command}", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 65536)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode in (0, 130), f"{command}\n{errors.decode()}"
        return (first + output).decode()

    def serve(self, command: str, port: int) -> None:
        """Start a server in place of the one that has the port, and wait until it is ready."""
        self.stop(port)
        with (self.folder / f"{port}.log").open("wb") as log:
            process = self.popen(command, stdout=log, stderr=log)
        begin = time.monotonic()
        probe = f"curl -so {os.devnull} http://127.0.0.1:{port}/ready"
        while self.popen(probe).wait():
            text = (self.folder / f"{port}.log").read_text()
            assert process.poll() is None, f"{command}\n{text}"
            assert time.monotonic() - begin < DEADLINE, f"{command}\n{text}"
            time.sleep(0.2)
        self._servers[port] = process

    def need_demo(self) -> None:
        """Start the demo unless a server has its port."""
        if DEMO_PORT not in self._servers:
            self.serve("exec python -m gllm.serve demo", DEMO_PORT)

    def stop(self, port: int) -> None:
        """Stop the server of a port, if there is one."""
        if process := self._servers.pop(port, None):
            process.terminate()
            assert process.wait(DEADLINE) == 0

    def close(self) -> None:
        """Stop all servers and delete the namespace."""
        for port in list(self._servers):
            self.stop(port)
        self._namespace.kill()
        self._namespace.wait()

    def port_of(self, words: list[str]) -> int:
        """Return the port of a server's command line, or of its configuration file."""
        if "--config" in words:
            file = self.folder / words[words.index("--config") + 1]
            return int(yaml.safe_load(file.read_text()).get("port", DEMO_PORT))
        return int(words[words.index("--port") + 1]) if "--port" in words else DEMO_PORT

    def execute(self, command: str) -> None:
        """Run a command of a page as its reader does, and check what it writes."""
        words = words_of(command)[-1]
        if words[:2] == ["make", "serve"]:
            self.serve("exec .venv/bin/python -m gllm.serve demo", DEMO_PORT)
        elif words[:2] == ["gllm", "serve"]:
            self.serve(command, self.port_of(words))
        elif words[:2] == ["pip", "install"]:
            # The environment of the tests has the package.
            assert all(map(importlib.metadata.version, words[2:]))
        elif words[:2] == ["gllm", "top"]:
            assert "requests" in self.watch(command)
        elif command.startswith(ACTIVATION):
            self.run(f"{command}; type gllm")
            self.is_activated = True
        elif (extra := SHORTER.get(tuple(words[:3]))) is not None:
            output = self.run(shlex.join([*words, *extra]))
            if words[2] == "serve":
                assert re.search(r"Failed requests: +0 ", output), output
        else:
            assert "error" not in self.run(command)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    if reason := unsupported_reason():
        pytest.skip(reason)
    folder = Checkout(tmp_path_factory.mktemp("checkout"))
    try:
        yield folder
    finally:
        folder.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PAGES)
def test_commands_run(name: str, checkout: Checkout) -> None:
    page = ROOT / name
    for file, content in SAVED_FILE.findall(text_of(page)):
        (checkout.folder / file).write_text(content)
    checkout.need_demo()
    checkout.is_activated = name not in ENTRY_PAGES
    blocks = [block for block in command_blocks(page) if not block.not_run]
    assert blocks
    for block in blocks:
        for command in block.commands:
            checkout.execute(command)
