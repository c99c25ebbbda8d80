"""Steering a real server: abort, sleep, prefix cache, profiles, and what it tells of itself."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server, serving, wait_until
from tests.e2e.test_serving import gauge

CHAT = {
    "messages": [{"role": "user", "content": "The pipeline moves"}],
    "max_tokens": 12,
    "temperature": 0.8,
    "seed": 5,
    "structured_outputs": {"regex": "[a-z ]{4,9}"},
}
"""A request whose output depends on everything that a rendered request has to keep."""
LONG = {"prompt": "The pipeline moves and moves and moves and moves and moves", "max_tokens": 8}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def server(tiny_model: Path, profiles: Path) -> Iterator[Server]:
    log = str(profiles / "steps.jsonl")
    flags = ["--pp", "2", "--kv-cache-memory", "64MiB", "--profile-dir", str(profiles)]
    with serving(tiny_model, *flags, "--step-log", log) as started:
        yield started


def get(server: Server, path: str) -> Any:
    with urllib.request.urlopen(server.url + path) as answer:
        return json.load(answer)


def cached(server: Server) -> int:
    answer = server.post("/v1/completions", LONG)[1]
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_prefix_cache_forgets(server: Server) -> None:
    cached(server)
    assert cached(server) > 0
    assert server.post("/reset_prefix_cache", b"")[0] == 200
    assert cached(server) == 0
    assert cached(server) > 0


def test_abort_ends_a_running_request_and_frees_its_blocks(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "request_id": "long", "n": 2}
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
    thread.start()
    aborted = []

    def abort() -> bool:
        aborted.append(server.post("/abort", {"request_id": "long"})[1]["aborted"])
        return bool(aborted[-1])

    wait_until(abort)
    thread.join()
    status, answer = answers[0]
    assert status == 200
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
    assert answer["usage"]["completion_tokens"] < 1000
    wait_until(lambda: gauge(server, "kv_cache_usage_perc") == 0)


def test_a_profile_is_a_trace_of_every_stage(server: Server, profiles: Path) -> None:
    assert server.post("/stop_profile", b"")[0] == 409
    assert server.post("/start_profile", b"")[0] == 200
    assert server.post("/start_profile", b"")[0] == 409
    server.post("/v1/completions", LONG)
    assert server.post("/stop_profile", b"")[0] == 200
    for stage in range(2):
        (file,) = profiles.glob(f"stage-{stage}-*.json")
        events = json.loads(file.read_text())["traceEvents"]
        assert any(event.get("name", "").startswith("step ") for event in events)


def test_server_info(server: Server) -> None:
    told = get(server, "/server_info")
    assert told["engine"]["layers"] == [2, 2]
    assert told["engine"]["config"]["scheduler"]["block_size"] == 16


def test_a_rendered_request_has_the_tokens_of_the_request(server: Server) -> None:
    rendered = server.post("/v1/chat/completions/render", CHAT)[1]
    _, direct = server.post("/v1/chat/completions", {**CHAT, "return_token_ids": True})
    status, generated = server.post("/inference/v1/generate", rendered)
    assert status == 200
    (choice,), (expected,) = generated["choices"], direct["choices"]
    assert choice["token_ids"] == expected["token_ids"]
    assert choice["finish_reason"] == expected["finish_reason"]
    assert generated["usage"]["prompt_tokens"] == len(rendered["token_ids"])


def test_loads_are_those_of_the_engine(server: Server) -> None:
    get(server, "/v1/loads")
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 40, "ignore_eos": True})
    wait_until(lambda: get(server, "/v1/loads")["loads"][0]["gen_throughput"] > 0)
    (load,) = get(server, "/v1/loads")["loads"]
    info = get(server, "/server_info")
    assert load["max_total_num_tokens"] == info["max_total_num_tokens"] > 1000
    assert load["num_waiting_uncached_tokens"] == 0
    (card,) = get(server, "/v1/models")["data"]
    assert card["root"] == info["model_path"] == info["engine"]["config"]["model"]


def test_a_server_sleeps_after_its_running_requests(server: Server) -> None:
    body = {**LONG, "max_tokens": 300, "ignore_eos": True}
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
    thread.start()
    wait_until(lambda: gauge(server, "num_requests_running") > 0)
    assert server.post("/sleep?level=1", b"")[0] == 200
    thread.join()
    assert answers[0][1]["usage"]["completion_tokens"] == 300
    assert get(server, "/is_sleeping") == {"is_sleeping": True}
    assert get(server, "/health") == {"status": "ok", "state": "sleeping"}
    status, refused = server.post("/v1/completions", body)
    assert (status, refused["error"]["code"]) == (503, "engine_sleeping")
    assert server.post("/wake_up", b"")[0] == 200
    _, answer = server.post("/v1/completions", {**body, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
