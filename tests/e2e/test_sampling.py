"""Sampling fields over real processes: evaluation harnesses, penalties, bad words, seeds."""

import math
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.servers.pool import (
    TINY_FOUR_STAGES,
    TINY_ONE_STAGE,
    TINY_TWO_STAGES,
    share,
)
from tests.support.servers.server import Server

PATH = "/v1/completions"
PROMPT = "The pipeline moves tokens from stage to stage"
PENALIZED = {
    "temperature": 1.1,
    "seed": 11,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "logit_bias": {"40": 2, "41": -5},
    "ignore_eos": True,
    "return_token_ids": True,
}


server = share(
    TINY_TWO_STAGES,
    pytest.param(TINY_ONE_STAGE, marks=pytest.mark.full),
    pytest.param(TINY_FOUR_STAGES, marks=pytest.mark.full),
)


@pytest.fixture(scope="module")
def exact(tiny_model: Path) -> Any:
    """A function from token ids to transformers' log-probabilities of what follows each."""
    import torch
    import transformers

    model = transformers.Qwen3ForCausalLM.from_pretrained(tiny_model).eval()

    def logprobs(tokens: list[int]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return logprobs


def ask(server: Server, **fields: Any) -> list[dict[str, Any]]:
    status, answer = server.post(PATH, {"prompt": PROMPT, "temperature": 0, **fields})
    assert status == 200, answer
    return answer["choices"]


def test_what_an_evaluation_harness_asks(server: Server, exact: Any) -> None:
    """Prompts of many chunks, and of less than one; twice, so that the cache is warm."""
    prompts = [[(7 * i + k) % 300 + 5 for i in range(length)] for k, length in ((0, 200), (1, 9))]
    fields = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True}
    first, again = ask(server, **fields), ask(server, **fields)
    alone = ask(server, **{**fields, "max_tokens": 0})
    for choice, same, bare, prompt in zip(first, again, alone, prompts, strict=True):
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(told["text_offset"]) == len(prompt) + 1
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        wanted = exact(prompt)
        for position in range(1, len(prompt)):
            row = wanted[position - 1]
            value = told["token_logprobs"][position]
            assert value == pytest.approx(row[prompt[position]].item(), abs=1e-3)
            best = max(told["top_logprobs"][position].values())
            assert best == pytest.approx(row.max().item(), abs=1e-3)
            assert (value == best) == (int(row.argmax()) == prompt[position])
        assert same["logprobs"]["token_logprobs"] == pytest.approx(
            told["token_logprobs"], abs=1e-3, nan_ok=False
        )
        lines = bare["logprobs"]["token_logprobs"]
        assert lines[1:] == pytest.approx(told["token_logprobs"][1:-1], abs=1e-3)
        assert bare["finish_reason"] == "length"


def test_output_logprobs_are_those_of_transformers(server: Server, exact: Any) -> None:
    fields = {"logprobs": 3, "max_tokens": 8, "return_token_ids": True, "prompt": [5, 6, 7]}
    (choice,) = ask(server, **fields, presence_penalty=1.5, temperature=0.7, seed=3)
    tokens = [5, 6, 7, *choice["token_ids"]]
    rows = exact(tokens)[2:-1]
    wanted = [rows[i, token].item() for i, token in enumerate(choice["token_ids"])]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(wanted, abs=1e-3)
    told = [
        value
        for event in server.stream(PATH, {**fields, "temperature": 0.7, "seed": 3})
        for value in event["choices"][0]["logprobs"]["token_logprobs"]
    ]
    assert len(told) == 8


def test_a_seed_decides_with_penalties_too(server: Server) -> None:
    alone = [choice["token_ids"] for choice in ask(server, **PENALIZED, n=3, max_tokens=30)]
    crowd = [PROMPT, "x", "y" * 50]
    together = ask(server, **{**PENALIZED, "prompt": crowd}, n=3, max_tokens=30)
    assert [choice["token_ids"] for choice in together[:3]] == alone
    assert len({tuple(ids) for ids in alone}) == 3
    streamed = server.stream(PATH, {**PENALIZED, "prompt": PROMPT, "max_tokens": 30})
    assert [i for e in streamed for i in e["choices"][0]["token_ids"]] == alone[0]


def test_bad_words_never_come(server: Server) -> None:
    (plain,) = ask(server, max_tokens=24, ignore_eos=True)
    assert "two words" in plain["text"]
    (other,) = ask(server, max_tokens=24, ignore_eos=True, bad_words=["two words"])
    assert len(other["text"]) > 5
    assert "two words" not in other["text"]


def test_allowed_tokens_and_bias(server: Server) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    (choice,) = ask(server, **fields, allowed_token_ids=[40, 50, 60], temperature=2, seed=1)
    assert set(choice["token_ids"]) <= {40, 50, 60}
    (choice,) = ask(server, **fields, logit_bias={"77": 100})
    assert choice["token_ids"] == [77] * 12
    (choice,) = ask(server, **fields, allowed_token_ids=[5, 6, 7, 8], frequency_penalty=2)
    assert len(set(choice["token_ids"])) == 4


def test_what_stopped_is_shown_where_asked(server: Server) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    (plain,) = ask(server, **fields)
    stop = plain["text"][4:6]
    (cut,) = ask(server, **fields, stop=stop)
    (kept,) = ask(server, **fields, stop=stop, include_stop_str_in_output=True)
    assert kept["text"] == cut["text"] + stop
    assert kept["token_ids"] == cut["token_ids"]
    assert kept["logprobs"]["tokens"] == plain["logprobs"]["tokens"][: len(kept["token_ids"])]
    (same,) = ask(server, **fields, allowed_token_ids=[77, 78], stop_token_ids=[77, 78])
    assert same["text"] == ""
    asked = {"stop_token_ids": [77, 78], "include_stop_str_in_output": True}
    (shown,) = ask(server, **fields, allowed_token_ids=[77, 78], **asked)
    assert shown["token_ids"] == same["token_ids"] == [shown["stop_reason"]]
    assert shown["text"] == shown["logprobs"]["tokens"][0] != ""


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [9], "min_tokens": 2},
        {"structured_outputs": {"json": {"type": "object"}}},
    ],
)
def test_impossible_bans_end_one_request(server: Server, fields: dict[str, Any]) -> None:
    status, answer = server.post(PATH, {"prompt": PROMPT, "allowed_token_ids": [9], **fields})
    assert (status, answer["error"]["param"]) == (400, "allowed_token_ids")
    assert len(ask(server, max_tokens=2)) == 1


def test_the_openai_client(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=6,
        logprobs=True,
        top_logprobs=4,
        temperature=0,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content
    assert content is not None
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert sum(math.exp(other.logprob) for other in entry.top_logprobs) <= 1.001
    client.close()
