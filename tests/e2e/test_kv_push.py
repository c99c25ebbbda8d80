"""Long prompts are fetched while they are computed, short ones afterwards, by processes."""

import json
import os
import signal
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.e2e.conftest import GREEDY, Undisturbed
from tests.e2e.test_disaggregation import DECODE, PREFILL, Pair
from tests.support.servers.fleet import Router
from tests.support.servers.recovery_load import COMPLETIONS
from tests.support.servers.server import wait_until

THETA = 100
PROMPTS = GREEDY["prompt"][20:80]
"""On both sides of theta; fewer tokens than those from which on prompts overflow (8,192)."""
EXACT = ["--dtype", "float32", "--threads", "1", "--kv-transfer", "--kv-fetch", "always"]


PRESETS = {
    "splitwise": (),
    "tetri": ("--kv-push", "layer", "--prefill-batch-tokens", str(THETA // 2)),
}
"""With the flags of the engines: with these of tetri, prompts from theta on have several chunks."""


def read_events(step_log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in step_log.read_text().splitlines()]


def read_pushes(step_log: Path) -> list[int]:
    """Return the tickets of the prompts that were served while they were computed."""
    return [
        ticket
        for event in read_events(step_log)
        if event["event"] == "kv" and event["call"] == "take_pushes"
        for ticket in event["ids"]
    ]


def count_prefetches(step_log: Path) -> int:
    """Return the number of prompts that were fetched, or to be, before the request arrived."""
    return sum(event["event"] == "prefetch" for event in read_events(step_log))


def complete(router: Router) -> list[list[int]]:
    """Return the output tokens of each prompt."""
    status, answer = router.post(COMPLETIONS, {**GREEDY, "prompt": PROMPTS})
    assert status == 200
    return [choice["token_ids"] for choice in answer["choices"]]


@pytest.mark.full
@pytest.mark.parametrize("preset", [pytest.param("splitwise", marks=pytest.mark.long), "tetri"])
def test_prompts_from_theta_on_are_pushed_and_a_death_changes_no_text(
    preset: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """S7, S9 and P1, with processes. The last engine answers alone.

    The router of tetri knows the decode engine of a pushed prompt by the report of its first chunk.
    """
    router, logs = Router("demo", "--preset", preset), (tmp_path / "prefill", tmp_path / "decode")
    try:
        flags = [*EXACT, "--preset", preset, *PRESETS[preset], "--kv-push-threshold", str(THETA)]
        for name, role, log in zip((PREFILL, DECODE), ("prefill", "decode"), logs, strict=True):
            router.start_engine(name, *flags, "--role", role, "--step-log", str(log))
        pair = Pair(router, undisturbed)
        wait_until(lambda: router.status("/version") == 200)
        pair.wait_until_connected()
        num_prefilled = pair.stats(DECODE)["prefill_tokens"]
        answers = complete(router)
        pair.wait_until_empty()
        lengths = [len(prompt) for prompt in PROMPTS]
        decode = pair.stats(DECODE)
        assert decode["fetched_tokens"] == sum(lengths)
        assert decode["prefill_tokens"] == num_prefilled
        num_long = sum(length >= THETA for length in lengths)
        assert 0 < num_long < len(PROMPTS)
        wait_until(lambda: len(read_pushes(logs[0])) == num_long)
        wait_until(lambda: count_prefetches(logs[1]) == num_long)

        assert router.post("/reset_prefix_cache", {})[0] == 200
        interrupted: list[list[list[int]]] = []
        load = Thread(target=lambda: interrupted.append(complete(router)))
        load.start()
        wait_until(lambda: pair.stats(PREFILL)["running"] or pair.stats(DECODE)["running"])
        os.killpg(router.engines[DECODE].process.pid, signal.SIGKILL)
        load.join()
        assert interrupted == [answers]
        wait_until(lambda: DECODE not in router.rows())
        assert complete(router) == answers
        pair.wait_until_empty()
    finally:
        router.close()
