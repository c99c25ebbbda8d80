"""Streams of different lengths of prompts at once, for the tests of what survives a death."""

import threading
import time
from typing import Any

from tests.support.servers.recovery_load import COMPLETIONS
from tests.support.servers.server import Server

NUM_STREAMS = 16
NUM_TOKENS = 90
NUM_EVENTS = NUM_STREAMS * NUM_TOKENS
"""Events of all streams together; with guesses there are fewer."""
PROMPT = "Once upon a time there lived a fox who knew every path of the old forest. "


class Streams:
    """Streams of a server, each with a seed of its own."""

    def __init__(self, server: Server) -> None:
        """Start the streams."""
        self._server = server
        self.num_events = 0
        self._texts = [""] * NUM_STREAMS
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
            self._texts[number] += event["choices"][0]["text"]
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
        return self._texts
