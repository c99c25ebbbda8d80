"""A server in processes of its own, as a user starts it, and what a test wants to know of it."""

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from gllm.runtime.messaging.parent_death import die_with_parent
from tests.support.network.ports import free_port

DEADLINE = 240.0
"""Seconds for anything that should happen at once, on a machine however busy."""


def wait_until(condition: Callable[[], object], seconds: float = DEADLINE) -> float:
    """Wait for a condition; the seconds it took. Fails when it does not come true.

    The longer it takes, the rarer it is looked at: a look may be a request to a server that starts.
    """
    begin = time.monotonic()
    while not condition():
        elapsed = time.monotonic() - begin
        assert elapsed < seconds, "it did not come true"
        time.sleep(min(max(0.01, elapsed / 20), 0.1))
    return time.monotonic() - begin


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def owned_bytes(pids: list[int]) -> int:
    """Return the memory that processes have allocated, swapped pages included.

    Pages of files are left out: a library's pages are divided among all processes that map it, so
    their share changes by tens of MiB when a process of somebody else starts or ends.
    """
    kinds = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
    rows = [
        line.split()
        for pid in pids
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    ]
    sizes = [int(row[1]) * 1024 for row in rows if row[0] in kinds]
    assert len(sizes) == len(kinds) * len(pids), "smaps_rollup lacks a kind of memory"
    return sum(sizes)


def children(pid: int) -> list[int]:
    """Ids of the processes that a process has started: those of each thread, the oldest first."""
    started: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may end before its file is read.
        with suppress(FileNotFoundError, ProcessLookupError):
            started += map(int, (task / "children").read_text().split())
    return started


def children_titled(pid: int, title: str) -> dict[int, str]:
    """Titles of the processes that a process has started, if they begin with `title`, by id."""
    found = {}
    for child in children(pid):
        # A process may end meanwhile, too.
        with suppress(FileNotFoundError, ProcessLookupError):
            name = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0].decode()
            if name.startswith(title):
                found[child] = name
    return found


def places(pid: int) -> dict[str, int]:
    """Process ids of the workers that a process has started: by stage, or by stage.rank."""
    prefix = "gllm-stage-"
    return {
        name.removeprefix(prefix): child for child, name in children_titled(pid, prefix).items()
    }


def stages(pid: int) -> dict[int, int]:
    """Process ids of the stages that a process has started, by stage; each has one rank."""
    return {int(stage): child for stage, child in places(pid).items()}


def end_with_the_tests() -> Callable[[], None]:
    """A `preexec_fn` with which a process dies when the tests are killed, and its workers with it.

    It has to be started by a thread that lives as long as the tests.
    """
    return partial(die_with_parent, os.getpid())


class ProcessLog:
    """What a process and its children write: unread, a pipe would fill and stop them."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("log")
        weakref.finalize(self, os.close, self.descriptor)

    def read(self) -> str:
        """All that was written so far."""
        size = os.fstat(self.descriptor).st_size
        return os.pread(self.descriptor, size, 0).decode()


class Server:
    """`python -m gllm.serve MODEL FLAGS` on a free port; `certificate`: the one to trust."""

    module = "gllm.serve"

    def __init__(self, model: str, *flags: str, certificate: str | None = None) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", self.module, model, "--port", str(self.port), *flags]
        self._log = ProcessLog()
        self.process = subprocess.Popen(
            command, stderr=self._log.descriptor, preexec_fn=end_with_the_tests()
        )
        self.url = f"http{'s' if certificate else ''}://127.0.0.1:{self.port}"
        self._tls = ssl.create_default_context(cafile=certificate) if certificate else None

    @property
    def log(self) -> str:
        """All that the server has written to stderr."""
        return self._log.read()

    @property
    def pid(self) -> int:
        """Process id of the frontend."""
        return self.process.pid

    def workers(self) -> list[int]:
        """Process ids of the stages, in their order."""
        return children(self.pid)

    def status(self, path: str) -> int:
        """Status code of a GET; 0 where nobody answers."""
        try:
            with self.open(path, None) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def open(self, path: str, data: bytes | None, **headers: str) -> Any:
        """The answer to a request, to be read. Raises HTTPError."""
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        return urllib.request.urlopen(request, timeout=DEADLINE, context=self._tls)

    def post(self, path: str, body: dict[str, Any] | bytes) -> tuple[int, Any]:
        """Status code and JSON of a POST."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with self.open(path, data) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The events of a streamed answer, without [DONE]."""
        data = json.dumps({**body, "stream": True}).encode()
        with self.open(path, data) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def end(self) -> tuple[int, str]:
        """Wait for the process to end; its status and what it wrote to stderr."""
        return self.process.wait(timeout=DEADLINE), self.log


FLEET_VARIABLE = "GLLM_TEST_FLEET"
"""Environment variable with the number of engines behind a router that is used as the server."""


@contextmanager
def serving(model: Path | str, *flags: str, certificate: str | None = None) -> Iterator[Server]:
    """A server that is ready; killed at the end if it still runs.

    A worker has one thread unless the flags say otherwise: on busy cores, several threads spend
    most of their time waiting for each other.
    """
    if "--threads" not in flags:
        flags = (*flags, "--threads", "1")
    if num_engines := int(os.environ.get(FLEET_VARIABLE, 0)):
        from tests.support.servers.fleet import serving_fleet

        names = [f"engine-{number}" for number in range(num_engines)]
        with serving_fleet(model, *flags, names=names, certificate=certificate) as router:
            yield router
        return
    server = Server(str(model), *flags, certificate=certificate)
    try:
        wait_until(lambda: server.status("/ready") == 200 or server.process.poll() is not None)
        assert server.process.poll() is None, server.end()[1]
        yield server
    finally:
        if server.process.poll() is None:
            # Processes that the test has killed may end at any time.
            with suppress(FileNotFoundError, ProcessLookupError):
                for pid in server.workers():
                    os.kill(pid, signal.SIGCONT)
            server.process.kill()
        server.process.wait()
