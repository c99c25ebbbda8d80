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
from tests.support.servers.server import Server, cpu_seconds, owned_bytes, serving, wait_until

TEXT = {"prompt": "The pipeline moves", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", params=["1", pytest.param("2", marks=pytest.mark.long), "4"])
def server(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Server]:
    flags = ["--pp", request.param, "--served-model-name", "tiny", "--kv-cache-memory", "64MiB"]
    with serving(tiny_model, *flags) as started:
        yield started


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
    assert [model.id for model in client.models.list()] == ["tiny"]
    asked: Any = {
        "model": "tiny",
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


def gauge(server: Server, name: str) -> float:
    """A value from /metrics; the engine reports it with its next step."""
    server.post("/v1/completions", {"prompt": [9], "max_tokens": 1})
    return by_stage(server, name)[0]


def by_stage(server: Server, name: str) -> list[float]:
    """A value from /metrics for each stage; once for what has no stage."""
    import urllib.request

    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(f"gllm:{name}{{")]


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
    assert len(shares) == len(server.workers())
    assert all(0 <= share < 1 for share in shares)


def test_malformed_requests_are_refused_and_leave_nothing(tiny_model: Path) -> None:
    """200 of them named and refused; 2,000 others, over all endpoints, leave memory where it was.

    They are sent three times. The first time fills caches and heaps. A leak grows every time after
    that, a new thread's heap only once.
    """
    limits = ["--max-choices", "8", "--max-model-len", "256", "--max-num-queued-requests", "64"]
    with serving(tiny_model, "--pp", "2", *limits) as server:
        paths: dict[str, Any] = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}
        }
        paths["/v1/completions"] = {"prompt": "x"}
        bodies = [(p, n, json.dumps({**paths[p], n: v}).encode()) for p, n, v in TABLE]
        too_long = json.dumps({"prompt": [5] * 257}).encode()
        bodies += [("/v1/completions", "prompt", too_long)]
        for path, name, body in bodies[:: max(1, len(bodies) // 200)]:
            status, answer = server.post(path, body)
            assert (status, answer["error"]["param"]) == (400, name)
        pids = [server.pid, *server.workers()]
        more = [(path, body) for path, _, body in bodies[::2]] + refused_bodies()
        sizes = []
        for _ in range(3):
            for path, body in more[:: max(1, len(more) // 2000)]:
                status, _ = server.post(path, body)
                assert 400 <= status < 500, (path, body[:200])
            sizes.append(owned_bytes(pids))
        assert min(sizes[1] - sizes[0], sizes[2] - sizes[1]) <= 2**19
        assert server.post("/v1/completions", TEXT)[0] == 200


def test_an_idle_pipeline_uses_no_cpu(server: Server) -> None:
    """After a burst, with a connection kept open: under 2 % of a core over all processes."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    for _ in range(3):
        client.completions.create(model="tiny", prompt=["x"] * 20, max_tokens=20)
    # Stages report their times twice per second, and once afterwards.
    time.sleep(1.5)
    pids = [server.pid, *server.workers()]
    before, begin = sum(map(cpu_seconds, pids)), time.monotonic()
    time.sleep(3)
    assert sum(map(cpu_seconds, pids)) - before < 0.02 * (time.monotonic() - begin)
    client.close()
