"""A model small enough to be served for real in tests, and what one machine answers."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.nodes import EXACT
from tests.e2e.recovery_load import Answer, Load
from tests.e2e.server import Server, serving
from tests.text.tokenizers_for_tests import CHATML, byte_level, save


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of four layers with a tokenizer, a chat template and room for 512 tokens."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("tiny-model")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=402,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=2,
        initializer_range=0.3,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return save(folder, byte_level(), chat_template=CHATML)


class Undisturbed(NamedTuple):
    """Answers of an engine of one stage on one machine."""

    answers: dict[str, Answer]
    """To requests of all kinds."""
    token_ids: list[list[int]]
    """To GREEDY, by prompt."""


GREEDY: dict[str, Any] = {
    "prompt": [random.Random(n).choices(range(300, 2000), k=60 + n) for n in range(100)],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
"""A request with 100 prompts that have nothing in common."""


def greedy_tokens(server: Server) -> list[list[int]]:
    """The output tokens of each prompt of GREEDY."""
    status, body = server.post("/v1/completions", GREEDY)
    assert status == 200, body
    return [choice["token_ids"] for choice in body["choices"]]


@pytest.fixture(scope="session")
def undisturbed() -> Undisturbed:
    """Answers of one machine."""
    with serving("demo", *EXACT) as server:
        return Undisturbed(Load(server, "one machine").wait(), greedy_tokens(server))


@pytest.fixture(scope="session")
def expected(undisturbed: Undisturbed) -> dict[str, Answer]:
    """Answers of one machine to requests of all kinds."""
    assert all(not answer.errors for answer in undisturbed.answers.values())
    return undisturbed.answers
