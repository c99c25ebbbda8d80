"""Requests of other projects' routers: render, generate, read loads, sleep, wake up."""

import json
import threading
import urllib.request
from typing import Any

from tests.support.servers.server import Server, wait_until

CHAT = {
    "messages": [{"role": "user", "content": "The pipeline moves"}],
    "max_tokens": 12,
    "temperature": 0.8,
    "seed": 5,
    "structured_outputs": {"regex": "[a-z ]{4,9}"},
}
"""A request whose output depends on everything that a rendered request has to keep."""
LONG = {"prompt": "The pipeline moves and moves and moves and moves and moves", "max_tokens": 8}


def get(server: Server, path: str) -> Any:
    with urllib.request.urlopen(server.url + path) as answer:
        return json.load(answer)


def check_rendered_requests(server: Server) -> None:
    """A rendered request has the tokens of the request itself."""
    rendered = server.post("/v1/chat/completions/render", CHAT)[1]
    _, direct = server.post("/v1/chat/completions", {**CHAT, "return_token_ids": True})
    status, generated = server.post("/inference/v1/generate", rendered)
    assert status == 200
    (choice,), (expected,) = generated["choices"], direct["choices"]
    assert choice["token_ids"] == expected["token_ids"]
    assert choice["finish_reason"] == expected["finish_reason"]
    assert generated["usage"]["prompt_tokens"] == len(rendered["token_ids"])


def check_loads(server: Server) -> None:
    """Loads are those of the engines, and the model names its origin."""
    get(server, "/v1/loads")
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 40, "ignore_eos": True})
    wait_until(lambda: get(server, "/v1/loads")["loads"][0]["gen_throughput"] > 0)
    (load,) = get(server, "/v1/loads")["loads"]
    info = get(server, "/server_info")
    assert load["max_total_num_tokens"] == info["max_total_num_tokens"] > 1000
    assert load["num_waiting_uncached_tokens"] == 0
    (card,) = get(server, "/v1/models")["data"]
    assert card["root"] == info["model_path"] == info["engine"]["config"]["model"]


def check_sleep(server: Server) -> None:
    """A server sleeps after its running requests, and its prefix cache is empty then."""
    body = {**LONG, "max_tokens": 300, "ignore_eos": True}
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
    thread.start()
    wait_until(lambda: get(server, "/load")["server_load"] > 0)
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
