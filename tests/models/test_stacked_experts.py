"""Checkpoints with stacked experts, as transformers writes them: the dequantized model's logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gllm.kernels.experts import StackedExperts
from gllm.kernels.fp8_weights import Fp8Stack
from gllm.models.errors import ModelError
from tests.models.test_fp8 import load_experts
from tests.support.engines.pipeline import Pipeline
from tests.support.models.quantized_models import quantize_model, quantizing_on_cpu
from tests.support.models.tiny_models import reference, save

FAMILIES = ["qwen3-moe", "mixtral", "deepseek-v3"]
TOKENS = [3, 4, 5, 60, 7]
FILE = "model.safetensors"


def dequantized(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the float32 weights of a state dict; every matrix consists of whole blocks."""
    floats = {}
    for name, codes in state.items():
        if codes.dtype == torch.float8_e4m3fn:
            scales = state[name + "_scale_inv"]
            if scales.dim() == 0:
                scales = scales.reshape(1, 1)
            rows, columns = (codes.shape[i] // scales.shape[i] for i in (-2, -1))
            scales = scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
            floats[name] = codes.float() * scales
        elif not name.endswith("_scale_inv"):
            floats[name] = codes
    return floats


def save_quantized(family: str, root: Path, is_original: bool, **options: Any) -> tuple[Path, Any]:
    """Return a checkpoint that transformers quantized, and the model of the dequantized weights."""
    with quantizing_on_cpu():
        quantized = quantize_model(family, root, **options)
        quantized.save_pretrained(root / "fp8", save_original_format=is_original)
    model = type(quantized).from_pretrained(root / "plain", dtype=torch.float32)
    model.load_state_dict(dequantized(quantized.state_dict()))
    return root / "fp8", model


def assert_same_logits(folder: Path, model: Any) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0, -1]
    pipeline = Pipeline(folder, 2, dtype="float32")
    pipeline.add(1, TOKENS)
    logits = pipeline.logits(pipeline.plan([pipeline.row(1, len(TOKENS))]))[1]
    torch.testing.assert_close(logits[-1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "block"),
    [
        ("qwen3-moe", (4, 4)),
        ("mixtral", None),
        pytest.param("qwen3-moe", None, marks=pytest.mark.full),
        pytest.param("mixtral", (4, 4), marks=pytest.mark.full),
        pytest.param("deepseek-v3", (4, 4), marks=pytest.mark.full),
        pytest.param("deepseek-v3", None, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_experts_with_stacked_scales(
    family: str, block: tuple[int, int] | None, tmp_path: Path
) -> None:
    """The weights are those of each expert, the scales of all experts one tensor."""
    folder, model = save_quantized(family, tmp_path, True, weight_block_size=block)
    names = load_file(folder / FILE).keys()
    assert any(name.endswith("experts.gate_up_proj_scale_inv") for name in names)
    assert any(".experts.0." in name for name in names)
    assert_same_logits(folder, model)


@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_experts_in_8_bit_floats(family: str, tmp_path: Path) -> None:
    folder, model = save_quantized(family, tmp_path, False, weight_block_size=(4, 4))
    content = load_file(folder / FILE)
    codes = [t for name, t in content.items() if name.endswith("experts.gate_up_proj")]
    assert codes
    assert all(part.dtype == torch.float8_e4m3fn and part.dim() == 3 for part in codes)
    assert_same_logits(folder, model)


@pytest.mark.parametrize("is_original", [True, False])
def test_stacks_that_stay_in_8_bits(is_original: bool, tmp_path: Path) -> None:
    """As for a GPU."""
    folder, _ = save_quantized("qwen3-moe", tmp_path, is_original, weight_block_size=(4, 4))
    kept, floats = (load_experts(folder, keep_quantized) for keep_quantized in (True, False))
    assert isinstance(kept.experts, StackedExperts)
    assert isinstance(kept.experts.gate_up_proj, Fp8Stack)
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(kept(x), floats(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2-moe"])
def test_stacked_experts_in_floats(family: str, tmp_path: Path) -> None:
    model = type(reference(family)).from_pretrained(save(family, tmp_path / "plain"))
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = load_file(tmp_path / "stacked" / FILE).keys()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    assert_same_logits(tmp_path / "stacked", model)


STACK = "model.layers.3.mlp.experts."


@pytest.mark.parametrize(
    ("changes", "block", "message"),
    [
        ({"gate_up_proj": torch.ones(4, 64, 48)}, 4, r"\(4, 64, 48\).*has to be \(5, 64, 48\)"),
        ({"down_proj": torch.ones(5, 32, 47)}, 4, r"\(5, 32, 47\).*has to be \(5, 48, 32\)"),
        # One stack as Qwen3-VL has it makes the other one wrong.
        ({"down_proj": torch.ones(5, 32, 48)}, 4, r"gate_up_proj.*has to be \(5, 48, 64\)"),
        ({"down_proj_scale_inv": torch.ones(5, 6, 8)}, 4, r"\(5, 6, 8\).*be \(5, 12, 8\)"),
        ({}, 64, r"gate_up_proj_scale_inv' has scales of blocks that hold both"),
        ({"0.gate_proj.weight": torch.ones(32, 48)}, 4, r"lacks the tensor.*0\.up_proj\.weight"),
        ({"gate_up_proj": None}, 4, r"lacks the tensor.*0\.gate_proj\.weight"),
    ],
)
def test_bad_stacks_are_named(
    changes: dict[str, Tensor | None],
    block: int,
    message: str,
    tmp_path: Path,
) -> None:
    folder, _ = save_quantized("qwen3-moe", tmp_path, False, weight_block_size=(4, 4))
    content: dict[str, Tensor | None] = dict(load_file(folder / FILE))
    content |= {STACK + name: tensor for name, tensor in changes.items()}
    kept = {name: tensor for name, tensor in content.items() if tensor is not None}
    save_file(kept, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [block, block]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        Pipeline(folder)
