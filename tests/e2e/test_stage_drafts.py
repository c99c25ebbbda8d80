"""Servers whose last stage drafts: texts as without, also after deaths and with ranks."""

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
DRAFT = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3}
"""The served model drafts for itself: what is not right is not due to the model."""


def acceptance(server: Server) -> float:
    """Share of the guesses so far that were right."""
    metrics = scrape(server)
    guessed, right = (
        metrics.value(f"spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")
    )
    assert guessed > 100
    return right / guessed


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    guess = ["--speculative-config", json.dumps(DRAFT)]
    with serving("demo", "--pp", "2", *guess, *RECOVERY, *EXACT) as started:
        yield started


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_dies_while_the_last_one_drafts(
    server: Server, expected: dict[str, Answer], stage: int
) -> None:
    wait_until_ready(server)
    num_before = scrape(server).value("recoveries_total")
    load = Load(server, f"stage {stage}")
    load.wait_for_events(2 * len(REQUESTS))
    os.kill(stages(server.pid)[stage], signal.SIGKILL)
    compare(load.wait(), expected)
    wait_until_ready(server)
    assert scrape(server).value("recoveries_total") == num_before + 1
    # Grammars, penalties and biases change what is right.
    assert acceptance(server) > 0.7


def test_ranks_of_the_last_stage() -> None:
    """Rank 0 drafts alone, with the whole draft model."""
    request = {"prompt": "The owl said", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    texts, shares = [], []
    for guess in ([], ["--speculative-config", json.dumps(DRAFT)]):
        with serving("demo", "--tp", "2", *guess, *EXACT) as started:
            for _ in range(3):
                _, answer = started.post("/v1/completions", request)
                texts.append(answer["choices"][0]["text"])
            if guess:
                shares.append(acceptance(started))
    assert len(set(texts)) == 1
    # Ranks add up parts of sums, which may round otherwise than the draft's.
    assert shares[0] > 0.95
