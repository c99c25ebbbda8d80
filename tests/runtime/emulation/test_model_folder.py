"""Model folders of emulated engines: without weights, and equal on all machines."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.hub import DEMO
from gllm.models.identity import hash_model
from gllm.runtime.emulation.deployment import to_shape
from gllm.runtime.emulation.model_folder import (
    find_machine_model,
    prepare_emulated_model,
)
from gllm.sim.hardware.shapes import MODELS
from gllm.text.tokenizer import Tokenizer
from tests.support.models.published import PUBLISHED


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_table_have_their_shape(name: str, tmp_path: Path) -> None:
    """Families without a gate, and those with learned positions, become Llama with these sizes."""
    shape = MODELS[name]
    model = read_config(prepare_emulated_model(name, tmp_path)).model
    sizes = replace(shape, gated=True, positions=0, bytes_per_weight=2.0, max_context=0)
    assert to_shape(model) == sizes
    assert model.context_length == shape.context


def test_a_folder_is_complete_and_written_once(tmp_path: Path) -> None:
    folder = prepare_emulated_model("llama-3-8b", tmp_path)
    assert folder == tmp_path / "llama-3-8b"
    assert Tokenizer.load(folder).chat_template is not None
    assert read_config(folder).eos_ids == read_config(DEMO).eos_ids
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare_emulated_model("llama-3-8b", tmp_path) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    # One of another version of gllm is replaced.
    (folder / "config.json").write_text("{}")
    prepare_emulated_model("llama-3-8b", tmp_path)
    assert read_config(folder).model.num_layers == 32


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_alone_is_a_model(name: str, tmp_path: Path) -> None:
    """Its sizes are those of the published file; there need be neither weights nor a tokenizer."""
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text(json.dumps(PUBLISHED[name]))
    folder = prepare_emulated_model(str(alone), tmp_path)
    model = read_config(folder).model
    shape = to_shape(model)
    assert (shape.layers, shape.hidden) == (model.num_layers, model.hidden_size)
    num_elements = sum(layer.attention.kv_entry.num_elements for layer in model.layers)
    assert shape.layers * shape.kv_bytes == pytest.approx(2 * num_elements, rel=2e-3)
    if name in MODELS:
        size = 1.0 if "quantization_config" in PUBLISHED[name] else 2.0
        assert shape == replace(MODELS[name], bytes_per_weight=size, max_context=0)
    assert Tokenizer.load(folder).vocab_size == Tokenizer.load(DEMO).vocab_size


def test_own_files_are_kept(tmp_path: Path) -> None:
    folder = prepare_emulated_model("demo", tmp_path)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (DEMO / name).read_bytes()
    assert (folder / "model.safetensors").stat().st_size < 20
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 77}))
    other = prepare_emulated_model(str(changed), tmp_path)
    assert other != folder
    assert read_config(other).model.context_length == 77


def test_engines_may_write_it_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: prepare_emulated_model("demo", tmp_path), range(32)))
    assert len(set(folders)) == 1
    assert not [name for name in os.listdir(folders[0]) if name.startswith(".")]
    assert hash_model(folders[0])


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        prepare_emulated_model("demo", tmp_path / "file")


def test_a_machine_has_the_model_of_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("llama-3-8b", "demo"):
        head = prepare_emulated_model(name, tmp_path / "head")
        folder = find_machine_model(name, hash_model(head))
        assert hash_model(folder) == hash_model(head)
    assert find_machine_model("demo", hash_model(DEMO)) == DEMO
    # Of an engine that computes, which needs the weights.
    with pytest.raises(ModelError, match="is not on this machine"):
        find_machine_model("llama-3-8b", "0" * 64)
    with pytest.raises(ModelError, match="differs from that of the head"):
        find_machine_model("head", "0" * 64, own_model="demo")
