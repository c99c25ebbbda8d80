"""Stages that several processes compute together: their texts, and the death of one of them."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.e2e.conftest import OPENINGS, Undisturbed, greedy_tokens
from tests.support.servers.conventions import get
from tests.support.servers.metrics import scrape
from tests.support.servers.nodes import EXACT
from tests.support.servers.recovery_load import (
    RECOVERY,
    Answer,
    Load,
    compare,
    wait_until_ready,
)
from tests.support.servers.residue import Residue, leaks, owned_resources
from tests.support.servers.server import Server, alive, places, serving, wait_until

NUM_SEEDS = 20
"""Seeds of each fault; all but the first of some are long."""
DEGREES = {"2": ["0.0", "0.1", "1.0", "1.1"], "2,1": ["0.0", "0.1", "1"]}
"""Ranks of each of two stages, and the places of their workers."""
QUICK = ("2,1", "SIGKILL", "0.1")
"""Fault of `make test`: degrees, signal and place."""
FULL = ("2", "SIGSTOP", "1.1")
"""Fault of `make test-all`."""


def faults() -> list[Any]:
    """All kinds of faults, that of `make test` unmarked."""
    cases = []
    for degrees, victims in DEGREES.items():
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for victim in victims:
                for seed in range(NUM_SEEDS):
                    fault = degrees, number.name, victim
                    marks = [pytest.mark.full] if fault == FULL else [pytest.mark.long]
                    marks = [] if fault == QUICK else marks
                    marks = [pytest.mark.long] if seed else marks
                    name = f"tp{degrees}-{number.name}-{victim}-{seed}"
                    values = degrees, number, victim, seed
                    cases.append(pytest.param(*values, marks=marks, id=name))
    return cases


class Served(NamedTuple):
    """A server, and its answers in a run in which nothing fails."""

    server: Server
    undisturbed: dict[str, Answer]


class Servers:
    """A server per degrees, started on first use; at the end nothing of them may be left."""

    def __init__(self, files: ExitStack) -> None:
        self._files = files
        self._served: dict[str, Served] = {}

    def __getitem__(self, degrees: str) -> Served:
        if degrees not in self._served:
            server = self._files.enter_context(running(degrees))
            answers = Load(server, "undisturbed").wait()
            assert all(not answer.errors for answer in answers.values())
            assert answers["cached prefix"].cached_tokens > 32
            self._served[degrees] = Served(server, answers)
        return self._served[degrees]


@contextmanager
def running(degrees: str) -> Iterator[Server]:
    """A server of two stages, whose processes are gone at the end."""
    flags = ["--pp", "2", "--tp", degrees, *RECOVERY, *EXACT]
    with serving("demo", *flags) as server:
        yield server
        residue = Residue(server)
        server.process.terminate()
        code, errors = server.end()
    assert code == 0, errors
    wait_until(lambda: not any(map(alive, residue.pids)))


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Undisturbed
) -> Iterator[Servers]:
    """Servers that leave no file behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        with ExitStack() as files:
            yield Servers(files)
        assert not any(Path(os.environ["TMPDIR"]).iterdir())


@pytest.mark.parametrize("degrees", [pytest.param("2", marks=pytest.mark.full), "2,1"])
def test_greedy_tokens_are_those_of_one_process(
    servers: Servers, undisturbed: Undisturbed, degrees: str
) -> None:
    server = servers[degrees].server
    assert sorted(places(server.pid)) == DEGREES[degrees]
    assert get(server, "/server_info")["tp_size"] == 2
    assert greedy_tokens(server, OPENINGS) == undisturbed.stories


@pytest.mark.parametrize(("degrees", "number", "victim", "seed"), faults())
def test_the_death_of_a_rank_is_a_pause(
    servers: Servers, degrees: str, number: signal.Signals, victim: str, seed: int
) -> None:
    """The other ranks, which wait for it in the middle of a step, keep their weights."""
    server, undisturbed = servers[degrees]
    wait_until_ready(server)
    before, pids = scrape(server), places(server.pid)
    survivors = [server.pid, *(pid for place, pid in pids.items() if place != victim)]
    owned = owned_resources(survivors)
    total = sum(answer.num_events for answer in undisturbed.values())
    moment = Random(f"{number} {victim} {seed}").randrange(1, total * 3 // 4)

    load = Load(server, f"{number} {victim} {seed}")
    load.wait_for_events(moment)
    os.kill(pids[victim], number)
    compare(load.wait(), undisturbed)

    wait_until_ready(server)
    after = scrape(server)
    assert after.follows(before), "a counter went backwards"
    assert after.value("recoveries_total") == before.value("recoveries_total") + 1
    assert not alive(pids[victim])
    now = places(server.pid)
    assert sorted(now) == sorted(pids)
    assert {place for place in now if now[place] != pids[place]} == {victim}
    wait_until(lambda: not leaks(owned))


@pytest.mark.full
def test_a_degree_that_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError) as refused, serving("demo", "--tp", "4"):
        pass
    assert "heads" in str(refused.value)
    assert "2" in str(refused.value)
