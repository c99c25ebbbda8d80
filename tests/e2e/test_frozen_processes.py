"""Each process of a prefill and decode service on two machines is stopped under 16 streams.

`python -m pytest -m long -s tests/e2e/test_frozen_processes.py` prints the worst gap of a stream by
process; GLLM_TEST_STOP_SECONDS sets another time than 90 s.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from benchmarks.net.rig import unsupported_reason
from tests.support.servers.kv_machines import Machines, running_machines
from tests.support.servers.recovery_load import COMPLETIONS
from tests.support.servers.server import alive, children_titled

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason())),
]
STOP_SECONDS = float(os.environ.get("GLLM_TEST_STOP_SECONDS", 90.0))
"""Time for which a process is stopped."""
NUM_STREAMS = 16
MAX_TOKENS = 60
GUIDED = {"max_tokens": 4, "structured_outputs": {"regex": "[a-z ]{4,9}"}}
STEP_FLAGS = ("--debug-step-seconds", "0.02")
"""A stream takes more than a second."""
SETTLE_SECONDS = 3.0
"""Time of streams before a process is stopped, and after it goes on."""
HEAD = "head"
"""The server's own process, which has all others of the server as children."""
VICTIMS = [
    *((server, HEAD) for server in ("router", "P", "D")),
    *((engine, title) for engine in ("P", "D") for title in ("gllm-stage-0", "gllm-link")),
    *((server, "gllm-grammar") for server in ("router", "P", "D")),
]
"""Server and title of each process."""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("frozen")
    with running_machines(folder, "distserve", *STEP_FLAGS) as running:
        for server in running.servers:
            # The compiler of grammars starts with the first one.
            running.complete(server, {**GUIDED, "prompt": f"From {server}:"})
        yield running


@dataclass
class Stream:
    """A client that sends one request after another until the event `has_to_end` is set."""

    number: int
    texts: set[str] = field(default_factory=set)
    """Different answers to the same request."""
    num_answers: int = 0
    worst_gap: float = 0.0
    """Longest time in seconds without an event of an answer."""
    errors: list[str] = field(default_factory=list)

    def run(self, machines: Machines, has_to_end: threading.Event) -> None:
        """Send requests."""
        body = {
            "prompt": [300 + 16 * position + self.number for position in range(70)],
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": MAX_TOKENS,
        }
        while not has_to_end.is_set():
            try:
                self._receive(machines, body)
            except Exception as error:
                self.errors.append(repr(error))

    def _receive(self, machines: Machines, body: dict[str, object]) -> None:
        text, last = "", time.monotonic()
        for event in machines.servers["router"].stream(COMPLETIONS, body):
            now = time.monotonic()
            self.worst_gap, last = max(self.worst_gap, now - last), now
            if "error" in event:
                self.errors.append(str(event))
                return
            text += "".join(choice["text"] for choice in event["choices"])
        self.texts.add(text)
        self.num_answers += 1


def find_process(machines: Machines, server: str, title: str) -> int | None:
    """Return the id of a server's process by its title; None if the server has none."""
    pid = machines.servers[server].pid
    if title == HEAD:
        return pid
    return next(iter(children_titled(pid, title)), None)


def run_streams(machines: Machines, pid: int | None, stop_seconds: float) -> list[Stream]:
    """Run streams, and stop a process meanwhile."""
    streams, has_to_end = [Stream(number) for number in range(NUM_STREAMS)], threading.Event()
    threads = [
        threading.Thread(target=stream.run, args=(machines, has_to_end), daemon=True)
        for stream in streams
    ]
    for thread in threads:
        thread.start()
    time.sleep(SETTLE_SECONDS)
    if pid is not None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stop_seconds)
        # Some are killed and replaced meanwhile.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        time.sleep(SETTLE_SECONDS)
    has_to_end.set()
    for thread in threads:
        thread.join(4 * STOP_SECONDS + 60)
        assert not thread.is_alive(), "a stream hangs"
    return streams


@pytest.fixture(scope="module")
def expected(machines: Machines) -> list[set[str]]:
    """Texts of all streams without a fault."""
    streams = run_streams(machines, None, 0.0)
    assert not [stream.errors for stream in streams if stream.errors]
    assert all(len(stream.texts) == 1 for stream in streams)
    return [stream.texts for stream in streams]


@pytest.mark.parametrize(("server", "title"), VICTIMS)
def test_a_stopped_process_changes_no_text_and_holds_nothing(
    machines: Machines, expected: list[set[str]], server: str, title: str
) -> None:
    pid = find_process(machines, server, title)
    if pid is None:
        pytest.skip("this server has no such process")
    streams = run_streams(machines, pid, STOP_SECONDS)
    worst = max(stream.worst_gap for stream in streams)
    num_answers = sum(stream.num_answers for stream in streams)
    print(f"\n{server} {title}: worst gap {worst:.1f} s, {num_answers} answers")
    assert not [error for stream in streams for error in stream.errors]
    assert [stream.texts for stream in streams] == expected
    if server != "router":
        # Somebody else goes on before the process does.
        assert worst < STOP_SECONDS
    machines.wait_until_ready()
    machines.wait_until_empty()
    assert all(alive(each.pid) for each in machines.servers.values())
