"""Workers die or freeze under requests of all kinds, and no client notices more than a pause."""

import json
import os
import signal
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.servers.metrics import scrape
from tests.support.servers.nodes import EXACT
from tests.support.servers.poison import sitecustomize
from tests.support.servers.poison.sitecustomize import POISON_TOKEN
from tests.support.servers.recovery_load import (
    COMPLETIONS,
    RECOVERY,
    REQUESTS,
    Answer,
    Load,
    compare,
    wait_until_ready,
)
from tests.support.servers.residue import Residue, leaks, owned_resources
from tests.support.servers.server import Server, alive, serving, stages, wait_until

STAGES = {"driver": 0, "middle": 1, "last": 2}
NUM_SEEDS = 20
"""Seeds of each fault."""
MARKS = {
    (signal.SIGKILL, "driver"): [],
    (signal.SIGKILL, "last"): [pytest.mark.full],
    (signal.SIGSTOP, "middle"): [],
}
"""Marks of the first seed's faults; those that are not named, and further seeds, are long."""


def faults() -> list[Any]:
    """All kinds of faults, with their marks."""
    cases = []
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for stage in STAGES:
            for seed in range(NUM_SEEDS):
                marks = [pytest.mark.long]
                if not seed:
                    marks = MARKS.get((number, stage), marks)
                name = f"{number.name}-{stage}-{seed}"
                cases.append(pytest.param(number, stage, seed, marks=marks, id=name))
    return cases


def recoveries(server: Server) -> float:
    """Number of recoveries so far."""
    return scrape(server).value("recoveries_total")


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, expected: dict[str, Answer]
) -> Iterator[Server]:
    """One server for all faults; at its end nothing of it may be left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        path = [str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        with serving("demo", "--pp", "3", *RECOVERY, *EXACT) as started:
            # The grammar compiler starts with the first grammar, and its pipes stay.
            endpoint, fields = REQUESTS["grammar"]
            assert started.post(endpoint, {**fields, "max_tokens": 1})[0] == 200
            yield started
            residue = Residue(started)
            started.process.terminate()
            code, errors = started.end()
        assert code == 0, errors
        wait_until(lambda: not residue.remains())


@pytest.mark.parametrize(("number", "stage", "seed"), faults())
def test_a_fault_is_a_pause(
    server: Server,
    expected: dict[str, Answer],
    number: signal.Signals,
    stage: str,
    seed: int,
) -> None:
    wait_until_ready(server)
    before, pids = scrape(server), stages(server.pid)
    survivors = [server.pid, *(pid for at, pid in pids.items() if at != STAGES[stage])]
    owned = owned_resources(survivors)
    total = sum(answer.num_events for answer in expected.values())
    moment = Random(f"{number} {stage} {seed}").randrange(1, total * 3 // 4)

    load = Load(server, f"{number} {stage} {seed}")
    load.wait_for_events(moment)
    had_begun = {kind: answer.num_events > 0 for kind, answer in load.answers.items()}
    os.kill(pids[STAGES[stage]], number)
    answers = load.wait()

    compare(answers, expected)
    cached = answers["cached prefix"].cached_tokens
    assert cached == expected["cached prefix"].cached_tokens or not had_begun["cached prefix"]
    wait_until_ready(server)
    after = scrape(server)
    assert after.follows(before), "a counter went backwards"
    assert after.value("recoveries_total") == before.value("recoveries_total") + 1
    assert after.value("resumed_requests_total") > before.value("resumed_requests_total")
    assert after.value("recovery_seconds_count") == before.value("recovery_seconds_count") + 1
    assert not alive(pids[STAGES[stage]])
    assert sorted(stages(server.pid)) == sorted(pids)
    wait_until(lambda: not leaks(owned))


def test_a_poison_request_ends_alone(server: Server, expected: dict[str, Answer]) -> None:
    wait_until_ready(server)
    num_before = recoveries(server)
    poison = {"prompt": "A poison", "logit_bias": {str(POISON_TOKEN): 0.5}, "ignore_eos": True}
    body = json.dumps({**poison, "seed": 1, "max_tokens": 20}).encode()
    load = Load(server, "poison")
    load.wait_for_events(len(REQUESTS) + 1)
    for _ in range(2):
        with pytest.raises(urllib.error.HTTPError) as failure:
            server.open(COMPLETIONS, body)
        error = failure.value
        assert (error.code, error.headers["x-should-retry"]) == (500, "false")
        assert b"request_poisoned" in error.read()
    compare(load.wait(), expected)
    wait_until_ready(server)
    assert recoveries(server) == num_before + 3, "the second time the request is refused at once"
    assert server.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 3})[0] == 200


@pytest.mark.full
def test_a_recovery_that_takes_too_long(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At its end the server is killed, so the evidence of the death stays.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}
    # A restart imports torch, which takes longer than this.
    with serving(tiny_model, "--pp", "2", "--threads", "1", "--recovery-timeout", "0.3") as server:
        events = server.stream(COMPLETIONS, body)
        first = next(events)
        os.kill(stages(server.pid)[1], signal.SIGKILL)
        last = [first, *events][-1]
        assert last["error"]["code"] == "engine_recovering"
        with pytest.raises(urllib.error.HTTPError) as failure:
            server.open(COMPLETIONS, json.dumps(body).encode())
        assert failure.value.code == 503
        assert int(failure.value.headers["Retry-After"]) >= 1
        assert json.load(failure.value)["error"]["code"] == "engine_recovering"
        assert server.status("/ready") == 503
        with server.open("/health", None) as answer:
            assert json.load(answer) == {"status": "ok", "state": "recovering"}
        wait_until_ready(server)
        assert server.post(COMPLETIONS, {**body, "max_tokens": 5})[0] == 200
