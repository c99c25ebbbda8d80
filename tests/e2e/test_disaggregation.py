"""One engine prefills and another one decodes: the same text, and the KV blocks travel."""

import os
import signal
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import pytest

from tests.e2e.conftest import GREEDY, Undisturbed, fetched_greedy_tokens, greedy_tokens
from tests.support.servers.fleet import Router
from tests.support.servers.nodes import EXACT
from tests.support.servers.recovery_load import (
    COMPLETIONS,
    REQUESTS,
    Load,
    RepeatedLoad,
    compare,
)
from tests.support.servers.server import children, children_titled, wait_until

BODY = {"prompt": "The owl said", "temperature": 0, "ignore_eos": True, "max_tokens": 8}
PREFILL, DECODE = "prefiller", "decoder"
COUNTERS = ("prefill_tokens", "decode_tokens", "fetched_tokens", "failed_fetches")


class Pair(NamedTuple):
    """A router with an engine for each phase, and the answers of one engine that does both."""

    router: Router
    alone: Undisturbed

    def start(self, name: str, backend: str) -> None:
        """Start the engine of a phase."""
        role = "prefill" if name == PREFILL else "decode"
        flags = ["--role", role, "--kv-transfer", backend, "--kv-fetch", "always"]
        self.router.start_engine(name, *EXACT, *flags)

    def wait_until_connected(self) -> None:
        """Wait until both engines give and fetch KV blocks."""
        self.router.wait_until_ready(PREFILL, DECODE)
        wait_until(lambda: all(row["has_kv_transfer"] for row in self.router.rows().values()))

    def stats(self, name: str) -> dict[str, Any]:
        """Statistics of an engine's scheduler."""
        values: dict[str, Any] = self.router.rows()[name]["stats"]
        return values

    def wait_until_empty(self) -> None:
        """Wait until no engine has a request or a held block."""
        names = ("running", "waiting", "held_blocks", "fetching", "kv_usage")

        def is_empty() -> bool:
            rows = [row["stats"] for row in self.router.rows().values()]
            return not any(row[name] for row in rows for name in names)

        wait_until(is_empty)

    def mover(self, name: str) -> int | None:
        """Process id of an engine's gllm-link; None between two of them."""
        return next(iter(children_titled(self.router.engines[name].process.pid, "gllm-link")), None)


@pytest.fixture(scope="module")
def pair(undisturbed: Undisturbed) -> Iterator[Pair]:
    router = Router("demo", "--preset", "distserve")
    try:
        started = Pair(router, undisturbed)
        started.start(PREFILL, "auto")
        started.start(DECODE, "shm")
        started.wait_until_connected()
        yield started
    finally:
        router.close()


def check_100_prompts(pair: Pair) -> None:
    """Each token of a prompt is computed once, by one engine, and fetched once by the other one."""
    before = {name: pair.stats(name) for name in (PREFILL, DECODE)}
    assert pair.router.post("/reset_prefix_cache", {})[0] == 200
    assert fetched_greedy_tokens(pair.router) == pair.alone.token_ids
    pair.wait_until_empty()

    def grown(name: str) -> list[int]:
        after = pair.stats(name)
        return [after[counter] - before[name][counter] for counter in COUNTERS]

    num_prompts, num_tokens = len(GREEDY["prompt"]), sum(map(len, GREEDY["prompt"]))
    assert grown(PREFILL) == [num_tokens, 0, 0, 0]
    assert grown(DECODE) == [0, num_prompts * (GREEDY["max_tokens"] - 1), num_tokens, 0]


def test_100_prompts_have_the_text_of_one_engine(pair: Pair) -> None:
    check_100_prompts(pair)


def test_token_1_is_streamed_once_and_at_once(pair: Pair) -> None:
    body = {**BODY, "return_token_ids": True}
    fetched = pair.stats(DECODE)["fetched_tokens"]
    whole = pair.router.post(COMPLETIONS, body)[1]
    chunks = list(pair.router.stream(COMPLETIONS, body))
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    parts = [choice["token_ids"] for choice in choices if choice.get("token_ids")]
    assert [*chain(*parts)] == whole["choices"][0]["token_ids"]
    assert len(parts[0]) == 1, "token 1 does not wait for the decode engine"
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == BODY["max_tokens"]
    # Of both requests: the next test counts from here.
    fetched += 2 * whole["usage"]["prompt_tokens"]
    wait_until(lambda: pair.stats(DECODE)["fetched_tokens"] == fetched)


def test_the_text_of_token_1_ends_the_request(pair: Pair) -> None:
    whole = pair.router.post(COMPLETIONS, {**BODY, "max_tokens": 1})[1]["choices"][0]["text"]
    fetched = pair.stats(DECODE)["fetched_tokens"]
    answer = pair.router.post(COMPLETIONS, {**BODY, "stop": whole})[1]
    assert answer["choices"][0]["finish_reason"] == "stop"
    pair.wait_until_empty()
    assert pair.stats(DECODE)["fetched_tokens"] == fetched


def test_requests_of_all_kinds_have_the_text_of_one_engine(pair: Pair) -> None:
    compare(Load(pair.router, "apart").wait(), pair.alone.answers)
    pair.wait_until_empty()


def test_roles_change_under_load(pair: Pair) -> None:
    """T7: both ways; no request is lost or moved, and no process restarts."""
    router = pair.router

    def processes() -> list[list[int]]:
        pids = [engine.process.pid for engine in router.engines.values()]
        return [[pid, *children(pid)] for pid in pids]

    before, losses = processes(), router.losses()
    load = RepeatedLoad(router, "roles change")
    load.wait_for_events(len(REQUESTS))
    for role in ("decode", "prefill"):
        router.change_role(PREFILL, role)
    body = {"worker_url": DECODE, "new_role": "prefill"}
    assert router.post("/pd_role_switch", body)[1]["old_role"] == "decode"
    router.change_role(DECODE, "decode")
    num_events = load.num_events
    load.wait_for_events(num_events + len(REQUESTS))
    for answer in load.stop():
        compare({answer.kind: answer}, pair.alone.answers)
    assert (processes(), router.losses()) == (before, losses)
    pair.wait_until_empty()


@pytest.mark.parametrize("victim", [pytest.param(PREFILL, marks=pytest.mark.full), DECODE])
def test_a_mover_that_dies_is_replaced(pair: Pair, victim: str) -> None:
    mover = pair.mover(victim)
    assert mover is not None
    os.kill(mover, signal.SIGKILL)
    assert greedy_tokens(pair.router) == pair.alone.token_ids
    wait_until(lambda: pair.mover(victim) not in (None, mover))
    pair.wait_until_connected()
    fetched = pair.stats(DECODE)["fetched_tokens"]

    def fetches() -> bool:
        # Until the router has learnt where the new mover listens, a prompt is computed anew.
        assert pair.router.post(COMPLETIONS, BODY)[0] == 200
        return pair.stats(DECODE)["fetched_tokens"] > fetched

    wait_until(fetches)
    pair.wait_until_empty()


@pytest.mark.full
def test_blocks_travel_as_frames(pair: Pair) -> None:
    pair.router.engines.pop(DECODE).close()
    wait_until(lambda: DECODE not in pair.router.rows())
    pair.start(DECODE, "tcp")
    pair.wait_until_connected()
    check_100_prompts(pair)
