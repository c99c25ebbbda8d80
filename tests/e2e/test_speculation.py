"""Workers die while guesses are in flight: the texts are those without speculation."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.servers.metrics import scrape
from tests.support.servers.nodes import EXACT
from tests.support.servers.recovery_load import (
    CHAT,
    LONG_PROMPT,
    MAX_TOKENS,
    RECOVERY,
    REQUESTS,
    TOOL,
    Answer,
    Load,
    compare,
    wait_until_ready,
)
from tests.support.servers.server import Server, serving, stages

pytestmark = pytest.mark.full
CONFIG = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


TOOL_CHAT = {
    "messages": [{"role": "user", "content": LONG_PROMPT + "Remember this story."}],
    "tools": [TOOL],
    "tool_choice": "required",
    "temperature": 0,
    "max_tokens": MAX_TOKENS,
}


@pytest.fixture(scope="module", params=[2, 3])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Stages; n-grams of one token guess as often as they can, mostly wrong."""
    guess = ["--speculative-config", json.dumps({**CONFIG, "prompt_lookup_max": 3})]
    with serving("demo", "--pp", str(request.param), *guess, *RECOVERY, *EXACT) as started:
        yield started


@pytest.mark.parametrize("victim", ["driver", "middle", "last"])
def test_a_stage_dies_with_windows_in_flight(
    server: Server, expected: dict[str, Answer], victim: str
) -> None:
    wait_until_ready(server)
    pids = stages(server.pid)
    if victim == "middle" and len(pids) < 3:
        pytest.skip("two stages have none between")
    stage = {"driver": 0, "middle": 1, "last": len(pids) - 1}[victim]
    num_before = scrape(server).value("recoveries_total")
    load = Load(server, f"stage {stage}")
    load.wait_for_events(2 * len(REQUESTS))
    os.kill(pids[stage], signal.SIGKILL)
    compare(load.wait(), expected)
    wait_until_ready(server)
    after = scrape(server)
    assert after.value("recoveries_total") == num_before + 1
    guessed, right = (
        after.value(f"spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")
    )
    assert guessed > right > 0


def ask(server: Server, salt: str, **fields: Any) -> tuple[Any, int]:
    """Return the message of a chat that calls a tool, and the cached tokens of its prompt."""
    status, answer = server.post(CHAT, {**TOOL_CHAT, "cache_salt": salt, **fields})
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    for call in message["tool_calls"]:
        del call["id"]
    details = answer["usage"]["prompt_tokens_details"] or {}
    return message, details.get("cached_tokens", 0)


def test_tool_calls_are_the_same_with_prefix_hits(server: Server) -> None:
    """The same request, another one with the same prefix, and the same one again."""
    wait_until_ready(server)
    other = {"messages": [{"role": "user", "content": LONG_PROMPT + "And then?"}]}
    message, num_cached = ask(server, "first")
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], message["content"]) == ("remember", None)
    assert json.loads(call["function"]["arguments"])["story"]
    assert num_cached == 0
    another, num_shared = ask(server, "first", **other)
    again, num_cached = ask(server, "first")
    assert num_cached > num_shared > 0
    assert again == message
    assert ask(server, "alone", **other) == (another, 0)
