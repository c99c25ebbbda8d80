"""A server over real processes: answers, foreign client, malformed requests, an idle machine."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.frontend.test_errors import TABLE
from tests.frontend.test_every_field import refused_bodies
from tests.support.servers.metrics import by_stage, gauge
from tests.support.servers.pool import (
    TINY_FOUR_STAGES,
    TINY_ONE_STAGE,
    TINY_TWO_STAGES,
    share,
)
from tests.support.servers.server import (
    Server,
    cpu_seconds,
    owned_bytes,
    serving,
    stages,
    wait_until,
)

TEXT = {"prompt": "The pipeline moves", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


one_stage = share(TINY_ONE_STAGE)
server = share(
    TINY_TWO_STAGES,
    pytest.param(TINY_ONE_STAGE, marks=pytest.mark.full),
    pytest.param(TINY_FOUR_STAGES, marks=pytest.mark.full),
)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> list[int]:
    """What transformers generates for TEXT."""
    import torch
    import transformers

    model = transformers.Qwen3ForCausalLM.from_pretrained(tiny_model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    tokens = tokenizer(TEXT["prompt"])["input_ids"]
    prompt_len = len(tokens)
    with torch.inference_mode():
        for _ in range(24):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[prompt_len:]


def test_the_answer_is_that_of_transformers(server: Server, reference: list[int]) -> None:
    check_answer(server, reference)


def test_the_answer_of_one_stage_is_that_of_transformers(
    one_stage: Server, reference: list[int]
) -> None:
    check_answer(one_stage, reference)


def check_answer(server: Server, reference: list[int]) -> None:
    """Check an answer, whole and streamed."""
    status, answer = server.post("/v1/completions", {**TEXT, "return_token_ids": True})
    assert status == 200
    assert answer["choices"][0]["token_ids"] == reference
    streamed = list(server.stream("/v1/completions", {**TEXT, "return_token_ids": True}))
    assert [t for e in streamed for t in e["choices"][0]["token_ids"]] == reference
    assert "".join(e["choices"][0]["text"] for e in streamed) == answer["choices"][0]["text"]


def test_a_seed_decides_whatever_else_is_in_the_batch(server: Server) -> None:
    body = {**TEXT, "temperature": 1.2, "seed": 11, "n": 3, "return_token_ids": True}
    alone = server.post("/v1/completions", body)[1]["choices"]
    crowd = {**body, "prompt": [TEXT["prompt"], "x", "y" * 50]}
    together = server.post("/v1/completions", crowd)[1]["choices"]
    ids = [choice["token_ids"] for choice in alone]
    assert [choice["token_ids"] for choice in together[:3]] == ids
    assert len({tuple(i) for i in ids}) == 3


def test_the_openai_client(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    (model,) = client.models.list()
    asked: Any = {
        "model": model.id,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    pieces = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.completion_tokens == 16 or whole.choices[0].finish_reason == "stop"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asked, "model": "other"})
    client.close()


def test_stop_strings_and_ids(server: Server, reference: list[int]) -> None:
    text = server.post("/v1/completions", TEXT)[1]["choices"][0]["text"]
    stop = text[5:8]
    cut = server.post("/v1/completions", {**TEXT, "stop": stop})[1]["choices"][0]
    assert (cut["text"], cut["stop_reason"]) == (text[: text.index(stop)], stop)
    by_id = {**TEXT, "stop_token_ids": [reference[9]], "return_token_ids": True}
    choice = server.post("/v1/completions", by_id)[1]["choices"][0]
    assert choice["token_ids"] == reference[: reference.index(reference[9]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reference[9])


def test_many_at_once_and_a_disconnect(server: Server) -> None:
    prompts = [[5 + i, 7] * (1 + i % 40) for i in range(60)]
    body = {**TEXT, "prompt": prompts, "max_tokens": 8}
    stream = server.stream("/v1/completions", {**TEXT, "max_tokens": 400})
    next(stream)
    stream.close()
    status, answer = server.post("/v1/completions", body)
    assert (status, len(answer["choices"])) == (200, 60)
    wait_until(lambda: gauge(server, "num_requests_running") == 0)
    assert gauge(server, "kv_cache_usage_perc") == 0


def test_every_stage_reports_its_bubbles(server: Server) -> None:
    body = {**TEXT, "prompt": [[5 + i] * 20 for i in range(12)], "max_tokens": 16}
    assert server.post("/v1/completions", body)[0] == 200

    def adds_up() -> bool:
        """While there is work somebody computes, or something is lost."""
        busy = by_stage(server, "stage_busy_seconds_total")
        lost = by_stage(server, "stage_bubble_seconds_total")
        (work,) = by_stage(server, "pipeline_work_seconds_total")
        return len(busy) == len(lost) and 0 < work <= sum(busy) + sum(lost)

    wait_until(adds_up)
    shares = by_stage(server, "stage_bubble_share")
    assert len(shares) == len(stages(server.pid))
    assert all(0 <= share < 1 for share in shares)


@pytest.fixture
def limited(tiny_model: Path) -> Iterator[Server]:
    """A server that refuses what others allow."""
    limits = ["--max-choices", "8", "--max-model-len", "256", "--max-num-queued-requests", "64"]
    with serving(tiny_model, "--pp", "2", *limits) as started:
        yield started


def malformed_bodies() -> list[tuple[str, str, bytes]]:
    """Path, field that is wrong, and body of requests."""
    paths: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}
    }
    paths["/v1/completions"] = {"prompt": "x"}
    bodies = [(p, n, json.dumps({**paths[p], n: v}).encode()) for p, n, v in TABLE]
    return [*bodies, ("/v1/completions", "prompt", json.dumps({"prompt": [5] * 257}).encode())]


@pytest.mark.full
def test_malformed_requests_are_refused_by_name(limited: Server) -> None:
    bodies = malformed_bodies()
    for path, name, body in bodies[:: max(1, len(bodies) // 200)]:
        status, answer = limited.post(path, body)
        assert (status, answer["error"]["param"]) == (400, name)
    assert limited.post("/v1/completions", TEXT)[0] == 200


@pytest.mark.long
def test_malformed_requests_leave_nothing(limited: Server) -> None:
    """2,000 of them, over all endpoints, leave memory where it was.

    They are sent three times. The first time fills caches and heaps. A leak grows every time after
    that, a new thread's heap only once.
    """
    pids = [limited.pid, *limited.workers()]
    more = [(path, body) for path, _, body in malformed_bodies()[::2]] + refused_bodies()
    sizes = []
    for _ in range(3):
        for path, body in more[:: max(1, len(more) // 2000)]:
            status, _ = limited.post(path, body)
            assert 400 <= status < 500, (path, body[:200])
        sizes.append(owned_bytes(pids))
    assert min(sizes[1] - sizes[0], sizes[2] - sizes[1]) <= 2**19
    assert limited.post("/v1/completions", TEXT)[0] == 200


@pytest.mark.full
def test_an_idle_pipeline_uses_no_cpu(server: Server) -> None:
    """After a burst, with a connection kept open: under 2 % of a core over all processes."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    (model,) = client.models.list()
    for _ in range(3):
        client.completions.create(model=model.id, prompt=["x"] * 20, max_tokens=20)
    # Stages report their times twice per second, and once afterwards.
    time.sleep(1.5)
    pids = [server.pid, *server.workers()]
    before, begin = sum(map(cpu_seconds, pids)), time.monotonic()
    time.sleep(3)
    assert sum(map(cpu_seconds, pids)) - before < 0.02 * (time.monotonic() - begin)
    client.close()
