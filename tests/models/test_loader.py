"""Checkpoints: sharded ones, progress, and every way to be broken."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gllm.config.engine import EngineConfig
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.loader import Checkpoint
from gllm.runtime.worker.cpu.executor import CpuExecutor
from tests.support.engines.pipeline import Pipeline
from tests.support.full_cases import full_but
from tests.support.models.tiny_models import FAMILIES, reference, save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save("qwen3", tmp_path)


def load(folder: Path, stage: int = 0, stages: int = 1) -> list[tuple[int, int]]:
    """Load a stage's even part; what its progress was."""
    config = read_config(folder)
    share = config.model.num_layers // stages
    layers = range(stage * share, (stage + 1) * share)
    seen: list[tuple[int, int]] = []
    executor = CpuExecutor(config, EngineConfig(dtype="float32"), stages, layers)
    executor.load(folder, lambda done, total: seen.append((done, total)))
    assert executor.weight_bytes == seen[-1][1]
    return seen


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; __ in a keyword stands for a dot."""
    path = folder / "model.safetensors"
    content = load_file(path)
    for keyword, tensor in tensors.items():
        name = keyword.replace("__", ".")
        content.pop(name, None)
        if tensor is not None:
            content[name] = tensor
    save_file(content, path)


def test_progress_counts_the_stage_s_bytes(folder: Path) -> None:
    whole = load(folder)
    assert whole[0][0] == 0
    assert [done for done, _ in whole] == sorted({done for done, _ in whole})
    assert all(done <= total for done, total in whole)
    parts = [load(folder, stage, 4) for stage in range(4)]
    assert all(part[-1][0] == part[-1][1] for part in parts)
    assert sum(part[-1][1] for part in parts) == whole[-1][1]


def test_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    one, many = save("qwen2", tmp_path / "one"), save("qwen2", tmp_path / "many", shard="30KB")
    assert len(list(many.glob("*.safetensors"))) > 3
    logits = []
    for folder in (one, many):
        pipeline = Pipeline(folder, 2)
        pipeline.add(1, [3, 4, 5])
        logits.append(pipeline.logits(pipeline.plan([pipeline.row(1, 3)]))[1])
    assert torch.equal(*logits)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save("qwen2", tmp_path, shard="30KB")
    gone = max(folder.glob("*.safetensors"))
    gone.unlink()
    with pytest.raises(ModelError, match=gone.name):
        load(folder)


def test_broken_index_and_file(tmp_path: Path) -> None:
    folder = save("qwen2", tmp_path)
    (folder / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ModelError, match="cannot be read"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weights": {}}))
    with pytest.raises(ModelError, match="weight_map"):
        load(folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    change(folder, model__layers__2__mlp__up_proj__weight=None)
    load(folder, 0, 2)
    with pytest.raises(ModelError, match=r"lacks.*layers\.2\.mlp\.up_proj"):
        load(folder, 1, 2)


def test_wrong_shape_is_named(folder: Path) -> None:
    change(folder, model__norm__weight=torch.ones(7))
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*\(7,\).*\(48,\)"):
        load(folder)


def test_unread_tensor_is_refused(folder: Path) -> None:
    """A bias that the family does not have would be left out of the sum."""
    change(folder, model__layers__1__self_attn__q_proj__bias=torch.ones(96))
    with pytest.raises(ModelError, match=r"no use for.*q_proj\.bias"):
        load(folder)
    load(folder, 1, 2)


def test_rotary_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    change(folder, model__layers__1__self_attn__rotary_emb__inv_freq=torch.ones(8))
    path = "model.layers.1.self_attn.rotary_emb.inv_freq"
    assert path in load_file(folder / "model.safetensors")
    config = read_config(folder)
    executor = CpuExecutor(config, EngineConfig(), 1, range(4))
    executor.load(folder, lambda done, total: None)


def logits_of(folder: Path) -> torch.Tensor:
    pipeline = Pipeline(folder, 2)
    pipeline.add(1, [3, 4, 5])
    return pipeline.logits(pipeline.plan([pipeline.row(1, 3)]))[1]


QUICK = ["llama2", "qwen1", "qwen3-tied", "gpt2", "bloom", "opt", "falcon-7b", "chatglm", "mixtral"]
"""One family for each form of tensor names."""


@pytest.mark.parametrize("family", full_but(QUICK, FAMILIES))
def test_names_without_their_prefix(family: str, tmp_path: Path) -> None:
    """As the model without its head is saved, and as some models' first files have them."""
    folder = save(family, tmp_path)
    wanted = logits_of(folder)
    path = folder / "model.safetensors"
    prefix = re.compile(r"(model|transformer)\.")
    stored = {prefix.sub("", name, count=1): tensor for name, tensor in load_file(path).items()}
    assert not any(map(prefix.match, stored))
    save_file(stored, path)
    assert torch.equal(logits_of(folder), wanted)


@pytest.mark.parametrize("family", ["qwen3-tied", "gpt2"])
def test_a_base_model_of_transformers(family: str, tmp_path: Path) -> None:
    """As Qwen3-Embedding, with the architecture of the model with its head."""
    folder = save(family, tmp_path / "whole")
    wanted = logits_of(folder)
    reference(family).base_model.save_pretrained(tmp_path / "base")
    shutil.copy(folder / "config.json", tmp_path / "base")
    assert torch.equal(logits_of(tmp_path / "base"), wanted)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = save("qwen2", tmp_path, shard="30KB")
    first, last = sorted(folder.glob("*.safetensors"))[::3][:2]
    name, tensor = min(load_file(first).items())
    save_file(load_file(last) | {name: tensor + 1}, last)
    with pytest.raises(ModelError, match=re.escape(name) + ".*another file"):
        load(folder)


@pytest.fixture
def ordinary_user(tmp_path: Path) -> Iterator[None]:
    """A user whom modes of files concern, in folders that everybody may search."""
    if os.geteuid():
        yield
        return
    root = Path(tempfile.gettempdir())
    folders = [each for each in (tmp_path, *tmp_path.parents) if each.is_relative_to(root)]
    modes = {folder: folder.stat().st_mode for folder in folders}
    for folder, mode in modes.items():
        folder.chmod(mode | 0o555)
    os.seteuid(65534)
    yield
    os.seteuid(0)
    for folder, mode in modes.items():
        folder.chmod(mode)


@pytest.mark.parametrize("shard", ["1GB", "30KB"])
def test_permission_denied_is_said(shard: str, tmp_path: Path, request: Any) -> None:
    folder = save("qwen2", tmp_path, shard=shard)
    config = read_config(folder)
    file, *others = sorted(folder.glob("*.safetensors"))
    for other in others:
        other.chmod(0o644)
    file.chmod(0)
    request.getfixturevalue("ordinary_user")
    with pytest.raises(ModelError, match=f"{file.name} cannot be read: permission denied"):
        Checkpoint(folder, torch.float32, config.model, range(4))


def test_other_reasons_of_the_system_are_said(tmp_path: Path) -> None:
    folder = save("qwen2", tmp_path, shard="30KB")
    file = max(folder.glob("*.safetensors"))
    file.unlink()
    file.symlink_to(file.name)
    with pytest.raises(ModelError, match="levels of symbolic links"):
        load(folder)


def test_masks_of_old_gpt2_checkpoints_are_ignored(tmp_path: Path) -> None:
    folder = save("gpt2", tmp_path)
    wanted = logits_of(folder)
    for layer in range(4):
        for buffer in ("bias", "masked_bias"):
            name = f"transformer__h__{layer}__attn__{buffer}"
            change(folder, **{name: torch.ones(1, 1, 8, 8)})
    assert torch.equal(logits_of(folder), wanted)


TIED = ["llama3", "qwen2", "phi4", "falcon-7b", "cohere", "opt", "gpt2", "bloom"]


@pytest.mark.parametrize("family", TIED)
def test_a_second_copy_of_a_tied_head_is_ignored(family: str, tmp_path: Path) -> None:
    """As files have it that were saved without regard to sharing."""
    folder = save(family, tmp_path)
    wanted, whole = logits_of(folder), load(folder)
    (table,) = (
        tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.endswith(("embed_tokens.weight", "word_embeddings.weight", "wte.weight"))
    )
    change(folder, lm_head__weight=table.clone())
    assert torch.equal(logits_of(folder), wanted)
    assert load(folder) == whole


@pytest.mark.parametrize(
    ("family", "stages"), [(family, 1 + number % 2) for number, family in enumerate(TIED)]
)
def test_a_head_that_differs_from_its_embedding_is_used(
    family: str, stages: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers has it, although config.json says that they are tied."""
    folder = save(family, tmp_path)
    head = torch.randn(131, 48, generator=torch.Generator().manual_seed(0))
    change(folder, lm_head__weight=head)
    kind = type(reference(family))
    theirs = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        wanted = theirs(torch.tensor([[3, 4, 5]])).logits[0, -1]
    pipeline = Pipeline(folder, stages)
    pipeline.add(1, [3, 4, 5])
    logits = pipeline.logits(pipeline.plan([pipeline.row(1, 3)]))[1][-1]
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
    logged = [record for record in caplog.records if record.name == "gllm.models.loader"]
    assert [record.message for record in logged] == [
        "lm_head.weight differs from the embedding, which config.json ties it to: it is used"
    ]


@pytest.mark.parametrize("family", ["llama3", "opt", "gpt2"])
def test_a_tied_embedding_may_be_stored_as_the_head(family: str, tmp_path: Path) -> None:
    """Files without duplicates keep one of the two names, whichever comes first."""
    folder = save(family, tmp_path)
    wanted = logits_of(folder)
    path = folder / "model.safetensors"
    content = load_file(path)
    (name,) = (name for name in content if name.endswith(("embed_tokens.weight", "wte.weight")))
    content["lm_head.weight"] = content.pop(name)
    save_file(content, path)
    assert torch.equal(logits_of(folder), wanted)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.1.self_attn.q_proj.lora_B.weight",
        "lora_embedding_A",
        "vision_tower.patch_embed.weight",
        "model.embed_positions.weight",
        "lm_head.bias",
        "model.layers.x.mlp.up_proj.weight",
        "model.layers.4.mlp.up_proj.weight",
        "score.weight",
        "transformer.wte.weight",
        "mtp.fc.weight",
    ],
)
def test_tensors_without_a_use_are_refused(folder: Path, name: str) -> None:
    change(folder, **{name.replace(".", "__"): torch.ones(2, 2)})
    with pytest.raises(ModelError, match=rf"no use for.*{re.escape(name)}"):
        load(folder)


def test_layers_beyond_the_configuration_are_refused(folder: Path) -> None:
    """The weights of four layers with a configuration of three would be another model."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"no use for.*model\.layers\.3\."):
        Pipeline(folder)
    with pytest.raises(ModelError, match=r"json has 3 layers, the files have one of number 3"):
        Pipeline(folder, 3)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama2", "model.layers.1.self_attn.rotary_emb.inv_freq"),
        ("llama2", "model.rotary_emb.inv_freq"),
        ("mistral", "rotary_emb.inv_freq"),
        ("chatglm", "transformer.rotary_pos_emb.inv_freq"),
        ("falcon-7b", "transformer.h.0.self_attention.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "transformer.h.3.attn.masked_bias"),
    ],
)
def test_documented_leftovers_are_ignored(family: str, name: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    change(folder, **{name.replace(".", "__"): torch.ones(4)})
    load(folder)
    assert re.sub(r"^.*?(\w+)$", r"\1", name) in Path("docs/models.md").read_text()


def test_layers_that_predict_further_tokens_are_ignored(tmp_path: Path) -> None:
    """DeepSeek V3 has one more layer in its files than the model has."""
    folder = save("deepseek-v3", tmp_path)
    wanted, whole = logits_of(folder), load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    change(
        folder,
        model__layers__4__eh_proj__weight=torch.ones(48, 96),
        model__layers__4__self_attn__o_proj__weight=torch.ones(48, 60),
    )
    assert torch.equal(logits_of(folder), wanted)
    assert load(folder) == whole
    for count in (0, None):
        (folder / "config.json").write_text(
            json.dumps(config | {"num_nextn_predict_layers": count})
        )
        with pytest.raises(ModelError, match=r"no use for.*model\.layers\.4\.eh_proj"):
            Pipeline(folder)


def test_quantized_tensor_is_refused(folder: Path) -> None:
    change(folder, model__norm__weight=torch.ones(48, dtype=torch.int8))
    with pytest.raises(ModelError, match="quantized"):
        load(folder)


def test_pickled_checkpoint_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="convert"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load(folder)
