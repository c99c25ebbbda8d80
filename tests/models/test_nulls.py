"""Keys that are null in a file: they mean what transformers makes of them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gllm.models.config_reader import HARMLESS
from gllm.models.errors import ModelError
from gllm.models.spec.model import ModelSpec
from tests.support.engines.pipeline import Pipeline
from tests.support.full_cases import full_but
from tests.support.models.published import Config, read
from tests.support.models.tiny_models import FAMILIES, reference

NEWER = [*FAMILIES][[*FAMILIES].index("apertus") :]
ROWS = (
    "llama-biased",
    "mistral",
    "mixtral",
    "qwen2-window",
    "qwen2-moe",
    "qwen3",
    "qwen3-moe",
    "gpt-oss",
    "granite-hybrid",
    "lfm2",
    "lfm2-moe",
    "falcon-h1",
    "nemotron-h",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-12b",
    "ministral3",
    "phi3",
    "cohere-normed",
    "cohere2",
    "afmoe",
    "glm",
    "glm4",
    "deepseek-v2",
    "deepseek-v3",
    "gpt2",
    "opt",
    "bloom",
    "falcon-7b",
    "falcon-11b",
    "falcon-rw",
    *(name for name in NEWER if FAMILIES[name].rewrite is None),
)
"""Families of tests/support/models/tiny_models.py with every key that transformers has for them."""
TOKENS = list(range(3, 40))


@cache
def whole(family: str) -> Config:
    """The configuration of a tiny model, every key that transformers knows written out."""
    model = reference(family)
    raw: Config = json.loads(model.config.to_json_string(use_diff=False))
    return raw | {"architectures": [type(model).__name__]}


@cache
def accepted(family: str) -> dict[str, Any]:
    """What transformers has under each key whose null its configuration accepts."""
    raw, config = whole(family), type(reference(family).config)
    values = {}
    for key in sorted(raw.keys() - HARMLESS - {"is_encoder_decoder", "per_layer_config"}):
        try:
            values[key] = getattr(config.from_dict(raw | {key: None}), key, None)
        except Exception:  # its checks raise many kinds of errors
            continue
    return values


def described(raw: Config) -> ModelSpec | None:
    """What is computed; None where the file is refused."""
    try:
        return read(raw)
    except ModelError:
        return None


@pytest.mark.parametrize("family", ROWS)
def test_null_is_what_transformers_replaces_it_by(family: str) -> None:
    for key, value in accepted(family).items():
        if value is not None:
            value = json.loads(json.dumps(value, default=lambda part: part.to_dict()))
            found = described(whole(family) | {key: None})
            assert found == described(whole(family) | {key: value}), key


def computed(family: str, key: str) -> Any:
    """transformers' model with a key that stays null, None where it cannot be computed."""
    config = type(reference(family).config).from_dict(whole(family) | {key: None})
    torch.manual_seed(0)
    try:
        model = type(reference(family))(config).eval()
        for weight in model.parameters():
            weight.data.normal_(std=0.2)
        model(torch.tensor([TOKENS]))
    except Exception:  # whatever arithmetic on None raises
        return None
    return model


QUICK = {"llama-biased", "gemma2", "cohere2", "deepseek-v3", "gpt2", "falcon-rw"}


@pytest.mark.parametrize("family", full_but(QUICK, ROWS))
def test_null_is_computed_as_by_transformers(family: str, tmp_path: Path) -> None:
    for key in [key for key, value in accepted(family).items() if value is None]:
        raw = whole(family) | {key: None}
        if raw == whole(family):
            continue  # as in test_greedy.py
        model, found = computed(family, key), described(raw)
        if model is None:
            continue
        assert found is not None, key
        folder = tmp_path / key
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(raw))
        with torch.inference_mode():
            wanted = model(torch.tensor([TOKENS])).logits[0, -1]
        pipeline = Pipeline(folder)
        pipeline.add(1, TOKENS)
        logits = pipeline.logits(pipeline.plan([pipeline.row(1, len(TOKENS))]))[1][-1]
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
        ("mistral", "sliding_window"),
        ("deepseek-v3", "rope_interleave"),
        ("falcon-7b", "multi_query"),
        ("falcon-7b", "parallel_attn"),
        ("falcon-rw", "alibi"),
    ],
)
def test_these_nulls_change_the_arithmetic(family: str, key: str) -> None:
    assert accepted(family)[key] is None
    assert described(whole(family) | {key: None}) != described(whole(family))


def test_a_window_that_layers_need_cannot_be_null() -> None:
    for family in ("gemma2", "gemma3", "cohere2"):
        with pytest.raises(ModelError, match="sliding_window is None"):
            read(whole(family) | {"sliding_window": None})


def test_rows_cover_the_library_s_architectures() -> None:
    import transformers

    classes = {type(reference(row)) for row in ROWS}
    others = {
        type(reference(name))
        for name, row in FAMILIES.items()
        if row.rewrite is None and row.reference is None
    }
    assert others == classes
    assert transformers.__version__ >= "5"
