"""Two engines that a router of another project directs, and roles that change under load."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from gllm.engine.attachment.attachment import LOAD_REPORT_SECONDS
from gllm.scheduler.kv_holds import HOLD_LEASE_SECONDS
from tests.support.servers.fleet import Router
from tests.support.servers.http_pair import BODIES, Pair, serving_pair
from tests.support.servers.recovery_load import REQUESTS, Answer, RepeatedLoad, compare
from tests.support.servers.server import wait_until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serving_pair(tmp_path_factory.mktemp("keys")) as started:
        yield started


def text_of(answer: Any) -> str:
    choice = answer["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_the_decode_engine_computes_no_prompt(pair: Pair, path: str, dialect: str) -> None:
    """Its text is that of one engine, and of the prompt it computes the last token alone."""
    expected = pair.post("p", path, **BODIES[path])
    body: dict[str, Any] = {**BODIES[path], "cache_salt": f"{dialect} {path}"}
    # Blocks were held before this test too; the router knows of them by then.
    time.sleep(3 * LOAD_REPORT_SECONDS)
    before, held = pair.computed("d"), pair.held_blocks("p")
    if dialect == "vllm":
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        first = pair.post("p", path, **{**body, "max_tokens": 1}, kv_transfer_params=asked)
        answer = pair.post("d", path, **body, kv_transfer_params=first["kv_transfer_params"])
    else:
        first, answer = send_to_both(pair, path, {**body, "bootstrap_room": 2**62 + len(path)})
    assert first["usage"]["completion_tokens"] == 1
    assert text_of(answer) == text_of(expected)
    assert pair.computed("d") == before + 1
    # Long before the lease ends, they are free where they were computed.
    time.sleep(3 * LOAD_REPORT_SECONDS)  # the router knows of them by then
    wait_until(lambda: pair.held_blocks("p") <= held, seconds=HOLD_LEASE_SECONDS / 2)
    # Blocks of a foreign hand-off never get into the prefix cache.
    again = pair.post("d", path, **body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert text_of(again) == text_of(expected)


def send_to_both(pair: Pair, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """The answers of both engines to a request of a router of SGLang."""
    body = {**body, "bootstrap_host": "127.0.0.1", "bootstrap_port": pair.ports["p"]}
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(pair.post("p", path, **body)))
    thread.start()
    answer = pair.post("d", path, **body)
    thread.join()
    return first[0], answer


def has_roles(router: Router, roles: dict[str, str]) -> bool:
    return {name: row["role"] for name, row in router.rows().items()} == roles


def test_roles_are_changed_at_the_engines_too(pair: Pair, expected: dict[str, Answer]) -> None:
    """T7: by commands of the engines, under load."""
    router = pair.router
    load = RepeatedLoad(router, "roles change")
    load.wait_for_events(2 * len(REQUESTS))
    router.change_role("p", "decode")
    router.change_role("d", "prefill")
    for name, role in (("p", "prefill"), ("d", "decode")):
        assert pair.post(name, "/pd_role_switch", new_role=role)["success"]
    wait_until(partial(has_roles, router, {"p": "prefill", "d": "decode"}))
    for answer in load.stop():
        compare({answer.kind: answer}, expected)
