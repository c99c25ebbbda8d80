"""KV entries without real bytes: as many parts of transfers as the real ones, of few elements."""

from dataclasses import replace
from pathlib import Path

import pytest

from gllm.models.config import read_config
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.model import ModelSpec
from gllm.runtime.emulation.kv_bytes import shrink_entries
from gllm.runtime.emulation.model_folder import prepare_emulated_model


def read_model(name: str, root: Path) -> ModelSpec:
    return read_config(prepare_emulated_model(name, root)).model


@pytest.mark.parametrize(
    ("name", "elements", "factor"),
    [("qwen2.5-32b", 16, 128), ("qwen2.5-0.5b", 4, 64), ("deepseek-v2-lite", 9, 64)],
)
def test_each_head_keeps_its_least_elements(
    name: str, elements: int, factor: int, tmp_path: Path
) -> None:
    """Grouped heads have a key and a value element each; latent attention 8 and 1 of 512 and 64."""
    model = read_model(name, tmp_path)
    small = shrink_entries(model.layers, model.layers)
    entries = [layer.attention.kv_entry for layer in small]
    assert {entry.num_elements for entry in entries} == {elements}
    for before, after in zip(model.layers, entries, strict=True):
        real = before.attention.kv_entry
        assert real.num_elements == factor * elements
        assert (after.num_heads, after.is_shared) == (real.num_heads, real.is_shared)
    assert shrink_entries(model.layers[:2], model.layers) == small[:2]


def test_layers_of_unlike_sizes_have_one_factor(tmp_path: Path) -> None:
    model = read_model("llama-3-8b", tmp_path)
    attention = model.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    wide = replace(model.layers[0], attention=replace(attention, head_dim=96))
    small = shrink_entries([wide, model.layers[1]], [wide, *model.layers[1:]])
    assert [layer.attention.kv_entry.key_dim for layer in small] == [3, 4]
