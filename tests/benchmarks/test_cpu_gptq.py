"""The 4-bit GPTQ folder that vLLM gets in the comparison on a CPU."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.cpu.gptq import GROUP, convert

pytestmark = pytest.mark.full


def codes_of(words: torch.Tensor) -> torch.Tensor:
    """Codes [n, 8 m] of rows of words [n, m], the first in the lowest bits."""
    return torch.stack([words >> 4 * place & 15 for place in range(8)], 2).flatten(1)


def test_a_folder_of_four_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 2 * GROUP)
    model, folder = tmp_path / "model", tmp_path / "gptq"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 256}')
    stored = {"layers.0.q_proj.weight": weight, "layers.0.q_proj.bias": torch.ones(16)}
    save_file(stored | {"norm.weight": torch.ones(16)}, model / "model.safetensors")
    convert(model, folder)
    tensors = load_file(folder / "model.safetensors")
    parts = ("qweight", "qzeros", "scales", "g_idx", "bias")
    assert set(tensors) == {"norm.weight", *(f"layers.0.q_proj.{part}" for part in parts)}
    codes, zeros, scales = (tensors[f"layers.0.q_proj.{part}"] for part in parts[:3])
    assert set(codes_of(zeros).flatten().tolist()) == {7}  # one less than the middle
    steps = scales.t().float().repeat_interleave(GROUP, 1)
    read = (codes_of(codes.t()) - 8) * steps
    assert ((read - weight).abs() <= 0.501 * steps).all()
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_size"] == 256
    assert config["quantization_config"]["quant_method"] == "gptq"
    written = (folder / "model.safetensors").stat()
    convert(model, folder)
    assert (folder / "model.safetensors").stat() == written
