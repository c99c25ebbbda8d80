"""Stages that several processes compute together: their texts, and the death of one of them."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any, NamedTuple

import pytest

from gllm.config.sampling import SamplingParams
from gllm.engine.llm import LLM
from tests.e2e.test_recovery import (
    EXACT,
    RECOVERY,
    compare,
    leaks,
    leftovers,
    num_descriptors,
    num_shared_mappings,
    scrape,
    wait_until_ready,
)
from tests.support.servers.recovery_load import COMPLETIONS, Answer, Load
from tests.support.servers.server import Server, alive, places, serving, wait_until

NUM_SEEDS = 20
"""Seeds of each fault; `make test` has the first one of some."""
DEGREES = {"2": ["0.0", "0.1", "1.0", "1.1"], "2,1": ["0.0", "0.1", "1"]}
"""Ranks of each of two stages, and the places of their workers."""
SHORT = {("2", "SIGKILL", "0.1"), ("2", "SIGSTOP", "1.1"), ("2,1", "SIGKILL", "0.1")}
"""Faults of `make test`: degrees, signal and place."""
PROMPTS = ["Once upon a time", "There was once a fox", "Not far from here", "The old man said"]
NUM_TOKENS = 48


def faults() -> list[Any]:
    """All kinds of faults, those of `make test` unmarked."""
    cases = []
    for degrees, victims in DEGREES.items():
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for victim in victims:
                for seed in range(NUM_SEEDS):
                    is_short = not seed and (degrees, number.name, victim) in SHORT
                    marks = () if is_short else (pytest.mark.long,)
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
        workers = server.workers()
        server.process.terminate()
        code, errors = server.end()
    assert code == 0, errors
    assert not any(alive(pid) for pid in workers)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Servers that leave no file behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        before = leftovers()
        with ExitStack() as files:
            yield Servers(files)
        assert leftovers() <= before


@pytest.fixture(scope="module")
def of_one_rank() -> list[list[int]]:
    """Greedy tokens of PROMPTS computed by one process."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM("demo", progress=False, dtype="float32", kv_cache_memory=2**26, threads=1) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("degrees", DEGREES)
def test_greedy_tokens_are_those_of_one_process(
    servers: Servers, of_one_rank: list[list[int]], degrees: str
) -> None:
    server = servers[degrees].server
    assert sorted(places(server.pid)) == DEGREES[degrees]
    body = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    fields = {"prompt": PROMPTS, "return_token_ids": True, **body}
    status, answer = server.post(COMPLETIONS, fields)
    assert status == 200, answer
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert [choice["token_ids"] for choice in choices] == of_one_rank


@pytest.mark.parametrize(("degrees", "number", "victim", "seed"), faults())
def test_the_death_of_a_rank_is_a_pause(
    servers: Servers, degrees: str, number: signal.Signals, victim: str, seed: int
) -> None:
    """The other ranks, which wait for it in the middle of a step, keep their weights."""
    server, undisturbed = servers[degrees]
    wait_until_ready(server)
    before, pids = scrape(server), places(server.pid)
    survivors = [server.pid, *(pid for place, pid in pids.items() if place != victim)]
    owned = {pid: (num_descriptors(pid), num_shared_mappings(pid)) for pid in survivors}
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
    wait_until(lambda: not leaks(owned), seconds=20)


def test_a_degree_that_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError) as refused, serving("demo", "--tp", "4"):
        pass
    assert "heads" in str(refused.value)
    assert "2" in str(refused.value)
