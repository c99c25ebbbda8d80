"""Models from GGUF files: the bits of the same checkpoint in safetensors, by rank and by stage."""

from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from gllm.kernels.linear_grouped import GroupedMatrix
from gllm.models.attention import Attention
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.formats.gguf_file import GgufFile
from gllm.models.identity import hash_model
from gllm.models.loader import Checkpoint
from gllm.models.shard import shard
from tests.support.full_cases import full_but
from tests.support.models.gguf_models import to_gguf
from tests.support.models.ranked_model import RankedModel
from tests.support.models.tiny_models import save

TOKENS = [5, 40, 17, 99, 3, 64, 12, 80, 1, 33]
FAMILIES = (
    "llama3",
    "llama-biased",
    "mixtral",
    "qwen2",
    "qwen2-moe",
    "qwen3",
    "qwen3-moe",
    "gemma",
    "gemma3",
    "phi3",
    "glm4",
    "cohere-normed",
    "cohere2",
    "falcon-7b",
    "falcon-40b",
    "bloom",
    "gpt-oss",
    "gpt2",
    "baichuan-7b",
    "deepseek-v2",
    "deepseek-v3",
    "arcee",
    "ernie4.5",
    "exaone4",
    "glm4-moe",
    "granite",
    "granite-moe",
    "granite-moe-shared",
    "lfm2",
    "minimax-m2",
    "nemotron",
    "olmo2",
    "olmo3",
    "olmoe",
    "seed-oss",
    "smollm3",
    "starcoder2",
)
QUICK = {
    "llama3",
    "qwen3-moe",
    "gpt-oss",
    "gemma3",
    "phi3",
    "cohere-normed",
    "falcon-40b",
    "deepseek-v3",
}
"""Families whose files differ: permuted, experts, offsets, fused, norms per head, KV groups."""


def compute_logits(folder: Path, degrees: tuple[int, ...] = (1,)) -> Tensor:
    """Return the logits of TOKENS from stages of some ranks each."""
    with torch.inference_mode():
        return RankedModel(folder, degrees, 1).step({0: TOKENS})


@pytest.mark.parametrize("family", full_but(QUICK, FAMILIES))
def test_logits_are_those_of_the_checkpoint(tmp_path, family):
    checkpoint = save(family, tmp_path / "checkpoint", heads=8)
    folder = to_gguf(checkpoint, tmp_path / "gguf")
    assert torch.equal(compute_logits(folder), compute_logits(checkpoint))


def test_split_files_are_one_model(tmp_path):
    checkpoint = save("qwen3", tmp_path / "checkpoint", heads=8)
    folder = to_gguf(checkpoint, tmp_path / "gguf", num_files=3)
    assert len(list(folder.glob("*.gguf"))) == 3
    assert torch.equal(compute_logits(folder), compute_logits(checkpoint))
    (folder / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match="is one of 3 files, of which 2 are beside it"):
        compute_logits(folder)


def test_forgotten_order_of_queries_would_show(tmp_path):
    """Files of architectures with and without interleaved halves differ in the order alone."""
    checkpoint = save("llama3", tmp_path / "checkpoint", heads=8)
    folder = to_gguf(checkpoint, tmp_path / "gguf")
    path = folder / "model.gguf"
    path.write_bytes(path.read_bytes().replace(b"llama", b"qwen2", 1))
    assert not torch.allclose(compute_logits(folder), compute_logits(checkpoint), atol=0.1)


@pytest.mark.parametrize("family", full_but({"llama3"}, ("llama3", "qwen3", "phi3")))
def test_ranks_and_stages_read_their_parts_of_packed_weights(tmp_path, family):
    checkpoint = save(family, tmp_path / "checkpoint", heads=8)
    folder = to_gguf(checkpoint, tmp_path / "gguf", "Q8_0")
    whole = compute_logits(folder)
    # Ranks add partial sums, which may round an activation to another of its 8-bit codes.
    limit = 0.03 * float(whole.abs().max())
    for degrees in ((1, 1), (2,)):
        torch.testing.assert_close(compute_logits(folder, degrees), whole, atol=limit, rtol=0)


@pytest.mark.parametrize("family", full_but({"falcon-40b"}, ("falcon-40b", "bloom")))
def test_projections_by_kv_head_stay_packed(tmp_path, family, monkeypatch):
    checkpoint = save(family, tmp_path / "checkpoint", heads=8)
    folder = to_gguf(checkpoint, tmp_path / "gguf", "Q8_0")
    model = RankedModel(folder, (1,), 1)
    attention = model.stages[0][0].stage.layers.layers[0].attention
    assert isinstance(attention, Attention)
    assert isinstance(attention.qkv_proj.matrix, GroupedMatrix)
    packed = compute_logits(folder)
    # As floats, the same weights: activations alone have 8 bits in one of the two.
    monkeypatch.setattr(Checkpoint, "_is_grouped", lambda self, name: False)
    floats = compute_logits(folder)
    assert float((packed - floats).abs().max()) < 0.1 * float(floats.abs().max())


def test_weights_stay_packed_in_memory(tmp_path):
    checkpoint = save("llama3", tmp_path / "checkpoint", heads=8)
    folder = to_gguf(checkpoint, tmp_path / "gguf", "Q8_0")
    model = RankedModel(folder, (1,), 1)
    (rank,) = model.stages[0]
    attention = rank.stage.layers.layers[0].attention
    assert isinstance(attention, Attention)
    assert isinstance(attention.qkv_proj.matrix, GroupedMatrix)
    assert rank.stage.head is not None
    assert rank.stage.embedding is not None
    # The head of a tied model is the embedding, in one piece.
    assert isinstance(rank.stage.head.matrix, GroupedMatrix)
    assert rank.stage.embedding.table is rank.stage.head.matrix


def test_degree_that_splits_blocks_is_refused_with_one_that_does_not(tmp_path):
    checkpoint = save("llama3", tmp_path / "checkpoint", heads=8)
    folder = to_gguf(checkpoint, tmp_path / "gguf", "Q8_0")
    model = read_config(folder).model
    # 64 inputs of the output projection are two blocks.
    with pytest.raises(
        ModelError, match=r"64 inputs in Q8_0 blocks of 32, which 4 ranks .*-size 1 or 2"
    ):
        RankedModel(folder, (4,), 1)
    with Checkpoint(folder, torch.float32, shard(model, 0, 2), range(4)) as opened:
        assert opened.total_bytes < 0.6 * sum(path.stat().st_size for path in folder.glob("*.gguf"))


def test_identity_covers_the_weights(tmp_path):
    checkpoint = save("llama3", tmp_path / "checkpoint", heads=8)
    folder = to_gguf(checkpoint, tmp_path / "gguf")
    before, path = hash_model(folder), folder / "model.gguf"
    data = bytearray(path.read_bytes())
    tensor = GgufFile(path).tensors["blk.0.ffn_up.weight"]
    assert hash_model(folder) == before
    data[tensor.offset + tensor.nbytes // 2] ^= 1
    path.write_bytes(data)
    assert hash_model(folder) != before


def test_missing_and_unknown_tensors_are_refused(tmp_path):
    checkpoint = save("llama3", tmp_path / "checkpoint", heads=8)
    folder = to_gguf(checkpoint, tmp_path / "gguf")
    path = folder / "model.gguf"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.2.ffn_up.weight", b"blk.2.ffn_xx.weight", 1))
    with pytest.raises(ModelError, match=r"lacks the tensor 'blk\.2\.ffn_up\.weight'"):
        compute_logits(folder)
    path.write_bytes(data.replace(b"blk.3.", b"blk.7."))
    with pytest.raises(ModelError, match=r"lacks the tensor 'blk\.3\.attn_norm\.weight'"):
        compute_logits(folder)
    writer = gguf.GGUFWriter(folder / "model-more.gguf", "llama")
    writer.add_tensor("blk.0.attn_sinks.weight", torch.ones(8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"has no use for, so it .*: blk.0.attn_sinks.weight"):
        compute_logits(folder)


def test_type_without_kernels_is_refused(tmp_path):
    checkpoint = save("llama3", tmp_path / "checkpoint", heads=8)
    folder = to_gguf(checkpoint, tmp_path / "gguf", "TQ2_0")
    # Blocks of 256 do not fit the tiny model: one tensor gets the type alone.
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.TQ2_0
    table = gguf.quants.quantize(torch.ones(131, 256).numpy(), kind)
    writer.add_tensor("token_embd.weight", table, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'token_embd\.weight': type TQ2_0 is not implemented"):
        compute_logits(folder)
