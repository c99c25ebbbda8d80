"""Workers die under many streams, and nearly nothing is computed again."""

import json
import mmap
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.support.servers.metrics import scrape
from tests.support.servers.nodes import EXACT
from tests.support.servers.recovery_load import wait_until_ready
from tests.support.servers.residue import leaks, owned_resources
from tests.support.servers.server import Server, places, serving, wait_until
from tests.support.servers.streams import NUM_EVENTS, Streams

BLOCK_SIZE = 16
WAIT = ["--recovery-timeout", "300"]
"""Requests wait for a restarted worker, however long its start takes here."""
GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
FOLDER = "FOLDER"
"""Stands for a folder of the test among flags."""
NUM_ROUNDS = 2
"""Deaths of each kind per server."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "victims"),
    [
        (["--pp", "2"], ["1", "0", "1"]),
        (["--pp", "3"], ["1", "2", "1", "0", "1"]),
        (["--pp", "2", "--tp", "2"], ["1.1", "0.1", "0.0"]),
        (["--pp", "2", "--kv-cache-dtype", "int8"], ["1"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_death_costs_the_last_blocks_only(flags: list[str], victims: list[str]) -> None:
    """Each death is that of another process; the driver is one of them."""
    with serving("demo", *flags, *WAIT, *EXACT) as server:
        expected = Streams(server).wait()
        assert all(expected)
        owned = None
        for victim in victims:
            # The prompts are cached; the rest of the cache is that of the streams.
            before, pids = scrape(server), places(server.pid)
            streams = Streams(server)
            streams.wait_for_events(NUM_EVENTS // 2)
            os.kill(pids[victim], signal.SIGKILL)
            assert streams.wait() == expected
            wait_until_ready(server)
            after = scrape(server)
            assert after.value("recoveries_total") == before.value("recoveries_total") + 1
            computed, kept = (
                after.value(name) - before.value(name)
                for name in ("resumed_tokens_computed_total", "resumed_tokens_cached_total")
            )
            num_resumed = after.value("resumed_requests_total")
            num_resumed -= before.value("resumed_requests_total")
            # Its last block, and what was in flight.
            assert computed <= num_resumed * (BLOCK_SIZE + len(pids))
            assert kept > 3 * computed
            is_driver = victim == min(pids)
            # Of most requests only the last token, as none of the others has been lost.
            assert is_driver or computed < num_resumed * BLOCK_SIZE / 4
            if owned is None:
                owned = owned_resources([server.pid])
        wait_until(lambda: not leaks(owned or {}))


@pytest.mark.full
def test_without_a_prefix_cache_all_is_computed_again() -> None:
    with serving("demo", "--pp", "2", "--no-prefix-cache", *WAIT, *EXACT) as server:
        expected = Streams(server).wait()
        streams = Streams(server)
        streams.wait_for_events(NUM_EVENTS // 2)
        os.kill(places(server.pid)["1"], signal.SIGKILL)
        assert streams.wait() == expected
        metrics = scrape(server)
        assert metrics.value("resumed_tokens_cached_total") == 0
        assert metrics.value("resumed_tokens_computed_total") > 0


def kill_worker(server: Server, choice: Random) -> None:
    """Kill a worker that is not the driver."""
    pids = places(server.pid)
    os.kill(pids[choice.choice(sorted(pids)[1:])], signal.SIGKILL)


def kill_driver(server: Server, choice: Random) -> None:
    """Kill the process that schedules."""
    pids = places(server.pid)
    os.kill(pids[min(pids)], signal.SIGKILL)


def kill_two(server: Server, choice: Random) -> None:
    """Kill two workers at once."""
    for pid in choice.sample(sorted(places(server.pid).values()), 2):
        os.kill(pid, signal.SIGKILL)


def kill_during_adoption(server: Server, choice: Random) -> None:
    """Kill a worker, and another one or the same place again while the next epoch begins."""
    kill_worker(server, choice)
    wait_until(lambda: server.status("/ready") == 503)
    time.sleep(choice.random() * 3)
    if pids := places(server.pid):
        os.kill(choice.choice(sorted(pids.values())), signal.SIGKILL)


def kill_and_damage(server: Server, choice: Random) -> None:
    """Kill a worker and damage what it and the others leave, before anybody reads it."""
    os.kill(server.pid, signal.SIGSTOP)
    kill_worker(server, choice)
    num_damaged = sum(damage(path, choice) for path in kv_files(server.pid))
    os.kill(server.pid, signal.SIGCONT)
    assert num_damaged


def kv_files(pid: int) -> Iterator[str]:
    """Yield paths of the memory files of the KV caches that a process has open."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if re.search(r"^/memfd:.*-kv-\d+\.\d+", os.readlink(entry)):
            yield str(entry)


def damage(path: str, choice: Random) -> int:
    """Flip bits in a tenth of the pages of a file behind the first one; return their number."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        pages = written_pages(descriptor)
        damaged = [page for page in pages if page and choice.random() < 0.1]
        for page in damaged:
            place = page + choice.randrange(mmap.PAGESIZE)
            byte = os.pread(descriptor, 1, place)[0]
            os.pwrite(descriptor, bytes([byte ^ 1 << choice.randrange(8)]), place)
        return len(damaged)
    finally:
        os.close(descriptor)


def written_pages(descriptor: int) -> list[int]:
    """Return the offsets of the pages of a file that have memory."""
    pages: list[int] = []
    begin, size = 0, os.fstat(descriptor).st_size
    while begin < size:
        try:
            begin = os.lseek(descriptor, begin, os.SEEK_DATA)
        except OSError:
            break  # No more data.
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        pages += range(begin, end, mmap.PAGESIZE)
        begin = end
    return pages


DEATHS: list[Callable[[Server, Random], None]] = [
    kill_worker,
    kill_driver,
    kill_two,
    kill_during_adoption,
    kill_and_damage,
]
"""Kinds of deaths: seven kills."""
SERVERS = {
    "two stages": ["--pp", "2"],
    "three stages and a standby": [
        *("--pp", "3", "--standby-workers", "1", "--weight-cache", FOLDER),
    ],
    "ranks": ["--pp", "2", "--tp", "2"],
    "guesses": ["--pp", "3", "--speculative-config", json.dumps(GUESSES)],
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if number else pytest.mark.full)
        for number, name in enumerate(SERVERS)
    ],
)
def test_no_death_changes_a_text(name: str, tmp_path: Path) -> None:
    """At random moments: 56 kills on four servers, with blocks kept, damaged or computed again."""
    choice = Random(name)
    deaths = choice.sample(DEATHS * NUM_ROUNDS, len(DEATHS) * NUM_ROUNDS)
    flags = [str(tmp_path / "weights") if flag == FOLDER else flag for flag in SERVERS[name]]
    with serving("demo", *flags, *WAIT, *EXACT) as server:
        expected = Streams(server).wait()
        for kill in deaths:
            before, num_workers = scrape(server), len(places(server.pid))
            streams = Streams(server)
            streams.wait_for_events(choice.randrange(NUM_EVENTS // 8, NUM_EVENTS // 4))
            kill(server, choice)
            assert streams.wait() == expected, kill
            wait_until_ready(server)
            after = scrape(server)
            assert after.value("recoveries_total") > before.value("recoveries_total")
            if kill in (kill_worker, kill_driver, kill_and_damage):
                computed, num_resumed = (
                    after.value(name) - before.value(name)
                    for name in ("resumed_tokens_computed_total", "resumed_requests_total")
                )
                keeps_all = computed <= num_resumed * (BLOCK_SIZE + num_workers)
                assert keeps_all == (kill is not kill_and_damage), "damage is computed again"
