"""Servers with a disk tier: conversations after restarts, deaths and damage, with the same text."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.servers.metrics import read_metrics, scrape
from tests.support.servers.nodes import EXACT
from tests.support.servers.server import Server, children_titled, serving, stages, wait_until
from tests.support.servers.streams import NUM_EVENTS, Streams

pytestmark = pytest.mark.full

PROMPT = [300 + 7 * number % 400 for number in range(500)]
MAX_TOKENS = 24
BLOCK_SIZE = 16
FLAGS = (*EXACT, "--pp", "2", "--max-model-len", "1024", "--kv-fetch", "always")


@contextmanager
def disk_server(folder: Path, *flags: str) -> Iterator[Server]:
    with serving("demo", *FLAGS, "--kv-cache-disk", f"{folder}:64MiB", *flags) as server:
        yield server


def turn(server: Server, prompt: list[int]) -> tuple[list[int], int]:
    """Return the tokens of an answer and the cached tokens of its prompt."""
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens", 0)


def value(server: Server, name: str) -> float:
    return scrape(server).value(name)


def count_loads(server: Server, outcome: str) -> float:
    """Loads that have ended so."""
    lines = read_metrics(server).splitlines()
    found = [line for line in lines if line.startswith("gllm:kv_disk_loads_total")]
    return sum(float(line.split()[-1]) for line in found if f'"{outcome}"' in line)


def wait_until_stored(server: Server, num_blocks: int) -> None:
    wait_until(lambda: value(server, "kv_disk_blocks") >= num_blocks)


def stop(server: Server) -> None:
    server.process.terminate()
    code, errors = server.end()
    assert code == 0, errors


@pytest.fixture(scope="module")
def cold() -> dict[str, Any]:
    """Two turns of a conversation without a disk tier."""
    with serving("demo", *FLAGS) as server:
        first, _ = turn(server, PROMPT)
        second, _ = turn(server, [*PROMPT, *first, 17, 18])
        return {"first": first, "second": second}


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path, cold: dict[str, Any]) -> None:
    num_blocks = (len(PROMPT) + MAX_TOKENS - 1) // BLOCK_SIZE
    with disk_server(tmp_path) as server:
        assert turn(server, PROMPT) == (cold["first"], 0)
        wait_until_stored(server, num_blocks)
        stop(server)
    with disk_server(tmp_path) as server:
        conversation = [*PROMPT, *cold["first"], 17, 18]
        num_cached = num_blocks * BLOCK_SIZE
        assert turn(server, conversation) == (cold["second"], num_cached)
        assert value(server, "external_prefix_cache_hits_total") == num_cached
        assert count_loads(server, "complete") == 1
        # Now it is in memory: nothing is read again.
        assert turn(server, conversation)[0] == cold["second"]
        assert value(server, "external_prefix_cache_hits_total") == num_cached
        stop(server)


def test_a_queued_conversation_is_read_while_another_one_has_the_only_place(
    tmp_path: Path, cold: dict[str, Any]
) -> None:
    num_blocks = (len(PROMPT) + MAX_TOKENS - 1) // BLOCK_SIZE
    with disk_server(tmp_path) as server:
        turn(server, PROMPT)
        wait_until_stored(server, num_blocks)
        stop(server)
    with disk_server(tmp_path, "--max-num-seqs", "1") as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": [5, 6, 7], "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
        long = pool.submit(server.post, "/v1/completions", body)
        wait_until(lambda: value(server, "num_requests_running") == 1)
        conversation = pool.submit(turn, server, [*PROMPT, *cold["first"], 17, 18])
        num_cached = num_blocks * BLOCK_SIZE
        # A quarter of the 64 blocks, which the other conversation overwrites at its end.
        wait_until(lambda: count_loads(server, "complete") == 1)
        assert not long.done(), "the read has not waited for the place"
        assert conversation.result() == (cold["second"], num_cached)
        assert long.result()[0] == 200
        wait_until(lambda: value(server, "external_prefix_cache_hits_total") == num_cached)
        stop(server)


@pytest.mark.parametrize("victim", ["driver", "last", "mover"])
def test_a_death_changes_no_text(tmp_path: Path, cold: dict[str, Any], victim: str) -> None:
    with disk_server(tmp_path) as server:
        assert turn(server, PROMPT)[0] == cold["first"]
        wait_until_stored(server, len(PROMPT) // BLOCK_SIZE)
        num_before = value(server, "recoveries_total")
        (mover,) = children_titled(server.pid, "gllm-link")
        pids = {"driver": stages(server.pid)[0], "last": stages(server.pid)[1], "mover": mover}
        os.kill(pids[victim], signal.SIGKILL)
        if victim == "mover":
            wait_until(lambda: mover not in children_titled(server.pid, "gllm-link"))
        else:
            wait_until(lambda: value(server, "recoveries_total") > num_before)
        wait_until(lambda: server.status("/ready") == 200)
        tokens, num_cached = turn(server, [*PROMPT, *cold["first"], 17, 18])
        assert tokens == cold["second"]
        if victim != "mover":
            assert num_cached >= len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
            assert value(server, "external_prefix_cache_hits_total") == num_cached
        stop(server)


def test_damaged_files_change_no_text(tmp_path: Path, cold: dict[str, Any]) -> None:
    with disk_server(tmp_path) as server:
        turn(server, PROMPT)
        wait_until_stored(server, len(PROMPT) // BLOCK_SIZE)
        stop(server)
    # A byte in each page of one of the files but the first.
    path = sorted(tmp_path.glob("*.gllm-kv"))[0]
    data = bytearray(path.read_bytes())
    for place in range(4096 + 900, len(data), 4096):
        data[place] ^= 16
    path.write_bytes(data)
    with disk_server(tmp_path) as server:
        assert turn(server, PROMPT) == (cold["first"], 0)
        assert count_loads(server, "failed") == 1
        # What was damaged is stored again.
        wait_until_stored(server, len(PROMPT) // BLOCK_SIZE)
        stop(server)
    with disk_server(tmp_path) as server:
        tokens, num_cached = turn(server, PROMPT)
        assert tokens == cold["first"]
        assert num_cached == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
        stop(server)


def test_a_folder_that_others_may_use_is_refused_and_the_server_goes_on(
    tmp_path: Path, cold: dict[str, Any]
) -> None:
    tmp_path.chmod(0o777)
    with disk_server(tmp_path) as server:
        assert turn(server, PROMPT) == (cold["first"], 0)
        assert server.log.count("no KV blocks are kept on disk") == 1
        assert "chmod go=" in server.log
        stop(server)


def disturb_files(folder: Path, choice: Random) -> None:
    """Flip bits, cut a file or let the operating system forget its pages, as under pressure."""
    path = choice.choice(sorted(folder.glob("*.gllm-kv")))
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        match choice.choice(["flip", "cut", "forget"]):
            case "flip":
                for _ in range(20):
                    place = choice.randrange(4096, size)
                    file.seek(place)
                    byte = file.read(1)[0]
                    file.seek(place)
                    file.write(bytes([byte ^ 1 << choice.randrange(8)]))
            case "cut":
                file.truncate(choice.randrange(size // 2, size))
            case "forget":
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_deaths_and_damage_under_streams_change_no_text(tmp_path: Path) -> None:
    """Stages and the process that has the files die at random moments, with damage between."""
    choice = Random(1)
    with serving("demo", *FLAGS) as server:
        expected = Streams(server).wait()
    with disk_server(tmp_path) as server:
        assert Streams(server).wait() == expected
        wait_until_stored(server, 16)
        for number in range(8):
            assert server.post("/reset_prefix_cache", {})[0] == 200
            disturb_files(tmp_path, choice)
            streams = Streams(server)
            streams.wait_for_events(choice.randrange(1, NUM_EVENTS // 2))
            victims = {
                **stages(server.pid),
                2: next(iter(children_titled(server.pid, "gllm-link"))),
            }
            os.kill(victims[number % 3], signal.SIGKILL)
            disturb_files(tmp_path, choice)
            assert streams.wait() == expected, number
            wait_until(lambda: server.status("/ready") == 200)
            wait_until(lambda: children_titled(server.pid, "gllm-link"))
        assert count_loads(server, "complete") > 0
        stop(server)
