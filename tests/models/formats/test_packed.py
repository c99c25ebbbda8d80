"""Checkpoints of 4 and 8 bits: exactly the floats that they stand for, packed in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gllm.kernels.grouped_panels import PackedPart
from gllm.kernels.grouped_words import GroupedWords
from gllm.kernels.linear import prepare
from gllm.kernels.linear_grouped import DEVICES, GroupedMatrix
from gllm.kernels.native.library import load_library
from gllm.models.attention import Attention
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.formats.stored_format import stored_format
from gllm.models.loader import Checkpoint
from gllm.models.shard import shard, unsupported_shard_reason
from tests.support.engines.pipeline import Pipeline
from tests.support.models.packed_models import (
    STYLES,
    awq_config,
    change_config,
    compressed_config,
    gptq_config,
    round_config,
    save_both,
    write_config,
)
from tests.support.models.ranked_model import RankedModel, joined

PROMPT = [3, 4, 5, 60, 7]
ODD = {"hidden_size": 48, "intermediate_size": 80}
"""Sizes that groups do not divide."""


def logits(folder: Path, **options: Any) -> Tensor:
    pipeline = Pipeline(folder, 2, **options)
    pipeline.add(1, PROMPT)
    return pipeline.logits(pipeline.plan([pipeline.row(1, len(PROMPT))]))[1]


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def read_floats(folder: Path, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """The weights of all projections, or a rank's part of them, in float32."""
    model = shard(read_config(folder).model, rank, ranks)
    stems = {
        name.rpartition(".")[0]
        for name in load_file(folder / "model.safetensors")
        if name.rpartition(".")[0].endswith("_proj")
    }
    plain = load_file(folder.with_name("plain") / "model.safetensors")
    floats = {}
    with Checkpoint(folder, torch.float32, model, range(model.num_layers)) as checkpoint:
        for name in (f"{stem}.weight" for stem in sorted(stems)):
            cuts = checkpoint._shards.get(name, (None, None))
            whole = plain[name].shape
            shape = [
                size if cut is None else cut.num_elements
                for cut, size in zip(cuts, whole, strict=True)
            ]
            floats[name] = checkpoint.read([name], [(shape[0], shape[1])])
    return floats


@pytest.mark.parametrize("style", STYLES)
def test_weights_are_those_of_the_definition(style: str, tmp_path: Path) -> None:
    made, plain = save_both("Llama", style, tmp_path)
    expected = load_file(plain / "model.safetensors")
    floats = read_floats(made)
    assert len(floats) == 14
    for name, weight in floats.items():
        assert torch.equal(weight, expected[name]), name


def test_zeros_minus_one_wrap_within_their_bits(tmp_path: Path) -> None:
    """A stored 15 is the zero 0, not 16."""
    made, _ = save_both("Llama", "gptq symmetric", tmp_path)
    name = "model.layers.0.mlp.down_proj"
    before = read_floats(made)[f"{name}.weight"]
    content = load_file(made / "model.safetensors")
    content[f"{name}.qzeros"].fill_(-1)
    save_file(content, made / "model.safetensors")
    scales = content[f"{name}.scales"].t().repeat_interleave(32, 1).float()
    after = read_floats(made)[f"{name}.weight"]
    torch.testing.assert_close(after, before + 8 * scales)


@pytest.mark.parametrize("style", ["gptq", "awq", "compressed", "gptq -1"])
def test_sizes_that_groups_do_not_divide(style: str, tmp_path: Path) -> None:
    made, plain = save_both("Llama", style, tmp_path, **ODD)
    expected = load_file(plain / "model.safetensors")
    for name, weight in read_floats(made).items():
        assert torch.equal(weight, expected[name]), name
    assert distance(logits(made), logits(plain)) < 0.03


@pytest.mark.parametrize(
    ("family", "style"),
    [
        ("Llama", "awq"),
        ("Qwen3", "gptq 64 act-order"),
        ("Qwen3Moe", "gptq"),
        ("Qwen3Moe", "nvfp4"),
        ("Qwen3", "mxfp4"),
        ("Qwen3Moe", "int8"),
        ("Llama", "compressed bfloat16"),
        pytest.param("Qwen3Moe", "awq", marks=pytest.mark.full),
        pytest.param("Qwen3Moe", "compressed channel", marks=pytest.mark.full),
    ],
)
def test_logits_are_those_of_the_floats(family: str, style: str, tmp_path: Path) -> None:
    """As close as activations of 8 bits allow."""
    made, plain = save_both(family, style, tmp_path)
    assert 0 < distance(logits(made), logits(plain)) < 0.03
    assert distance(logits(made, dtype="bfloat16"), logits(plain)) < 0.05


@pytest.mark.parametrize("style", ["gptq", "compressed act-order", "int8"])
def test_other_quantization_reads_the_floats(style: str, tmp_path: Path) -> None:
    made, plain = save_both("Llama", style, tmp_path)
    assert torch.equal(logits(made, quantization="int4"), logits(plain, quantization="int4"))


def test_weights_stay_packed(tmp_path: Path) -> None:
    made, _ = save_both("Llama", "gptq", tmp_path)
    with joined(RankedModel(made, (1,), 1, keep_quantized=True)) as model:
        attention = model.stages[0][0].stage.layers.layers[0].attention
        assert isinstance(attention, Attention)
        matrix = attention.out_proj.matrix
        assert isinstance(matrix, GroupedMatrix)
        # 4 bits, and a scale of 16 bits and a minimum of 8 times one of 16 bits per 32 inputs.
        assert matrix.nbytes == 64 * 64 * 4 // 8 + 64 * 2 * (2 + 3)


@pytest.mark.parametrize("tied", [True, False])
def test_head_and_tied_embedding_have_8_bits_in_int4(tied: bool, tmp_path: Path) -> None:
    _, plain = save_both("Llama", "awq", tmp_path, tie_word_embeddings=tied)
    with joined(RankedModel(plain, (1,), 1, quantization="int4")) as model:
        stage = model.stages[0][0].stage
        assert stage.head is not None
        assert stage.embedding is not None
        matrix = stage.head.matrix
        assert isinstance(matrix, GroupedMatrix)
        (part,) = matrix.parts
        assert isinstance(part, PackedPart)
        assert part.layout.width == 8
        assert (stage.embedding.table is matrix) == tied


@pytest.mark.parametrize(
    ("family", "style"),
    [
        ("Llama", "gptq"),
        ("Qwen3", "awq"),
        ("Qwen3Moe", "compressed"),
        ("Llama", "compressed channel"),
        ("Llama", "gptq -1"),
        ("Llama", "nvfp4"),
        ("Llama", "int8"),
        pytest.param("Llama", "gptq 3 bits", marks=pytest.mark.full),
        pytest.param("Qwen3Moe", "mxfp4", marks=pytest.mark.full),
    ],
)
def test_ranks_read_their_parts(family: str, style: str, tmp_path: Path) -> None:
    made, _ = save_both(family, style, tmp_path)
    whole, parts = read_floats(made), [read_floats(made, rank, 2) for rank in range(2)]
    for name, weight in whole.items():
        dimension = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        assert torch.equal(torch.cat([part[name] for part in parts], dimension), weight), name
    results = []
    for degrees in ((1,), (2,)):
        with joined(RankedModel(made, degrees, 1, keep_quantized=True)) as model:
            results.append(model.step({0: PROMPT}))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_parts_that_end_within_words(tmp_path: Path) -> None:
    """Four outputs per rank of words of eight; a scale per output, 20 inputs per rank."""
    sizes = {"hidden_size": 16, "head_dim": 2, "intermediate_size": 80}
    for style in ("awq -1", "gptq -1", "compressed channel"):
        made, _ = save_both("Llama", style, tmp_path / style, **sizes)
        whole, parts = read_floats(made), [read_floats(made, rank, 4) for rank in range(4)]
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
            assert torch.equal(torch.cat([part[name] for part in parts]), whole[name]), style
        for name in ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"):
            joint = torch.cat([part[f"{name}.weight"] for part in parts], 1)
            assert torch.equal(joint, whole[f"{name}.weight"]), style


@pytest.mark.parametrize(
    ("style", "sizes", "ranks", "named"),
    [
        ("gptq", {"intermediate_size": 160}, 2, "intermediate_size is 160.* of 1 x 32 .*: use 1$"),
        ("awq", {}, 4, "num_attention_heads is 8: a part of self_attn.o_proj.*: use 1 or 2$"),
        ("gptq 64 act-order", {}, 2, "desc_act or actorder.*: use 1$"),
        ("compressed act-order", {}, 2, "desc_act or actorder.*: use 1$"),
    ],
)
def test_ranks_that_groups_do_not_allow(
    style: str, sizes: dict[str, Any], ranks: int, named: str, tmp_path: Path
) -> None:
    made, _ = save_both("Llama", style, tmp_path, **sizes)
    with pytest.raises(ValueError, match=named):
        shard(read_config(made).model, 0, ranks)


def test_a_scale_per_output_allows_all_ranks(tmp_path: Path) -> None:
    made, _ = save_both("Llama", "gptq -1", tmp_path)
    assert unsupported_shard_reason(read_config(made).model, 8) is None


AUTO_ROUND = {
    "autoround_version": "0.15.1",
    "data_type": "int",
    "enable_quanted_input": False,
    "provider": "auto-round",
    "static_attention_granularity": "tensor",
    "static_kv_granularity": "tensor",
    "sym": True,
}
"""Keys that AutoRound 0.15.1 writes beside those of the layouts of others."""


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (awq_config(), {"modules_to_not_convert": ["lm_head"], "zero_point": False}),
        (gptq_config(), {"damp_percent": 0.01, "lm_head": False, "true_sequential": False}),
    ],
)
def test_keys_that_auto_round_writes(
    config: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_config(tmp_path, config)
    expected = read_config(folder).model.quantization
    assert expected is not None
    change_config(folder, quantization_config=config | AUTO_ROUND | more)
    assert read_config(folder).model.quantization == expected


@pytest.mark.skipif(load_library() is None, reason="programs are of compiled kernels")
def test_act_order_is_replayed(tmp_path: Path) -> None:
    """Kernels read the activations in the order of the columns, so nothing is left for torch."""
    made, _ = save_both("Llama", "gptq 64 act-order", tmp_path)
    pipeline = Pipeline(made)
    pipeline.add(1, PROMPT)
    pipeline.run([pipeline.row(1, len(PROMPT))])
    assert pipeline.executors[0].stage.layers.is_program


def test_order_that_the_configuration_does_not_name(tmp_path: Path) -> None:
    """One rank reads it, several would compute with scales of other groups."""
    wide = {"hidden_size": 128, "head_dim": 16}
    made, plain = save_both("Llama", "gptq 64 act-order", tmp_path, **wide)
    change_config(made, quantization_config=gptq_config(4, 64))
    assert distance(logits(made), logits(plain)) < 0.03
    model = shard(read_config(made).model, 0, 2)
    name = "model.layers.0.mlp.down_proj"
    with (
        Checkpoint(made, torch.float32, model, range(2)) as checkpoint,
        pytest.raises(ModelError, match=rf"{name}.qweight' is quantized in the order.*size 1"),
    ):
        checkpoint.read([f"{name}.weight"], [(128, 64)])


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_weights_stay_packed_on_gpus(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor without numbers stands for one of a GPU."""
    made, _ = save_both("Llama", name, tmp_path)
    model, meta = read_config(made).model, torch.device("meta")
    assert model.quantization is not None
    own = type(stored_format(model.quantization.format))
    assert own.devices == DEVICES
    monkeypatch.setattr(own, "devices", ("meta",))
    tensor = "model.layers.0.mlp.down_proj.weight"
    with Checkpoint(made, torch.bfloat16, model, range(2), meta) as checkpoint:
        matrix = prepare(checkpoint.read_matrices([tensor], [(64, 128)]))
        (floats,) = checkpoint.read_parts([tensor], [(64, 128)])
    assert isinstance(matrix, GroupedMatrix)
    (words,) = matrix.parts
    assert isinstance(words, GroupedWords)
    assert (words.codes.device, words.codes.shape) == (meta, (1, 16, 64))
    assert (floats.device, floats.dtype) == (meta, torch.bfloat16)


def test_devices_without_kernels_get_floats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, plain = save_both("Llama", "awq", tmp_path)
    model, name = read_config(made).model, "model.layers.0.mlp.down_proj.weight"
    meta = torch.device("meta")
    with Checkpoint(made, torch.bfloat16, model, range(2), meta) as checkpoint:
        (weight,) = checkpoint.read_matrices([name], [(64, 128)])
    assert isinstance(weight, Tensor)
    assert (weight.device, weight.dtype) == (meta, torch.bfloat16)
    assert "multiply by weights of qweight: they become torch.bfloat16" in caplog.text
    assert plain.exists()


NAME = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize(
    ("style", "changes", "named"),
    [
        ("gptq", {"qzeros": None}, r"up_proj\.qweight' has no 'qzeros'"),
        ("gptq", {"scales": torch.ones(3, 128)}, r"has 'scales' of shape \(3, 128\), but 128 out"),
        ("gptq", {"scales": torch.full((2, 128), torch.inf)}, "has scales that are.*not finite"),
        ("gptq", {"g_idx": torch.zeros(64).int()}, "'g_idx' that does not put 32 inputs"),
        ("gptq", {"bias": torch.ones(128)}, r"no use for.*up_proj\.bias"),
        ("awq", {"qweight": torch.ones(64, 15).int()}, r"'qweight' of shape \(64, 15\)"),
        ("awq", {"qweight": None}, r"lacks the tensor '.*up_proj.weight'"),
        ("awq", {"g_idx": torch.zeros(64).int()}, r"no use for.*up_proj\.g_idx"),
        ("compressed", {"weight_shape": torch.tensor([64, 128])}, r"weight_shape \[64, 128\]"),
        ("nvfp4", {"weight_global_scale": torch.zeros(1)}, "weight_global_scale that is not pos"),
        ("mxfp4", {"weight_scale": torch.full((128, 2), 255).byte()}, "scales that are.*not fini"),
    ],
)
def test_bad_tensors_are_named(
    style: str, changes: dict[str, Tensor | None], named: str, tmp_path: Path
) -> None:
    made, _ = save_both("Llama", style, tmp_path)
    content = load_file(made / "model.safetensors")
    for end, tensor in changes.items():
        content.pop(NAME + end, None)
        if tensor is not None:
            content[NAME + end] = tensor
    save_file(content, made / "model.safetensors")
    with pytest.raises(ModelError, match=named):
        Pipeline(made)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (awq_config(bits=8), "quantization_config.bits 8 is not implemented, only 4"),
        (awq_config(version="gemv"), "version 'gemv' is not implemented, only 'gemm'"),
        (awq_config(24), "group_size is 24, but has to be -1, 16 or a multiple of 32"),
        (gptq_config(5), "bits is 5, but has to be one of 2, 3, 4, 8"),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (gptq_config(dynamic={"+:.*": {"bits": 8}}), "dynamic is .* modules to exclude"),
        (gptq_config(brand_new=1), "'quantization_config.brand_new'"),
        (round_config("auto_round:llm_compressor"), "packing_format 'auto_round:llm_compressor'"),
        (
            round_config("auto_round:auto_gptq") | {"extra_config": {"a": {"bits": 8}}},
            "extra_config is .* with 16 bits",
        ),
        (compressed_config("pack-quantized", 5, 32), "num_bits 2 or 3 or 4 or 8 in format pack"),
        (compressed_config("int-quantized", 8, 32), "weights.strategy 'group'"),
        (compressed_config("int-quantized", 8, None, symmetric=False), "symmetric False"),
        (compressed_config("nvfp4-pack-quantized", 4, 32, "float"), "group_size is"),
        (compressed_config("marlin-24", 4, 32), "format 'marlin-24' is not implemented"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not implemented, only"),
    ],
    ids=str,
)
def test_other_configurations_are_refused_by_name(
    given: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = write_config(tmp_path, given)
    with pytest.raises(ModelError, match=named):
        read_config(folder)
