"""Models with 8-bit linear maps: the same tokens in every setting, logits near to float32's."""

from itertools import cycle, product
from pathlib import Path

import pytest
import torch

from gllm.kernels.gated_linear import GatedMatrix
from gllm.kernels.linear_int8 import Int8Matrix
from gllm.kernels.linear_unquantized import UnquantizedMatrix
from gllm.models.attention import Attention, LatentAttention
from gllm.models.feed_forward import MLP, Experts
from tests.runtime.worker.test_greedy import SETTINGS, Scheduled, prompts
from tests.support.engines.pipeline import Pipeline
from tests.support.full_cases import full_but
from tests.support.models.tiny_models import save

FAMILIES = ("qwen2", "gemma3", "gpt2", "falcon-40b", "baichuan2-13b", "qwen2-moe", "deepseek-v2")
"""Tied and untied heads, stored either way, with biases, experts, latent attention."""
TOLERANCE = 0.15
"""On |a - b| / |b| of all logits. These models are 48 wide, so errors hardly average out, and a
router may pick another expert; bfloat16 alone is off by up to half of it."""


@pytest.mark.parametrize("family", full_but(["qwen2"], FAMILIES))
def test_the_same_tokens_in_every_setting(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    made = {}
    for name, (stages, blocks, options) in SETTINGS.items():
        pipeline = Scheduled(folder, stages, blocks, options | {"quantization": "int8"})
        for seq, prompt in enumerate(prompts()):
            pipeline.add(seq, prompt)
        made[name] = pipeline.run()
    alone: dict[int, list[int]] = {}
    for seq, prompt in enumerate(prompts()):
        pipeline = Scheduled(folder, 1, options={"quantization": "int8"})
        pipeline.add(seq, prompt)
        alone |= pipeline.run()
    assert all(tokens == alone for tokens in made.values())


def logits(folder: Path, dtype: str, quantization: str) -> torch.Tensor:
    """Of 37 tokens, one in each row of a batch behind a chunk of them all."""
    pipeline = Pipeline(folder, 2, dtype=dtype, quantization=quantization)
    tokens = torch.randint(131, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    pipeline.add(1, tokens)
    pipeline.logits(pipeline.plan([pipeline.row(1, 37)]))
    return pipeline.logits(pipeline.decodes_again(1))[1]


DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize(
    ("family", "dtype"), full_but([*zip(FAMILIES, cycle(DTYPES))], product(FAMILIES, DTYPES))
)
def test_logits_are_near_those_of_float32(family: str, dtype: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    wanted, actual = logits(folder, "float32", "none"), logits(folder, dtype, "int8")
    error = ((actual - wanted).norm() / wanted.norm()).item()
    assert 0 < error < TOLERANCE


def test_what_is_quantized(tmp_path: Path) -> None:
    """Linear maps and the head; not what gates experts, nor what latent attention absorbs."""
    stages = {
        family: Pipeline(save(family, tmp_path / family), quantization="int8").executors[0].stage
        for family in ("qwen2-moe", "deepseek-v2")
    }
    for stage in stages.values():
        assert stage.head is not None
        assert isinstance(stage.head.matrix, Int8Matrix)
    first, second = stages["qwen2-moe"].layers.layers[:2]
    assert isinstance(first.attention, Attention)
    assert isinstance(first.mlp, Experts)
    assert isinstance(second.mlp, MLP)
    maps = (first.attention.qkv_proj, first.attention.out_proj, second.mlp.down_proj)
    assert isinstance(first.mlp.experts, tuple)
    ups, downs, _ = first.mlp.experts
    gated = [*ups, second.mlp.up_proj]
    assert all(isinstance(matrix, GatedMatrix) for matrix in gated)
    both = [up.gate_up for up in gated if isinstance(up, GatedMatrix)]
    matrices = [*(linear.matrix for linear in maps), *both, *downs]
    assert all(isinstance(matrix, Int8Matrix) for matrix in matrices)
    assert first.mlp.shared_expert_gate is not None
    assert isinstance(first.mlp.shared_expert_gate.matrix, UnquantizedMatrix)
    assert isinstance(first.mlp.router, UnquantizedMatrix)
    assert first.mlp.router.weight.dtype == torch.float32
    latent = stages["deepseek-v2"].layers.layers[0].attention
    assert isinstance(latent, LatentAttention)
    assert isinstance(latent.kv_down_proj.matrix, Int8Matrix)
    assert latent.k_up_proj.weight.dtype == latent.v_up_proj.weight.dtype == torch.float32


def test_a_weight_that_is_not_finite_ends_requests_not_the_stage(tmp_path: Path) -> None:
    """As with plain weights: a row's logits are not finite, and the sampler says so."""
    from safetensors.torch import load_file, save_file

    folder = save("qwen2", tmp_path)
    content = load_file(folder / "model.safetensors")
    content["model.layers.0.mlp.down_proj.weight"][3, 4] = torch.nan
    save_file(content, folder / "model.safetensors")
    pipeline = Pipeline(folder, quantization="int8")
    pipeline.add(1, [3, 4, 5])
    assert "not finite" in pipeline.run([pipeline.row(1, 3)])[0].error
