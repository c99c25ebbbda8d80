"""Steering a real server: abort, sleep, prefix cache, profiles, and what it tells of itself."""

import json
import threading
from pathlib import Path

import pytest

from tests.support.servers import conventions
from tests.support.servers.conventions import LONG, get
from tests.support.servers.metrics import gauge
from tests.support.servers.pool import SMALL, TINY_TWO_STAGES, share
from tests.support.servers.server import Server, serving, wait_until

server = share(TINY_TWO_STAGES)


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


@pytest.mark.full
def test_a_profile_is_a_trace_of_every_stage(tiny_model: Path, tmp_path: Path) -> None:
    log = str(tmp_path / "steps.jsonl")
    flags = ["--pp", "2", *SMALL, "--profile-dir", str(tmp_path), "--step-log", log]
    with serving(tiny_model, *flags) as server:
        assert server.post("/stop_profile", b"")[0] == 409
        assert server.post("/start_profile", b"")[0] == 200
        assert server.post("/start_profile", b"")[0] == 409
        server.post("/v1/completions", LONG)
        assert server.post("/stop_profile", b"")[0] == 200
    for stage in range(2):
        (file,) = tmp_path.glob(f"stage-{stage}-*.json")
        events = json.loads(file.read_text())["traceEvents"]
        assert any(event.get("name", "").startswith("step ") for event in events)


def test_server_info(server: Server) -> None:
    told = get(server, "/server_info")
    assert told["engine"]["layers"] == [2, 2]
    assert told["engine"]["config"]["scheduler"]["block_size"] == 16


def test_routers_of_other_projects_can_use_it(server: Server) -> None:
    conventions.check_rendered_requests(server)
    conventions.check_loads(server)
    conventions.check_sleep(server)
