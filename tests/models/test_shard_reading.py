"""Shards of checkpoints: all ranks together read every tensor once, and no rank more than its part.

Tensors that all ranks hold are named.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gllm.kernels.experts import run_stacked
from gllm.kernels.fp8_weights import Fp8Stack
from gllm.kernels.linear_fp8 import dequantize, prepare_fp8
from gllm.kernels.weight_format import dequantize_weight
from gllm.models.basic_layers import read_row_magnitudes
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.feed_forward import expert_spec, read_stacked_experts
from gllm.models.loader import Checkpoint, Weights, tensor_shards
from gllm.models.shard import (
    TensorShards,
    is_aligned,
    shard,
    shard_scales,
    unsupported_shard_reason,
    widen_shards,
)
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.feed_forward import ExpertsSpec, MLPSpec
from gllm.models.spec.layer import NoMixerSpec, ParallelMixerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import DimensionShard
from gllm.models.spec.recurrent import Mamba2Spec
from gllm.models.stored_tensor import StoredTensor, select
from tests.models.test_fp8 import STYLES, quantize, save_both
from tests.models.test_ranks_quantized import save_fp8
from tests.models.test_stacked_experts import save_quantized
from tests.support.examples import num_examples
from tests.support.full_cases import full_but
from tests.support.models.tiny_models import FAMILIES, reference, save

WHOLE = (
    # Norms, but those with a scale for each head, and those within Mamba 2.
    r"(?!.*(mamba|mixer)\.norm).*(norm|norm_[12f]|layernorm|ln_\w+|layer_norm)\.(weight|bias)",
    # Biases of output and down projections, added to the sum.
    r".*(o_proj|out_proj|down_proj|dense|c_proj|fc2|fc_out|dense_4h_to_h)\.bias",
    # Routers and the gate of the shared expert.
    r".*mlp\.gate\.(weight|e_score_correction_bias)",
    r".*(mixer|feed_forward)\.(gate\.(weight|e_score_correction_bias)|expert_bias)",
    r".*(block_sparse_moe\.gate|shared_expert_gate|mlp\.router)\.(weight|bias)",
    # Compressions of latent attention.
    r".*(q_a_proj|kv_a_proj_with_mqa)\.weight",
    # Compressions of decays and gates.
    r".*(f_a_proj|g_a_proj)\.weight",
    # Per-layer embeddings, and Gemma 4's router and factors.
    r".*(per_layer\w*|layernorm_[12])\.weight|.*layer_scalar|.*router\..*",
    # Further routers and their biases, numbers of an activation, numbered norms.
    r".*(e_score_correction_bias|expert_bias|mlp\.gate\.wg\.weight|feed_forward\.gate\.weight)",
    r".*act_fn\.\w+|.*post_norm[12]\.weight",
    # Learned positions.
    r".*(wpe|embed_positions)\.weight",
    # Indexers.
    r".*\.indexer\..*",
)
"""Patterns of tensors that all ranks hold."""
CUT = r"(?<!indexer\.)k_norm|mamba\.norm|self_attn\.norm\."
"""Pattern of tensors that are not among WHOLE, although their names fit."""
KEYS = r".*\.(k_proj|v_proj|k_norm)\.(weight|bias)"
"""Pattern of tensors that several ranks hold where there are fewer KV heads than ranks."""
SCALES = ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale")


def read_tensors(
    folder: Path, model: ModelSpec, keep_quantized: bool = False
) -> tuple[dict[str, Tensor], Checkpoint]:
    """Everything that a rank holds, by name and dequantized, and the closed checkpoint."""
    every, tensors = range(model.num_layers), {}
    device = torch.device("cpu")
    with Checkpoint(folder, torch.float32, model, every, device, keep_quantized) as checkpoint:
        cuts = tensor_shards(model, every)
        for name, stored_shape in checkpoint.stored_shapes.items():
            if name.rpartition(".")[2] not in SCALES:
                shape = list(stored_shape)
                for at, cut in enumerate(cuts.get(name, ())):
                    shape[at] = shape[at] if cut is None else cut.num_elements
                if keep_quantized and len(shape) == 2:
                    (weight,) = checkpoint.read_matrices([name], [(shape[0], shape[1])])
                    tensors[name] = dequantize_weight(weight)
                else:
                    tensors[name] = checkpoint.read([name], [tuple(shape)])
        checkpoint.check_all_read()
    return tensors, checkpoint


def indices(cuts: TensorShards, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """The indices that a rank holds, of each dimension."""
    result = []
    for at, size in enumerate(shape):
        cut = cuts[at] if at < len(cuts) else None
        runs = ((0, size),) if cut is None else cut.runs
        result.append(torch.tensor([index for run in runs for index in range(*run)]))
    return tuple(result)


def check_ranks(folder: Path, ranks: int, keep_quantized: bool = False) -> list[Checkpoint]:
    """Every rank has the right part of each tensor, and all of them together have all of it."""
    model = read_config(folder).model
    whole, _ = read_tensors(folder, model)
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole.items()}
    checkpoints = []
    for rank in range(ranks):
        # Without its quantization, which start-up would refuse to cut within blocks.
        part = shard(replace(model, quantization=None), rank, ranks)
        part = replace(part, quantization=model.quantization)
        tensors, checkpoint = read_tensors(folder, part, keep_quantized)
        cuts = tensor_shards(part, range(model.num_layers))
        assert tensors.keys() == whole.keys()
        for name, tensor in tensors.items():
            place = torch.meshgrid(*indices(cuts.get(name, ()), whole[name].shape), indexing="ij")
            assert torch.equal(tensor, whole[name][place])
            counts[name][place] += 1
        checkpoints.append(checkpoint)
    for name, count in counts.items():
        number = re.search(r"\.(\d+)\.", name)
        attention = model.layers[int(number[1]) if number else 0].mixers[0]
        kv_heads = attention.num_kv_heads if isinstance(attention, AttentionSpec) else ranks
        copies = max(ranks // kv_heads, 1)
        is_fused = isinstance(attention, AttentionSpec) and len(attention.qkv_proj.names) == 1
        if any(re.fullmatch(each, name) for each in WHOLE) and not re.search(CUT, name):
            is_per_head = isinstance(attention, AttentionSpec) and (
                attention.has_norm_per_head or attention.has_projection_norm
            )
            expected = {1} if is_per_head and "q_norm" in name else {ranks}
        elif re.fullmatch(KEYS, name):
            is_whole = isinstance(attention, AttentionSpec) and attention.has_projection_norm
            is_shared = "norm" in name and count.dim() == 1 and not is_whole
            expected = {ranks if is_shared else copies}
        elif isinstance(attention, Mamba2Spec) and re.search(r"conv1d|in_proj", name):
            # Ranks that have a part of one group's heads all have its keys and queries.
            expected = {1, max(ranks // attention.num_groups, 1)}
        elif is_fused and re.search(r"qkv|query_key_value|W_pack|c_attn", name):
            expected = {1, copies}
        else:
            expected = {1}
        assert set(count.unique().tolist()) == expected, name
    return checkpoints


STORED = {
    "llama-biased",
    "qwen2-moe",
    "phi3",
    "chatglm",
    "gpt2",
    "opt",
    "falcon-7b",
    "falcon-40b",
    "bloom",
    "cohere-normed",
    "baichuan-7b",
    "deepseek-v3",
}
"""Families that store different tensors, or in different ways."""


@pytest.mark.parametrize("family", full_but(STORED, FAMILIES))
def test_ranks_have_every_tensor_once(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path, heads=8)
    model = read_config(folder).model
    for ranks in (2, 4):
        if unsupported_shard_reason(model, ranks) is None:
            check_ranks(folder, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_only_its_part(ranks: int, tmp_path: Path) -> None:
    folder = save("llama2", tmp_path, heads=8)
    model = read_config(folder).model
    stored = load_file(folder / "model.safetensors")
    for rank in range(ranks):
        part = shard(model, rank, ranks)
        cuts = tensor_shards(part, range(model.num_layers))
        tensors, checkpoint = read_tensors(folder, part)
        shared = sum(tensor.nbytes for name, tensor in stored.items() if name not in cuts)
        whole = sum(tensor.nbytes for tensor in stored.values())
        assert checkpoint.read_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert checkpoint.read_bytes == checkpoint.weight_bytes
        # The vocabulary does not divide.
        row = stored["lm_head.weight"][0].nbytes
        assert abs(checkpoint.read_bytes - shared - (whole - shared) // ranks) <= 2 * row
        assert shared < 0.02 * whole


def test_progress_of_a_rank_reaches_its_end(tmp_path: Path) -> None:
    folder = save("qwen2-moe", tmp_path, heads=8)
    model = shard(read_config(folder).model, 1, 4)
    seen: list[tuple[int, int]] = []
    every = range(model.num_layers)
    with Checkpoint(folder, torch.float32, model, every) as checkpoint:
        checkpoint.report_to(lambda done, total: seen.append((done, total)))
        cuts = tensor_shards(model, every)
        for name, whole in checkpoint.stored_shapes.items():
            pairs = zip(cuts.get(name, (None,) * len(whole)), whole, strict=False)
            shape = [size if cut is None else cut.num_elements for cut, size in pairs]
            checkpoint.read([name], [(*shape, *whole[len(shape) :])])
    assert seen[0][0] == 0
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (checkpoint.read_bytes, checkpoint.read_bytes)


@pytest.mark.parametrize(
    ("family", "style"),
    [
        ("phi3", "blocks"),
        ("llama2", "compressed channels"),
        *(pytest.param("phi3", style, marks=pytest.mark.full) for style in [*STYLES][1:]),
        *(
            pytest.param(family, "blocks", marks=pytest.mark.full)
            for family in ("llama2", "qwen3-moe", "deepseek-v3")
        ),
    ],
)
def test_weights_in_8_bits(family: str, style: str, tmp_path: Path) -> None:
    """Also where parts would end within blocks, which start-up refuses: then floats are cut."""
    made, _ = save_both(family, style, tmp_path, heads=8)
    for ranks in (2, 4):
        for keep_quantized in (False, True):
            check_ranks(made, ranks, keep_quantized)


def test_codes_and_scales_that_stay_in_8_bits(tmp_path: Path) -> None:
    """A rank reads the codes and scales of its part, each of one byte and of four."""
    made, _ = save_both("llama2", "blocks", tmp_path, heads=8)
    model = read_config(made).model
    name = "model.layers.0.self_attn.o_proj.weight"
    part = replace(model, layers=shard(replace(model, quantization=None), 1, 2).layers, ranks=2)
    device = torch.device("cpu")
    with Checkpoint(made, torch.float32, part, range(4), device, True) as checkpoint:
        (matrix,) = checkpoint.read_matrices([name], [(64, 32)])
    assert not isinstance(matrix, Tensor)
    # Blocks of 16 x 32.
    assert checkpoint.read_bytes == 64 * 32 + 4 * 4
    assert matrix.nbytes == checkpoint.read_bytes


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "deepseek-v3"])
def test_stacked_experts(family: str, tmp_path: Path) -> None:
    model = type(reference(family)).from_pretrained(save(family, tmp_path / "plain", heads=8))
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    for ranks in (2, 4):
        check_ranks(tmp_path / "stacked", ranks)


def test_stacked_experts_in_8_bits(tmp_path: Path) -> None:
    folder, _ = save_quantized("qwen3-moe", tmp_path, False, weight_block_size=(4, 4))
    names = load_file(folder / "model.safetensors").keys()
    assert any(name.endswith("experts.gate_up_proj_scale_inv") for name in names)
    for keep_quantized in (False, True):
        check_ranks(folder, 2, keep_quantized)


@pytest.mark.parametrize("keep_quantized", [False, True])
def test_stacked_experts_of_all_ranks_add_up(keep_quantized: bool, tmp_path: Path) -> None:
    """As for a GPU: each rank stacks its part of every expert."""
    folder = save_fp8("qwen3-moe", "blocks", tmp_path)
    model = read_config(folder).model
    x = torch.randn(9, model.hidden_size, generator=torch.Generator().manual_seed(0))
    orders = [torch.randperm(5, generator=torch.Generator().manual_seed(i)) for i in range(9)]
    ids = torch.stack(orders)[:, :2]
    every, device = range(model.num_layers), torch.device("cpu")

    def compute(part: ModelSpec) -> Tensor:
        mlp = part.layers[-1].mlp
        assert isinstance(mlp, ExpertsSpec)
        specs = [expert_spec(mlp.expert, index) for index in range(mlp.num_experts)]
        with Checkpoint(folder, torch.float32, part, every, device, keep_quantized) as checkpoint:
            weights = Weights(checkpoint).at(part.layer_name_format.format(every[-1]))
            experts = read_stacked_experts(specs, weights, part.hidden_size)
        assert isinstance(experts.down_proj, Fp8Stack) == keep_quantized
        return run_stacked(x, ids, torch.full((9, 2), 0.5), experts)

    parts = [compute(shard(model, rank, 2)) for rank in range(2)]
    torch.testing.assert_close(parts[0] + parts[1], compute(model), rtol=1e-4, atol=1e-4)


def test_a_head_in_8_bits(tmp_path: Path) -> None:
    """Its rows are divided whatever its blocks are."""
    made, _ = save_both("llama2", "blocks", tmp_path, heads=8)
    path = made / "model.safetensors"
    stored = load_file(path)
    codes, scales = quantize(stored["lm_head.weight"], (16, 32), False)
    save_file(stored | {"lm_head.weight": codes, "lm_head.weight_scale_inv": scales}, path)
    model = read_config(made).model
    whole = dequantize(prepare_fp8(codes, scales, (16, 32), torch.float32))
    parts = []
    for rank in range(2):
        rows = DimensionShard(131, ((0, 66),) if rank == 0 else ((66, 131),))
        part = replace(model, head=replace(model.head, rows=rows), ranks=2, rank=rank)
        with Checkpoint(made, torch.float32, part, range(4)) as checkpoint:
            parts.append(checkpoint.read(["lm_head.weight"], [(rows.num_elements, 64)]))
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("family", ["llama2", "gpt2", "qwen3-moe"])
def test_magnitudes_of_whole_rows(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path, heads=8)
    model = read_config(folder).model
    part = shard(model, 1, 4)
    tensors, _ = read_tensors(folder, model)
    index = model.num_layers - 1
    prefix = model.layer_name_format.format(index)
    layer = part.layers[index]
    mlp = layer.mlp.expert if isinstance(layer.mlp, ExpertsSpec) else layer.mlp
    assert isinstance(mlp, MLPSpec)
    assert not isinstance(layer.attention, NoMixerSpec | ParallelMixerSpec)
    with Checkpoint(folder, torch.float32, part, range(model.num_layers)) as checkpoint:
        weights = Weights(checkpoint).at(prefix)
        for spec in (layer.attention.out_proj, mlp.down_proj):
            names = tuple(name.format(3) for name in spec.names)
            result = read_row_magnitudes(replace(spec, names=names), weights, [64])
            whole = tensors[f"{prefix}.{names[0]}.weight"]
            whole = whole.t() if spec.is_transposed else whole
            assert result.dtype == torch.float32
            assert torch.equal(result, whole.abs().amax(dim=1))
    assert checkpoint.weight_bytes == 0


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    """Of the whole tensor, whose part would have the right shape."""
    folder = save("llama2", tmp_path, heads=8)
    path = folder / "model.safetensors"
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(load_file(path) | {name: torch.ones(64, 79)}, path)
    model = shard(read_config(folder).model, 0, 2)
    with (
        Checkpoint(folder, torch.float32, model, range(4)) as checkpoint,
        pytest.raises(ModelError, match=r"down_proj\.weight.*\(64, 79\).*has to be \(64, 80\)"),
    ):
        checkpoint.read([name], [(64, 40)])


@pytest.mark.parametrize(
    ("style", "scales", "message"),
    [
        ("blocks", torch.ones(9, 2), r"up_proj.*has 9 scales along 80 elements.*16 elements"),
        ("blocks", torch.ones(5, 9), r"up_proj.*has scales of shape \(3, 9\)"),
        ("blocks", torch.ones(80), r"up_proj.*has scales of shape \(80,\)"),
        ("compressed channels", torch.ones(79), r"up_proj.*has 79 scales, but 1 or 80"),
    ],
)
def test_wrong_scales_are_named(style: str, scales: Tensor, message: str, tmp_path: Path) -> None:
    made, _ = save_both("llama2", style, tmp_path, heads=8)
    path = made / "model.safetensors"
    name = "model.layers.0.mlp.up_proj."
    kind = STYLES[style][2]
    save_file(load_file(path) | {name + kind: scales}, path)
    model = read_config(made).model
    layers = shard(replace(model, quantization=None), 0, 2).layers
    part = replace(model, layers=layers, ranks=2)
    with (
        Checkpoint(made, torch.float32, part, range(4)) as checkpoint,
        pytest.raises(ModelError, match=message),
    ):
        checkpoint.read([name + "weight"], [(40, 64)])


@st.composite
def cut(draw: st.DrawFn, size: int) -> DimensionShard | None:
    """Up to three runs of a dimension, or all of it."""
    borders = sorted(draw(st.sets(st.integers(0, size), max_size=6)))
    runs = tuple(zip(borders[::2], borders[1::2], strict=False))
    return DimensionShard(size, runs) if runs else None


@st.composite
def matrices(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int] | None, TensorShards]:
    """Shape of a weight, shape of its blocks, and cuts."""
    shape = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    block = draw(st.none() | st.tuples(st.integers(1, 12), st.integers(1, 12)))
    return shape, block, (draw(cut(shape[0])), draw(cut(shape[1])))


@settings(max_examples=num_examples(40, 300), deadline=None)
@given(matrices(), st.booleans(), st.integers(0, 99))
def test_any_cut_of_a_quantized_weight(
    matrix: tuple[tuple[int, int], tuple[int, int] | None, TensorShards], by_row: bool, seed: int
) -> None:
    """The floats of the blocks that hold it are those of the whole weight."""
    shape, block, cuts = matrix
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    codes, scales = quantize(weight, block, by_row)
    whole = dequantize(prepare_fp8(codes, scales, block, torch.float32))

    def at(tensor: Tensor, cuts: TensorShards) -> Tensor:
        return tensor[torch.meshgrid(*indices(cuts, tensor.shape), indexing="ij")]

    wide = widen_shards(cuts, block)
    scale_cuts = shard_scales(wide, tuple(scales.shape), block) if any(cuts) else ()
    part_codes = at(codes.view(torch.uint8), wide).view(codes.dtype)
    part_scales = at(scales, scale_cuts) if scale_cuts else scales
    part = dequantize(prepare_fp8(part_codes, part_scales, block, torch.float32))
    assert torch.equal(select(part, wide, cuts), at(whole, cuts))
    if block is not None:
        for own, length in zip(wide, block, strict=True):
            assert own is None or is_aligned(own, length)


@settings(max_examples=num_examples(40, 300), deadline=None)
@given(data=st.data())
def test_any_cut_of_a_stored_tensor(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Of a whole tensor, and of an expert's part of a stack."""
    folder = tmp_path_factory.getbasetemp()
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 12)))
    stack = torch.arange(prod(shape)).view(shape).to(torch.float32)
    path = folder / "any_cut.safetensors"
    save_file({"stack": stack, "matrix": stack[0].clone()}, path)
    expert = data.draw(st.integers(0, shape[0] - 1))
    first = data.draw(st.integers(0, shape[1] - 1))
    rows = range(first, data.draw(st.integers(first + 1, shape[1])))
    with safe_open(path, framework="pt") as handle:
        for home, whole in (
            (StoredTensor(handle, "matrix"), stack[0]),
            (StoredTensor(handle, "stack", expert, rows), stack[expert, rows.start : rows.stop]),
        ):
            cuts = data.draw(cut(whole.shape[0])), data.draw(cut(whole.shape[1]))
            place = torch.meshgrid(*indices(cuts, whole.shape), indexing="ij")
            assert torch.equal(home.read(cuts), whole[place])
