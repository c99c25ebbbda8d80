"""An engine on several machines: its texts, its faults, and a wire that shows nothing."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.net.rig import make_rig
from gllm.models.hub import resolve_model
from gllm.transport.link.mover import REPORT_SECONDS
from tests.e2e.conftest import GREEDY, Undisturbed, greedy_tokens
from tests.support.servers.metrics import scrape
from tests.support.servers.nodes import Cluster, running_cluster
from tests.support.servers.recovery_load import (
    COMPLETIONS,
    HAS_EXACT_TEXTS,
    Answer,
    Load,
    compare,
    load_during,
)
from tests.support.servers.server import alive, wait_until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two machines with a stage each, as namespaces if those are supported."""
    folder = tmp_path_factory.mktemp("cluster")
    # A machine that returns gets its stage back, however long its start takes here.
    flags = ("--pp", "2", "--node-return-timeout", "120")
    with make_rig(2) as rig, running_cluster(rig, folder, 2, *flags) as started:
        yield started


def test_texts_are_those_of_one_machine(cluster: Cluster, expected: dict[str, Answer]) -> None:
    compare(Load(cluster.head, "undisturbed").wait(), expected)
    rows = cluster.nodes()
    assert {name: row["stages"] for name, row in rows.items()} == {
        "machine-0": [0],
        "machine-1": [1],
    }
    wait_until(lambda: cluster.servers[1].status("/ready") == 200)
    assert [server.status("/health") for server in cluster.servers.values()] == [200, 200]


def sent_bytes(cluster: Cluster) -> int:
    """Return the bytes of activations that the head has sent, once it has reported all."""
    counts: list[int] = []

    def are_all_reported() -> bool:
        time.sleep(1.5 * REPORT_SECONDS)
        counts.append(sum(link["num_bytes"] for link in cluster.nodes()["machine-0"]["links"]))
        # Links that are idle send a few bytes, too.
        return len(counts) > 1 and counts[-1] - counts[-2] < 10 * token_bytes()

    wait_until(are_all_reported)
    return counts[-1]


def token_bytes() -> int:
    """Return the bytes of a token's activations in float32."""
    config = json.loads((resolve_model("demo") / "config.json").read_text())
    return int(config["hidden_size"]) * 4


def test_one_tensor_per_token_crosses_a_link(cluster: Cluster, undisturbed: Undisturbed) -> None:
    """A token weighs hidden size x 4 bytes; greedy tokens of 100 prompts are those of one stage."""
    before = sent_bytes(cluster)
    token_ids = greedy_tokens(cluster.head)
    # The last token of an output is an input of no stage.
    num_tokens = sum(len(prompt) + GREEDY["max_tokens"] - 1 for prompt in GREEDY["prompt"])
    ratio = (sent_bytes(cluster) - before) / (num_tokens * token_bytes())
    assert 1 <= ratio < 1.01
    if HAS_EXACT_TEXTS:
        assert token_ids == undisturbed.token_ids


def test_a_cut_link_costs_no_process(cluster: Cluster, expected: dict[str, Answer]) -> None:
    """Silence for longer than the timeout: workers stay, with their weights."""
    cluster.wait_until_ready()
    pids, num_losses = cluster.pids(), cluster.nodes()["machine-1"]["num_losses"]
    load = load_during(cluster.head, "cut")
    cluster.rig.hop(1).cut()
    wait_until(lambda: cluster.nodes()["machine-1"]["state"] == "lost")
    assert cluster.head.status("/ready") == 503
    wait_until(lambda: cluster.servers[1].status("/ready") == 503)
    assert [server.status("/health") for server in cluster.servers.values()] == [200, 200]
    cluster.rig.hop(1).restore()
    compare(load.wait(), expected)
    assert cluster.pids() == pids
    row = cluster.nodes()["machine-1"]
    assert (row["state"], row["num_losses"]) == ("member", num_losses + 1)
    assert row["last_cause"]
    wait_until(lambda: cluster.servers[1].status("/ready") == 200)


def test_a_machine_dies_and_returns(cluster: Cluster, expected: dict[str, Answer]) -> None:
    """All processes of a machine are killed; it is started again by hand."""
    cluster.wait_until_ready()
    load = load_during(cluster.head, "killed")
    cluster.servers[1].kill()
    wait_until(lambda: cluster.nodes()["machine-1"]["state"] == "lost")
    cluster.start(1)
    compare(load.wait(), expected)
    cluster.wait_until_ready()
    assert cluster.nodes()["machine-1"]["stages"] == [1]


@pytest.mark.full
def test_a_recovery_sends_each_live_token_once(cluster: Cluster) -> None:
    """Prompts and outputs cross the link once in the epoch that continues the requests."""
    cluster.wait_until_ready()
    prompts = [f"Story {number} of the old forest" for number in range(8)]
    num_outputs = 120 * len(prompts)
    body = {"prompt": prompts, "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(cluster.head.post, COMPLETIONS, body)
        # None of them ends before the others, so all of them are alive.
        before = scrape(cluster.head).value("generation_tokens_total")
        num_kept = scrape(cluster.head).value("resumed_tokens_cached_total")
        wait_until(
            lambda: (
                scrape(cluster.head).value("generation_tokens_total") >= before + 4 * len(prompts)
            )
        )
        os.kill(cluster.pids()["1"], signal.SIGKILL)
        status, answer = request.result()
    assert status == 200
    usage = answer["usage"]
    assert usage["completion_tokens"] == num_outputs
    cluster.wait_until_ready()
    # The connections are those of this epoch, and so are their bytes.
    num_tokens = usage["prompt_tokens"] + num_outputs - len(prompts)
    # Those in KV blocks of the epoch before are not computed again.
    num_tokens -= int(scrape(cluster.head).value("resumed_tokens_cached_total") - num_kept)
    assert 1 <= sent_bytes(cluster) / (num_tokens * token_bytes()) < 1.05


@pytest.mark.long
def test_a_frozen_machine_is_lost_and_returns(
    cluster: Cluster, expected: dict[str, Answer]
) -> None:
    cluster.wait_until_ready()
    load = load_during(cluster.head, "frozen")
    cluster.servers[1].kill(signal.SIGSTOP)
    wait_until(lambda: cluster.nodes()["machine-1"]["state"] == "lost")
    cluster.servers[1].kill(signal.SIGCONT)
    compare(load.wait(), expected)
    assert cluster.nodes()["machine-1"]["state"] == "member"


@pytest.mark.full
def test_a_machine_that_never_comes_is_named(tmp_path: Path) -> None:
    with make_rig(1) as rig:
        cluster = Cluster(rig, tmp_path, 3, "--pp", "3", "--join-timeout", "1")
        try:
            code, log = cluster.start(0).end()
        finally:
            cluster.close()
    assert code == 1
    assert "none from rank 1, 2" in log
    assert "Traceback" not in log


def test_the_end_of_the_head_ends_all(cluster: Cluster) -> None:
    """SIGTERM of the head ends every process of every machine with status 0."""
    cluster.wait_until_ready()
    pids = [pid for server in cluster.servers.values() for pid in server.pids()]
    cluster.head.process.terminate()
    for server in cluster.servers.values():
        code, log = server.end()
        assert code == 0, log[-3000:]
    wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.full
def test_sigterm_of_all_processes_at_once_drains(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Slurm, a shutdown and `kill` of a process group signal the head, agents and children."""
    flags = ("--pp", "2", "--shutdown-timeout", "100")
    with make_rig(2) as rig, running_cluster(rig, tmp_path, 2, *flags) as cluster:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(greedy_tokens, cluster.head)
            wait_until(lambda: scrape(cluster.head).value("generation_tokens_total") > 4)
            for server in reversed(cluster.servers.values()):
                for pid in reversed(server.pids()):
                    os.kill(pid, signal.SIGTERM)
            assert answer.result() == undisturbed.token_ids
        for server in cluster.servers.values():
            code, log = server.end()
            assert code == 0, log[-3000:]
            assert "killed by" not in log
            assert "requests resumed" not in log
