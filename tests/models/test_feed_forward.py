"""Experts whose weights are read_stacked_experts, as for GPUs, are those whose weights are not."""

from pathlib import Path

import pytest
import torch

from gllm.kernels.experts import StackedExperts
from gllm.models.config import read_config
from gllm.models.feed_forward import Experts, expert_spec, read_stacked_experts
from gllm.models.loader import Checkpoint, Weights
from gllm.models.spec.feed_forward import ExpertsSpec
from tests.support.models.tiny_models import save


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "gpt-oss", "deepseek-v3"])
def test_stacked_experts_are_the_same(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    model = read_config(folder).model
    every = range(model.num_layers)
    described = model.layers[-1].mlp
    assert isinstance(described, ExpertsSpec)
    with Checkpoint(folder, torch.float32, model, every) as checkpoint:
        weights = Weights(checkpoint).at(model.layer_name_format.format(every[-1]))
        block = Experts(described, weights, model.hidden_size)
        numbered = [
            expert_spec(described.expert, number) for number in range(described.num_experts)
        ]
        stack = read_stacked_experts(numbered, weights, model.hidden_size)
    assert not isinstance(block.experts, StackedExperts)
    x = torch.randn(9, model.hidden_size, generator=torch.Generator().manual_seed(0))
    wanted = block(x)
    block.experts = stack
    torch.testing.assert_close(block(x), wanted, rtol=1e-4, atol=1e-5)
