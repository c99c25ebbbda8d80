"""Workers die while guesses are in flight: the texts are those without speculation."""

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.servers.metrics import scrape
from tests.support.servers.nodes import EXACT
from tests.support.servers.recovery_load import (
    RECOVERY,
    REQUESTS,
    Answer,
    Load,
    compare,
    wait_until_ready,
)
from tests.support.servers.server import Server, serving, stages

pytestmark = pytest.mark.full
CONFIG = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Three stages; n-grams of one token guess as often as they can, mostly wrong."""
    guess = ["--speculative-config", json.dumps({**CONFIG, "prompt_lookup_max": 3})]
    with serving("demo", "--pp", "3", *guess, *RECOVERY, *EXACT) as started:
        yield started


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_dies_with_windows_in_flight(
    server: Server, expected: dict[str, Answer], stage: int
) -> None:
    wait_until_ready(server)
    num_before = scrape(server).value("recoveries_total")
    load = Load(server, f"stage {stage}")
    load.wait_for_events(2 * len(REQUESTS))
    os.kill(stages(server.pid)[stage], signal.SIGKILL)
    compare(load.wait(), expected)
    wait_until_ready(server)
    after = scrape(server)
    assert after.value("recoveries_total") == num_before + 1
    guessed, right = (
        after.value(f"spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")
    )
    assert guessed > right > 0
