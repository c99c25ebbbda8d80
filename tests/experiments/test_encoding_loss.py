"""Loss of encodings: none of plain rows, little of int8, much of an encoding that is wrong."""

from pathlib import Path

import pytest

from experiments.encoding_loss import TextSizes, measure_encoding_loss
from gllm.models.hub import resolve_model
from tests.support.models.tiny_models import save

SIZES = TextSizes(num_texts=6, num_tokens=40, prompt_tokens=8, greedy_tokens=12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_keeps_the_perplexity_of_the_demo_model(dtype: str) -> None:
    loss = measure_encoding_loss(resolve_model("demo"), 6, "int8", dtype, SIZES)
    assert loss.byte_ratio == pytest.approx((192 + 2) / (2 * 192))
    assert 1 < loss.plain_perplexity < 20
    assert abs(loss.perplexity_rise) <= 0.005
    assert loss.forced_match > 0.97


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_int8_keeps_the_perplexity_of_tiny_models(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    loss = measure_encoding_loss(folder, 4, "int8", "float32", SIZES)
    assert loss.byte_ratio <= 0.53
    assert abs(loss.perplexity_rise) <= 0.005


def test_plain_activations_lose_nothing() -> None:
    loss = measure_encoding_loss(resolve_model("demo"), 3, "plain", "float32", SIZES)
    assert loss == (2.0, loss.perplexity, loss.perplexity, 1.0, 1.0)


def test_an_encoding_that_loses_much_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gllm.transport.link.int8_encoding.MAX_LEVEL", 3)
    loss = measure_encoding_loss(resolve_model("demo"), 3, "int8", "float32", SIZES)
    assert loss.perplexity_rise > 0.05
    assert loss.greedy_match < loss.forced_match < 0.9
