"""Quantized models over tensor parallel ranks: as those of one rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gllm.kernels.fp8_weights import Fp8Matrix
from gllm.models.attention import Attention, LatentAttention
from gllm.models.shard import unsupported_shard_reason
from gllm.models.spec.model import ModelSpec
from gllm.transport.groups import StageGroups
from tests.models.test_fp8 import BLOCKS, TENSORS, compressed, quantize
from tests.models.test_ranks import PROMPTS, largest_error
from tests.support.models.ranked_model import RankedModel, joined
from tests.support.models.thread_group import ThreadGroup, thread_groups
from tests.support.models.tiny_models import save

INT8 = ["qwen2", "gpt2", "falcon-40b", "baichuan2-13b", "qwen2-moe", "deepseek-v2"]
"""Tied and untied heads, stored either way, with biases, experts, latent attention."""
SIDE = 8
"""Weights per side of an FP8 block: parts of 2 ranks end at blocks."""
STYLES = {
    "blocks": (BLOCKS | {"weight_block_size": [SIDE, SIDE]}, (SIDE, SIDE), "weight_scale_inv"),
    "tensors": (TENSORS, None, "weight_scale"),
    "channels": (compressed("channel"), None, "weight_scale"),
}
"""Configuration, sides of blocks, name of scales."""


def logits(folder: Path, cut: tuple[int, ...], **options: Any) -> Tensor:
    """Those of a step with all prompts and of one with a token of each."""
    with joined(RankedModel(folder, cut, len(PROMPTS), **options)) as model:
        first = model.step(dict(enumerate(PROMPTS)))
        return torch.cat((first, model.step({seq: [9 + seq] for seq in range(len(PROMPTS))})))


def share_of_equal_rows(actual: Tensor, wanted: Tensor) -> float:
    """The share of rows that only differ by the order of float32 sums."""
    errors = (actual - wanted).abs().amax(dim=1) / wanted.abs().amax(dim=1)
    return float((errors < 2e-6).float().mean())


@pytest.mark.parametrize(
    ("family", "cut"),
    [
        ("qwen2-moe", (2,)),
        ("gpt2", (1, 2)),
        *(pytest.param(name, (4, 2), marks=pytest.mark.long) for name in INT8),
        *(pytest.param(name, (2,), marks=pytest.mark.long) for name in INT8),
    ],
)
def test_int8_as_on_one_rank(family: str, cut: tuple[int, ...], tmp_path: Path) -> None:
    """Codes are the same, except where a sum that differs in its last bits is rounded to another
    one; a row with such a code is off by a part of a step."""
    folder = save(family, tmp_path, heads=8)
    wanted = logits(folder, (1,), quantization="int8")
    actual = logits(folder, cut, quantization="int8")
    assert largest_error(actual, wanted) < 0.05
    assert share_of_equal_rows(actual, wanted) > 0.5


class OwnMaximum(ThreadGroup):
    """A rank's end of a group whose maximum is that of the rank alone."""

    def maximum(self, values: Tensor) -> Tensor:
        return values


def open_own_maximum(size: int, model: ModelSpec) -> list[StageGroups]:
    ends = zip(thread_groups(size, OwnMaximum), thread_groups(size, OwnMaximum), strict=True)
    return [StageGroups(*pair) for pair in ends]


def test_int8_ranks_agree_on_magnitudes(tmp_path: Path) -> None:
    """Otherwise every row has other codes."""
    folder = save("qwen2-moe", tmp_path, heads=8)
    wanted = logits(folder, (1,), quantization="int8")
    actual = logits(folder, (2,), quantization="int8", open_groups=open_own_maximum)
    assert share_of_equal_rows(actual, wanted) < 0.1


def save_fp8(family: str, style: str, folder: Path) -> Path:
    """A checkpoint whose projections are 8-bit floats."""
    config, block, name = STYLES[style]
    save(family, folder, heads=8)
    tensors = load_file(folder / "model.safetensors")
    for key, weight in dict(tensors).items():
        if key.endswith("_proj.weight"):
            codes, scales = quantize(weight, block, style == "channels")
            tensors |= {key: codes, key.removesuffix("weight") + name: scales}
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return folder


@pytest.mark.parametrize(
    ("family", "style", "cut"),
    [
        ("qwen3-moe", "blocks", (2,)),
        ("deepseek-v3", "channels", (2,)),
        *(
            pytest.param(family, style, (2, 2), marks=pytest.mark.long)
            for family in ("llama2", "qwen3", "phi3", "qwen3-moe", "deepseek-v3")
            for style in STYLES
        ),
    ],
)
@pytest.mark.parametrize("kept", [True, pytest.param(False, marks=pytest.mark.full)])
def test_fp8_as_on_one_rank(
    family: str, style: str, cut: tuple[int, ...], kept: bool, tmp_path: Path
) -> None:
    folder = save_fp8(family, style, tmp_path)
    wanted = logits(folder, (1,), keep_quantized=kept)
    model = RankedModel(folder, cut, len(PROMPTS), keep_quantized=kept)
    attention = model.stages[0][0].stage.layers.layers[0].attention
    assert isinstance(attention, Attention | LatentAttention)
    assert isinstance(attention.out_proj.matrix, Fp8Matrix) == kept
    assert largest_error(logits(folder, cut, keep_quantized=kept), wanted) <= 1e-4


def test_ranks_that_would_split_fp8_blocks_are_refused_by_name(tmp_path: Path) -> None:
    """4 ranks have 20 of the 80 inner elements each, which are no whole blocks of 8."""
    folder = save_fp8("llama2", "blocks", tmp_path)
    model = RankedModel(folder, (1,), 1).model
    assert unsupported_shard_reason(model, 2) is None
    reason = unsupported_shard_reason(model, 4)
    assert reason is not None
    assert "intermediate_size is 80" in reason
    assert "use 1 or 2" in reason
