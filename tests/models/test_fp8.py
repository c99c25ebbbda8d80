"""Checkpoints in 8-bit floats: the same logits as of the floats that they stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gllm.kernels.experts import StackedExperts
from gllm.kernels.fp8_weights import Fp8Matrix, Fp8Stack
from gllm.kernels.linear_fp8 import dequantize, prepare_fp8
from gllm.models import loader
from gllm.models.attention import Attention, LatentAttention
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.feed_forward import Experts, expert_spec, read_stacked_experts
from gllm.models.spec.feed_forward import ExpertsSpec
from tests.support.engines.pipeline import Pipeline
from tests.support.models.quantized_models import quantize_model, quantizing_on_cpu
from tests.support.models.ranked_model import RankedModel, joined
from tests.support.models.tiny_models import reference, save

BLOCK = (16, 32)
"""Of 48 hidden elements and heads of 8: queries, keys and values end within blocks."""
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"} | {
    "weight_block_size": [*BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
TENSORS = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}
    group = {"weights": weights | {"dynamic": False}, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group | {"input_activations": {"num_bits": 8}}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


STYLES: dict[str, tuple[dict[str, Any], tuple[int, int] | None, str, bool]] = {
    "blocks": (BLOCKS, BLOCK, "weight_scale_inv", False),
    "tensors": (TENSORS, None, "weight_scale", False),
    "compressed channels": (compressed("channel"), None, "weight_scale", True),
    "compressed blocks": (
        compressed("block", block_structure=[*BLOCK]),
        BLOCK,
        "weight_scale",
        False,
    ),
}
"""Configuration, size of blocks, name of scales, whether each output has one."""


def quantize(weight: Tensor, block: tuple[int, int] | None, by_row: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales, by the largest magnitude of each block."""
    outputs, inputs = weight.shape
    rows, columns = block or (1 if by_row else outputs, inputs)
    scales = torch.empty(-(-outputs // rows), -(-inputs // columns))
    codes = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
    for o in range(0, outputs, rows):
        for i in range(0, inputs, columns):
            part = weight[o : o + rows, i : i + columns]
            scale = part.abs().max() / 448
            scales[o // rows, i // columns] = scale
            codes[o : o + rows, i : i + columns] = (part / scale).to(torch.float8_e4m3fn)
    return codes, scales if block or by_row else scales.reshape(())


def save_both(family: str, style: str, root: Path, heads: int = 6) -> tuple[Path, Path]:
    """A checkpoint in 8-bit floats, and one of the floats that it stands for."""
    config, block, name, by_row = STYLES[style]
    plain, made = (save(family, root / name, heads=heads) for name in ("plain", "fp8"))
    content = load_file(made / "model.safetensors")
    stored, floats = dict(content), dict(content)
    for key, weight in content.items():
        if not key.endswith("_proj.weight"):
            continue
        codes, scales = quantize(weight, block, by_row)
        stem = key.removesuffix("weight")
        stored |= {key: codes, stem + name: scales}
        if config is TENSORS:
            stored[stem + "input_scale"] = torch.tensor(0.5)
        floats[key] = dequantize(prepare_fp8(codes, scales, block, torch.float32))
    save_file(stored, made / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    raw = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return made, plain


def logits(folder: Path, dtype: str = "float32") -> Tensor:
    pipeline = Pipeline(folder, 2, dtype=dtype)
    pipeline.add(1, [3, 4, 5, 60, 7])
    return pipeline.logits(pipeline.plan([pipeline.row(1, 5)]))[1]


FAMILIES = ["llama2", "qwen3", "qwen3-moe", "deepseek-v3", "phi3"]


@pytest.mark.parametrize(
    ("family", "style"),
    [
        pytest.param(family, style, marks=[] if (row - column) % 4 == 0 else pytest.mark.full)
        for row, family in enumerate(FAMILIES)
        for column, style in enumerate(STYLES)
    ],
)
def test_logits_are_those_of_the_floats(family: str, style: str, tmp_path: Path) -> None:
    made, plain = save_both(family, style, tmp_path)
    assert torch.equal(logits(made), logits(plain))
    if family == "qwen3":
        assert torch.equal(logits(made, "bfloat16"), logits(plain, "bfloat16"))


def quantized_by_transformers(family: str, root: Path, **options: Any) -> tuple[Path, Any]:
    """A checkpoint that transformers quantized, and the model that it loads from it."""
    folder = root / "fp8"
    with quantizing_on_cpu():
        quantize_model(family, root, **options).save_pretrained(folder)
        return folder, type(reference(family)).from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"weight_block_size": (16, 16)}),
        ("llama2", {"weight_block_size": (16, 16), "scale_fmt": "ue8m0"}),
        ("llama2", {"weight_block_size": None}),
        ("llama3", {"weight_block_size": (16, 16), "modules_to_not_convert": ["lm_head"]}),
    ],
    ids=str,
)
def test_checkpoints_that_transformers_quantized(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder, model = quantized_by_transformers(family, tmp_path, **options)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert {"dequantize", "modules_to_convert", "expert_dtype", "scale_fmt"} < config.keys()
    stored = {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}
    assert torch.float8_e4m3fn in stored
    with torch.inference_mode():
        wanted = model(torch.tensor([[3, 4, 5, 60, 7]])).logits[0, -1]
    torch.testing.assert_close(logits(folder)[-1], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3-moe",
        "phi3",
        pytest.param("llama2", marks=pytest.mark.full),
        pytest.param("deepseek-v3", marks=pytest.mark.full),
    ],
)
def test_weights_that_stay_in_8_bits(family: str, tmp_path: Path) -> None:
    """As for a GPU: stacked with their scales, and the same logits."""
    made, _ = save_both(family, "blocks", tmp_path)
    sizes, results = [], []
    for keep_quantized in (False, True):
        with joined(RankedModel(made, (1, 1), 1, keep_quantized=keep_quantized)) as model:
            attention = model.stages[0][0].stage.layers.layers[0].attention
            assert isinstance(attention, Attention | LatentAttention)
            assert isinstance(attention.out_proj.matrix, Fp8Matrix) == keep_quantized
            sizes.append(model.stages[0][0].weight_bytes)
            results.append(model.step({0: [3, 4, 5, 60, 7]}))
    assert sizes[1] < sizes[0]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "style"),
    [
        ("qwen3-moe", "blocks"),
        ("deepseek-v3", "compressed channels"),
        ("deepseek-v3", "tensors"),
        pytest.param("qwen3-moe", "tensors", marks=pytest.mark.full),
        pytest.param("qwen3-moe", "compressed channels", marks=pytest.mark.full),
        pytest.param("deepseek-v3", "blocks", marks=pytest.mark.full),
    ],
)
def test_experts_that_stay_in_8_bits(family: str, style: str, tmp_path: Path) -> None:
    """As for a GPU: read_stacked_experts, the same outputs, in a quarter of float32's memory."""
    made, plain = save_both(family, style, tmp_path)
    blocks = [load_experts(folder, keeps) for folder, keeps in ((made, True), (plain, False))]
    eights, floats = (block.experts for block in blocks)
    assert isinstance(eights, StackedExperts)
    assert isinstance(floats, StackedExperts)
    assert isinstance(eights.gate_up_proj, Fp8Stack)
    assert isinstance(eights.down_proj, Fp8Stack)
    assert isinstance(floats.gate_up_proj, Tensor)
    assert eights.gate_up_proj.codes.nbytes * 4 == floats.gate_up_proj.nbytes
    x = torch.randn(9, floats.gate_up_proj.shape[2], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(blocks[0](x), blocks[1](x), rtol=1e-4, atol=1e-5)


def load_experts(folder: Path, keep_quantized: bool) -> Experts:
    """The last layer's experts, stacked."""
    model = read_config(folder).model
    every, described = range(model.num_layers), model.layers[-1].mlp
    assert isinstance(described, ExpertsSpec)
    device = torch.device("cpu")
    with loader.Checkpoint(
        folder, torch.float32, model, every, device, keep_quantized
    ) as checkpoint:
        weights = loader.Weights(checkpoint).at(model.layer_name_format.format(every[-1]))
        block = Experts(described, weights, model.hidden_size)
        numbered = [
            expert_spec(described.expert, number) for number in range(described.num_experts)
        ]
        block.experts = read_stacked_experts(numbered, weights, model.hidden_size)
    return block


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    made, _ = save_both("qwen3", "tensors", tmp_path)
    config = read_config(made)
    seen: list[tuple[int, int]] = []
    every = range(config.model.num_layers)
    with loader.Checkpoint(made, torch.bfloat16, config.model, every) as checkpoint:
        checkpoint.report_to(lambda done, total: seen.append((done, total)))
        for name, shape in sorted(checkpoint.stored_shapes.items()):
            if name.endswith("weight"):
                checkpoint.read([name], [shape])
        checkpoint.check_all_read()
    assert seen[-1][0] == seen[-1][1]


NAME = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weight_scale_inv": None}, r"up_proj\.weight'.*no 'weight_scale_inv'"),
        ({"weight_scale_inv": torch.ones(5, 3)}, r"up_proj\.weight' has scales of shape \(5, 3\)"),
        (
            {"weight_scale_inv": -torch.ones(5, 2)},
            r"up_proj\.weight' has scales that are.*negative",
        ),
        ({"weight_scale": torch.ones(5, 2)}, r"no use for.*up_proj\.weight_scale "),
        ({"weight": torch.ones(80, 48)}, r"no use for.*up_proj\.weight_scale_inv"),
        (
            {"weight": torch.ones(80, 48).to(torch.float8_e5m2)},
            r"up_proj\.weight' is of type.*e5m2",
        ),
    ],
)
def test_bad_tensors_are_named(changes: dict[str, Tensor], named: str, tmp_path: Path) -> None:
    made, _ = save_both("qwen3", "blocks", tmp_path)
    content = load_file(made / "model.safetensors")
    content |= {NAME + end: tensor for end, tensor in changes.items()}
    content = {name: tensor for name, tensor in content.items() if tensor is not None}
    save_file(content, made / "model.safetensors")
    with pytest.raises(ModelError, match=named):
        Pipeline(made)


def test_codes_without_a_configuration_are_refused(tmp_path: Path) -> None:
    made, plain = save_both("qwen3", "blocks", tmp_path)
    (made / "config.json").write_text((plain / "config.json").read_text())
    with pytest.raises(ModelError, match=r"float8_e4m3fn.*quantization_config"):
        Pipeline(made)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"bits": 4}, "quantization_config.quant_method ''"),
        ("fp8", "quantization_config is 'fp8', but has to be an object"),
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not implemented, only fp8, compressed"),
        (BLOCKS | {"fmt": "e5m2"}, "quantization_config.fmt 'e5m2'"),
        (BLOCKS | {"weight_block_size": [128]}, "weight_block_size is .128."),
        (BLOCKS | {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        (BLOCKS | {"scale_fmt": "e8m1"}, "scale_fmt 'e8m1'"),
        (BLOCKS | {"brand_new": 1}, "'quantization_config.brand_new'"),
        (TENSORS | {"kv_cache_scheme": {"bits": 8}}, "kv_cache_scheme"),
        (compressed("group"), "weights.strategy 'group'"),
        (compressed("tensor", num_bits=4), "num_bits 8"),
        (compressed("tensor", brand_new=1), "weights.brand_new"),
        (compressed("tensor") | {"format": "pack-quantized"}, "type int .*format pack-quantized"),
        (compressed("tensor") | {"config_groups": {}}, "0 kinds of weights"),
    ],
    ids=str,
)
def test_other_configurations_are_refused_by_name(
    given: object, named: str, tmp_path: Path
) -> None:
    folder = save("qwen3", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": given}))
    with pytest.raises(ModelError, match=named):
        read_config(folder)
