"""Workers die under many streams, and nearly nothing is computed again."""

import os
import signal
import threading
import time
from typing import Any

import pytest

from tests.support.servers.metrics import scrape
from tests.support.servers.nodes import EXACT
from tests.support.servers.recovery_load import COMPLETIONS, wait_until_ready
from tests.support.servers.residue import leaks, owned_resources
from tests.support.servers.server import Server, places, serving, wait_until

NUM_STREAMS = 16
NUM_TOKENS = 90
BLOCK_SIZE = 16
WAIT = ["--recovery-timeout", "300"]
"""Requests wait for a restarted worker, however long its start takes here."""
PROMPT = "Once upon a time there lived a fox who knew every path of the old forest. "


class Streams:
    """Streams of different lengths of prompts, each with a seed of its own."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.num_events = 0
        self.texts = [""] * NUM_STREAMS
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(NUM_STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        body: dict[str, Any] = {
            "prompt": f"{number}. {PROMPT * (number % 5)}",
            "seed": number,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
        }
        for event in self._server.stream(COMPLETIONS, body):
            self.texts[number] += event["choices"][0]["text"]
            self.num_events += 1

    def wait_for_events(self, number: int) -> None:
        """Wait until the streams have got that many events together."""
        while self.num_events < number:
            assert any(thread.is_alive() for thread in self._threads), "they have ended before"
            time.sleep(0.002)

    def wait(self) -> list[str]:
        """Return the texts once all streams have ended."""
        for thread in self._threads:
            thread.join()
        return self.texts


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
            streams.wait_for_events(NUM_STREAMS * NUM_TOKENS // 2)
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
            if owned is None:
                owned = owned_resources([server.pid])
        wait_until(lambda: not leaks(owned or {}))


@pytest.mark.full
def test_without_a_prefix_cache_all_is_computed_again() -> None:
    with serving("demo", "--pp", "2", "--no-prefix-cache", *WAIT, *EXACT) as server:
        expected = Streams(server).wait()
        streams = Streams(server)
        streams.wait_for_events(NUM_STREAMS * NUM_TOKENS // 2)
        os.kill(places(server.pid)["1"], signal.SIGKILL)
        assert streams.wait() == expected
        metrics = scrape(server)
        assert metrics.value("resumed_tokens_cached_total") == 0
        assert metrics.value("resumed_tokens_computed_total") > 0
