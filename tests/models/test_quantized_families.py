"""Every family with weights of 8 and 4 bits: logits are near those of its floats."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gllm.kernels.native.library import load_library
from tests.models.test_layers import Served
from tests.support.models.tiny_models import FAMILIES, save

MOST_ERRORS = {"int8": 0.3, "int4": 1.0}
"""On |a - b| / |b| of the logits of the median token; other weights have 1.4. These models are 48
wide, so errors hardly average out, and routers pick other experts."""


def compute_logits(folder: Path, quantization: str) -> Tensor:
    """Logits of two prompts, recorded where kernels are compiled."""
    served = Served(folder, torch.float32, quantization)
    with torch.inference_mode():
        logits = served.stage.compute_logits(served.step(0))
    assert served.stage.layers.is_program == (load_library() is not None)
    return logits


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_those_of_floats(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    floats = compute_logits(folder, "none")
    for quantization, most in MOST_ERRORS.items():
        quantized = compute_logits(folder, quantization)
        assert not torch.equal(quantized, floats), "the weights were not quantized"
        errors = (quantized - floats).norm(dim=1) / floats.norm(dim=1)
        print(family, quantization, f"median {errors.median():.3f}, largest {errors.max():.3f}")
        assert errors.median() < most
