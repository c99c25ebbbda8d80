"""A chat with a hybrid model: later turns reuse the earlier ones, also after a stage's death."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.conftest import make_once
from tests.support.models.tiny_models import FAMILIES, sizes
from tests.support.servers.metrics import scrape
from tests.support.servers.nodes import EXACT
from tests.support.servers.recovery_load import CHAT, RECOVERY
from tests.support.servers.server import Server, serving, stages
from tests.support.text.tokenizers import CHATML, byte_level, save

NUM_TURNS = 10
PROMPT_TOKENS = 8000
"""Least number of tokens of the first turn's prompt."""
ANSWER_TOKENS = 70
DIGIT_BIAS = {str(token): 100.0 for token in (byte_level().token_to_id(str(d)) for d in range(10))}
"""The tokenizer has no merges of digits, so that the tokens of an answer are those of its text."""
KILLED_TURN = 5


class Turn(NamedTuple):
    """Answer to one turn, and its usage."""

    logprobs: list[tuple[str, float]]
    """Text and log-probability of each token."""
    num_prompt_tokens: int
    num_cached_tokens: int


def save_hybrid(folder: Path) -> None:
    """Write a random Qwen3.5 of four layers, two of them recurrent, with a chat template."""
    import torch
    import transformers

    torch.manual_seed(0)
    options = sizes(FAMILIES["qwen3.5"]) | {"vocab_size": 402, "max_position_embeddings": 16384}
    config = transformers.Qwen3_5TextConfig(**options, initializer_range=0.2)
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)
    save(folder, byte_level(), chat_template=CHATML)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model of `save_hybrid`; nobody writes to it."""
    return make_once(tmp_path_factory, "hybrid", save_hybrid)


def system_prompt() -> str:
    """A text of at least PROMPT_TOKENS tokens, without repetitions of its beginning."""
    tokenizer, length = byte_level(), 0
    lines: list[str] = []
    while length < PROMPT_TOKENS:
        lines.append(f"Rule {len(lines)}: the pipeline moves {len(lines) * 7} tokens.\n")
        length += len(tokenizer.encode(lines[-1]).ids)
    return "".join(lines)


def chat(server: Server, on_token: Callable[[int, int], None] | None = None) -> Iterator[Turn]:
    """Hold a greedy chat of NUM_TURNS turns.

    on_token: called with the turn's number and the number of events so far, at each event.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": system_prompt()}]
    for number in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"Question {number}: how many are left now?"})
        body = {
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "logit_bias": DIGIT_BIAS,
            "logprobs": True,
            "stream_options": {"include_usage": True},
        }
        logprobs: list[tuple[str, float]] = []
        usage = None
        for count, event in enumerate(server.stream(CHAT, body)):
            for choice in event["choices"]:
                entries = (choice.get("logprobs") or {}).get("content") or []
                logprobs += [(entry["token"], entry["logprob"]) for entry in entries]
            usage = event.get("usage") or usage
            if on_token is not None:
                on_token(number, count)
        assert usage is not None
        details = usage["prompt_tokens_details"] or {}
        yield Turn(logprobs, usage["prompt_tokens"], details.get("cached_tokens") or 0)
        text = "".join(token for token, _ in logprobs)
        assert len(text) == ANSWER_TOKENS
        messages.append({"role": "assistant", "content": text})


@pytest.mark.full
def test_ten_turns_over_a_long_prompt(hybrid: Path) -> None:
    with serving(hybrid, *EXACT, "--no-prefix-cache") as server:
        expected = [turn.logprobs for turn in chat(server)]
        assert scrape(server).value("prefix_cache_hits_total") == 0
    assert len(set(map(tuple, expected))) == NUM_TURNS
    with serving(hybrid, *EXACT) as server:
        turns = list(chat(server))
        hits = scrape(server).value("prefix_cache_hits_total")
    assert [turn.logprobs for turn in turns] == expected
    assert turns[0].num_prompt_tokens >= PROMPT_TOKENS
    earlier = [turn.num_prompt_tokens + ANSWER_TOKENS for turn in turns[:-1]]
    reused = [turn.num_cached_tokens for turn in turns[1:]]
    assert sum(reused) == hits
    print(f"tokens of earlier turns {earlier}, reused {reused}: {sum(reused) / sum(earlier):.4f}")
    assert all(cached >= 0.95 * total for cached, total in zip(reused, earlier, strict=True))
    # With states at every block boundary, only the last, incomplete block would be computed again.
    assert all(total - cached < 32 for cached, total in zip(reused, earlier, strict=True))

    with serving(hybrid, *EXACT, *RECOVERY, "--pp", "2") as server:

        def kill(turn: int, count: int) -> None:
            if (turn, count) == (KILLED_TURN, ANSWER_TOKENS // 3):
                os.kill(stages(server.pid)[1], signal.SIGKILL)

        after_death = list(chat(server, kill))
        assert scrape(server).value("recoveries_total") == 1
    assert [turn.logprobs for turn in after_death] == expected
    reused = [turn.num_cached_tokens for turn in after_death[1:]]
    print(f"with a stage killed in turn {KILLED_TURN}: reused {reused}")
    assert all(cached >= 0.95 * total for cached, total in zip(reused, earlier, strict=True))
