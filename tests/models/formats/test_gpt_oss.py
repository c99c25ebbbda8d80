"""gpt-oss as published: experts in MXFP4, in stacks of blocks and scales, and in bfloat16."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gllm.kernels.gated_linear import GatedMatrix
from gllm.kernels.linear_grouped import GroupedMatrix
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.feed_forward import Experts
from gllm.models.shard import unsupported_shard_reason
from tests.models.formats.test_packed import PROMPT, distance, logits
from tests.support.engines.pipeline import Pipeline
from tests.support.models.packed_models import save_gpt_oss
from tests.support.models.ranked_model import RankedModel, joined

STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Packed and plain checkpoint."""
    return save_gpt_oss(tmp_path_factory.mktemp("gpt-oss"))


def test_logits_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    config = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folders[0], quantization_config=config)
    floats = load_file(folders[1] / "model.safetensors")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight.to(torch.bfloat16), floats[name]), name
    with torch.inference_mode():
        expected = model.float()(torch.tensor([PROMPT])).logits[0, -1:]
    torch.testing.assert_close(logits(folders[1]), expected, rtol=1e-4, atol=1e-4)
    # As close as activations of 8 bits allow.
    assert 0 < distance(logits(folders[0]), expected) < 0.03
    assert distance(logits(folders[0], dtype="bfloat16"), expected) < 0.05


def test_other_quantization_reads_the_floats(folders: tuple[Path, Path]) -> None:
    results = [logits(folder, quantization="int8") for folder in folders]
    assert torch.equal(*results)


@pytest.mark.parametrize("degrees", [(1,), (2,), (1, 1)], ids=str)
def test_experts_stay_packed_on_every_rank(
    degrees: tuple[int, ...], folders: tuple[Path, Path]
) -> None:
    wanted = logits(folders[0])
    with joined(RankedModel(folders[0], degrees, 1, keep_quantized=True)) as model:
        torch.testing.assert_close(model.step({0: PROMPT})[-1:], wanted, rtol=1e-4, atol=1e-4)
        experts = model.stages[0][-1].stage.layers.layers[0].mlp
        assert isinstance(experts, Experts)
        assert isinstance(experts.experts, tuple)
        gated = experts.experts[0][0]
        assert isinstance(gated, GatedMatrix)
        for matrix in (gated.gate_up, experts.experts[1][0]):
            assert isinstance(matrix, GroupedMatrix)
            # 4 bits, and a scale of 16 bits per 32 inputs.
            inputs = 128 // degrees[0] if matrix.outputs == 64 else 64
            assert matrix.nbytes == matrix.outputs * inputs * (4 + 16 / 32) / 8


def test_ranks_that_blocks_do_not_allow(folders: tuple[Path, Path]) -> None:
    model = read_config(folders[0]).model
    assert unsupported_shard_reason(model, 2) is None
    assert "use 1 or 2" in str(unsupported_shard_reason(model, 8))


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        (f"{STACK}_scales", None, r"gate_proj.weight_packed' has no 'weight_scale'"),
        (f"{STACK}_blocks", torch.zeros(4, 256, 2, 8).byte(), r"_blocks' has shape \(4, 256, 2, 8"),
        (f"{STACK}_bias", torch.zeros(4, 255), r"_bias' has shape \(4, 255\)"),
        (f"{STACK}_blocks", None, r"lacks the tensor '.*experts.0.gate_proj.weight'"),
        ("model.layers.0.self_attn.sinks", None, "lacks the tensor '.*self_attn.sinks'"),
    ],
)
def test_bad_tensors_are_named(
    name: str, tensor: Tensor | None, named: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    content = load_file(folders[0] / "model.safetensors")
    content.pop(name)
    if tensor is not None:
        content[name] = tensor
    save_file(content, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    with pytest.raises(ModelError, match=named):
        Pipeline(tmp_path)
