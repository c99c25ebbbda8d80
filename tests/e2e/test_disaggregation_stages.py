"""Engines on several machines hand KV blocks over: each machine those of its own stages."""

import os
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from benchmarks.net.rig import LoopbackRig
from tests.e2e.conftest import GREEDY, Undisturbed, fetched_greedy_tokens, greedy_tokens
from tests.support.servers.fleet import Router
from tests.support.servers.nodes import EXACT, Cluster
from tests.support.servers.recovery_load import (
    HAS_EXACT_TEXTS,
    REQUESTS,
    Answer,
    RepeatedLoad,
)
from tests.support.servers.server import children_titled, wait_until

pytestmark = pytest.mark.full
PREFILL, DECODE = "prefiller", "decoder"


class Fleet(NamedTuple):
    """A router, an engine of two machines that prefills, and one of two ranks that decodes."""

    router: Router
    prefill: Cluster

    def is_connected(self) -> bool:
        """Return True if both engines give and fetch KV blocks."""
        try:
            rows = self.router.rows()
        except OSError:
            return False
        return rows.keys() == {PREFILL, DECODE} and all(
            row["has_kv_transfer"] and row["state"] == "ready" for row in rows.values()
        )

    def stats(self, name: str) -> dict[str, Any]:
        """Statistics of an engine's scheduler."""
        values: dict[str, Any] = self.router.rows()[name]["stats"]
        return values

    def is_empty(self) -> bool:
        """Return True if no engine has a request or a block that another one may read."""
        names = ("running", "waiting", "held_blocks", "fetching", "kv_usage")
        return not any(self.stats(each)[name] for each in (PREFILL, DECODE) for name in names)

    def movers(self, machine: int) -> list[int]:
        """Process ids of a machine's gllm-link processes; the last one moves KV blocks."""
        return [*children_titled(self.prefill.servers[machine].pid, "gllm-link")]


@pytest.fixture(scope="module", params=["auto", "tcp"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    router = Router("demo", "--preset", "distserve")
    flags = ["--router", f"127.0.0.1:{router.hub}", "--kv-fetch", "always"]
    prefill = ["--role", "prefill", "--name", PREFILL, "--pp", "2", "--kv-transfer"]
    prefill += ["--node-return-timeout", "120"]
    folder = tmp_path_factory.mktemp("prefill")
    rig = LoopbackRig(2)
    cluster = Cluster(rig, folder, 2, *flags, *prefill, has_secret=False)
    try:
        for rank in range(2):
            cluster.start(rank)
        decode = ["--role", "decode", "--tp", "2", "--kv-transfer", request.param]
        router.start_engine(DECODE, *EXACT, "--kv-fetch", "always", *decode)
        started = Fleet(router, cluster)
        wait_until(started.is_connected)
        yield started
    except BaseException:
        for server in cluster.all_servers:
            print(f"--- {server.log_path}\n{server.log[-6000:]}")
        raise
    finally:
        cluster.close()
        router.close()
        rig.__exit__()


def test_each_machine_gives_the_blocks_of_its_stages(
    fleet: Fleet, undisturbed: Undisturbed
) -> None:
    """All tokens of 100 prompts are fetched, and the text is that of one engine."""
    before = {name: fleet.stats(name) for name in (PREFILL, DECODE)}
    assert fleet.router.post("/reset_prefix_cache", {})[0] == 200
    assert fetched_greedy_tokens(fleet.router) == undisturbed.token_ids
    wait_until(fleet.is_empty)
    num_tokens = sum(map(len, GREEDY["prompt"]))
    # Engines report their counters once per second.
    wanted = before[DECODE]["fetched_tokens"] + num_tokens
    wait_until(lambda: fleet.stats(DECODE)["fetched_tokens"] >= wanted)
    decode = fleet.stats(DECODE)
    assert decode["fetched_tokens"] == wanted
    assert decode["failed_fetches"] == before[DECODE]["failed_fetches"]
    assert fleet.stats(PREFILL)["prefill_tokens"] - before[PREFILL]["prefill_tokens"] == num_tokens


def check_texts(answers: list[Answer], expected: dict[str, Answer]) -> None:
    """Check that all answers are those of one engine but for log-probabilities.

    Their last bits depend on the number of ranks, and so on the engine that computes a prompt.
    """

    def texts(answer: Answer) -> dict[Any, Any]:
        content = answer.content.items()
        return {
            part: value for part, value in content if "logprobs" not in " ".join(map(str, part))
        }

    for answer in answers:
        assert answer.errors == [], answer.kind
        if HAS_EXACT_TEXTS:
            assert texts(answer) == texts(expected[answer.kind]), answer.kind


@pytest.mark.parametrize("machine", [0, 1])
def test_a_mover_that_dies_changes_no_text(
    fleet: Fleet, expected: dict[str, Answer], machine: int
) -> None:
    """The gllm-link of one machine of the prefill engine is killed while prompts travel."""
    wait_until(fleet.is_connected)
    movers = fleet.movers(machine)
    load = RepeatedLoad(fleet.router, f"mover {machine}")
    load.wait_for_events(len(REQUESTS))
    os.kill(movers[-1], signal.SIGKILL)
    wait_until(lambda: movers[-1] not in fleet.movers(machine))
    wait_until(lambda: len(fleet.movers(machine)) == len(movers) and fleet.is_connected())
    load.wait_for_events(load.num_events + len(REQUESTS))
    check_texts(load.stop(), expected)
    assert fleet.movers(machine)[:-1] == movers[:-1]
    wait_until(fleet.is_empty)


def test_a_machine_that_dies_changes_no_text(fleet: Fleet, expected: dict[str, Answer]) -> None:
    """All processes of the second machine are killed in the middle of hand-offs."""
    wait_until(fleet.is_connected)
    load = RepeatedLoad(fleet.router, "machine")
    load.wait_for_events(len(REQUESTS))
    fleet.prefill.servers[1].kill()
    fleet.prefill.start(1)
    load.wait_for_events(load.num_events + len(REQUESTS))
    check_texts(load.stop(), expected)
    wait_until(fleet.is_connected)
    fetched = fleet.stats(DECODE)["fetched_tokens"]
    assert greedy_tokens(fleet.router)
    wait_until(lambda: fleet.stats(DECODE)["fetched_tokens"] > fetched)
    wait_until(fleet.is_empty)
