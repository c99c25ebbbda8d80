"""A model small enough to be served for real in tests."""

from pathlib import Path

import pytest

from tests.e2e.nodes import EXACT
from tests.e2e.recovery_load import Answer, Load
from tests.e2e.server import serving
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


@pytest.fixture(scope="session")
def expected() -> dict[str, Answer]:
    """Answers of an engine of one stage on one machine to requests of all kinds."""
    with serving("demo", *EXACT) as server:
        answers = Load(server, "one machine").wait()
    assert all(not answer.errors for answer in answers.values())
    return answers
