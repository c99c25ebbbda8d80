"""Workers die or freeze under requests of all kinds, and no client notices more than a pause."""

import json
import os
import signal
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gllm.commands.top.scrape import MetricsScrape, parse_metrics
from gllm.kernels.native.builds import select_build
from tests.support.servers.poison import sitecustomize
from tests.support.servers.poison.sitecustomize import POISON_TOKEN
from tests.support.servers.recovery_load import COMPLETIONS, REQUESTS, Answer, Load, Part
from tests.support.servers.server import Server, alive, serving, stages, wait_until

STAGES = {"driver": 0, "middle": 1, "last": 2}
NUM_SEEDS = 20
"""Seeds of each fault; `make test` has the first one."""
EXACT = ["--dtype", "float32", "--threads", "1", "--kv-cache-memory", "64MiB"]
"""Flags with which a decoded token has the logits of the same token computed in a prefill."""
FREEZE_TIMEOUT = "2"
"""Seconds for which a stopped worker is left alone."""
RECOVERY = ["--freeze-timeout", FREEZE_TIMEOUT, "--recovery-timeout", "300"]
"""Flags with which requests wait for a restarted worker, however long its start takes here."""


def faults() -> list[Any]:
    """All kinds of faults, those of `make test` unmarked."""
    cases = []
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for stage in STAGES:
            for seed in range(NUM_SEEDS):
                is_short = not seed and (number == signal.SIGKILL or stage == "middle")
                marks = () if is_short else (pytest.mark.long,)
                name = f"{number.name}-{stage}-{seed}"
                cases.append(pytest.param(number, stage, seed, marks=marks, id=name))
    return cases


def num_descriptors(pid: int) -> int:
    """Number of open descriptors of a process, without the lock of the folder with evidence.

    The frontend has the lock from the first death on.
    """
    num_open = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            num_open += not os.readlink(entry).endswith("/.lock")
    return num_open


def num_shared_mappings(pid: int) -> int:
    """Number of mappings of anonymous files: edges, logs, plan records."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:")


def leftovers() -> set[Path]:
    """Named files that a server may leave behind."""
    return {*Path("/dev/shm").glob("*gllm*"), *Path(os.environ["TMPDIR"]).iterdir()}


def scrape(server: Server) -> MetricsScrape:
    """The server's metrics."""
    with server.open("/metrics", None) as answer:
        return parse_metrics(answer.read().decode(), 0.0)


def recoveries(server: Server) -> float:
    """Number of recoveries so far."""
    return scrape(server).value("recoveries_total")


def wait_until_ready(server: Server) -> None:
    """Wait for the end of a recovery."""
    wait_until(lambda: server.status("/ready") == 200)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all faults; at its end nothing of it may be left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        path = [str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        before = leftovers()
        with serving("demo", "--pp", "3", *RECOVERY, *EXACT) as started:
            yield started
            workers = started.workers()
            started.process.terminate()
            code, errors = started.end()
        assert code == 0, errors
        assert not any(alive(pid) for pid in workers)
        assert leftovers() <= before


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, Answer]:
    """The answers of a run in which nothing fails."""
    answers = Load(server, "undisturbed").wait()
    assert all(not answer.errors for answer in answers.values())
    assert answers["cached prefix"].cached_tokens > 32
    return answers


def compare(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """Check that all answers are as expected; texts only where a BLAS does not order their sums."""
    has_exact_texts = select_build().path is not None
    for kind, answer in answers.items():
        assert answer.errors == [], kind
        if has_exact_texts:
            assert answer.content == expected[kind].content, kind
        else:
            assert ends(answer) == ends(expected[kind]) != set(), kind


def ends(answer: Answer) -> set[Part]:
    """Return the places of the reasons for which choices ended."""
    return {place for place in answer.values if place[-1] == "finish_reason"}


@pytest.mark.parametrize(("number", "stage", "seed"), faults())
def test_a_fault_is_a_pause(
    server: Server,
    undisturbed: dict[str, Answer],
    number: signal.Signals,
    stage: str,
    seed: int,
) -> None:
    wait_until_ready(server)
    before, pids = scrape(server), stages(server.pid)
    survivors = [server.pid, *(pid for at, pid in pids.items() if at != STAGES[stage])]
    owned = {pid: (num_descriptors(pid), num_shared_mappings(pid)) for pid in survivors}
    total = sum(answer.num_events for answer in undisturbed.values())
    moment = Random(f"{number} {stage} {seed}").randrange(1, total * 3 // 4)

    load = Load(server, f"{number} {stage} {seed}")
    load.wait_for_events(moment)
    had_begun = {kind: answer.num_events > 0 for kind, answer in load.answers.items()}
    os.kill(pids[STAGES[stage]], number)
    answers = load.wait()

    compare(answers, undisturbed)
    cached = answers["cached prefix"].cached_tokens
    assert cached == undisturbed["cached prefix"].cached_tokens or not had_begun["cached prefix"]
    wait_until_ready(server)
    after = scrape(server)
    assert after.follows(before), "a counter went backwards"
    assert after.value("recoveries_total") == before.value("recoveries_total") + 1
    assert after.value("resumed_requests_total") > before.value("resumed_requests_total")
    assert after.value("recovery_seconds_count") == before.value("recovery_seconds_count") + 1
    assert not alive(pids[STAGES[stage]])
    assert sorted(stages(server.pid)) == sorted(pids)
    wait_until(lambda: not leaks(owned), seconds=20)


def leaks(owned: dict[int, tuple[int, int]]) -> set[int]:
    """Processes that have more descriptors or mappings than before."""
    return {
        pid
        for pid, (descriptors, mappings) in owned.items()
        if num_descriptors(pid) > descriptors or num_shared_mappings(pid) > mappings
    }


def test_a_poison_request_ends_alone(server: Server, undisturbed: dict[str, Answer]) -> None:
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
    compare(load.wait(), undisturbed)
    wait_until_ready(server)
    assert recoveries(server) == num_before + 3, "the second time the request is refused at once"
    assert server.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 3})[0] == 200


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
