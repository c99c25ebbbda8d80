"""Conversion of the model to a GPTQ folder of 4 bits: symmetric, round to nearest, groups of 128.

Run as `python -m benchmarks.cpu.gptq MODEL FOLDER`, so that torch and the weights take memory and
threads in a process of their own.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 128
MIDDLE = 8
"""Code of zero."""
PER_WORD = 8
"""Codes of 4 bits in a word of 32."""


def pack(codes: Tensor) -> Tensor:
    """Pack codes [8 n, columns] of 4 bits into int32 words [n, columns], the first in low bits."""
    parts = codes.view(-1, PER_WORD, codes.shape[1]).to(torch.int64)
    words = sum(parts[:, place] << 4 * place for place in range(PER_WORD))
    assert isinstance(words, Tensor)
    return words.to(torch.uint32).view(torch.int32)


def quantize(weight: Tensor) -> dict[str, Tensor]:
    """Return GPTQ's tensors of a weight [outputs, inputs]."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, -1, GROUP)
    scales = (groups.abs().amax(2, keepdim=True) / (MIDDLE - 1)).clamp_min(1e-8)
    codes = (groups / scales).round().clamp(-MIDDLE, MIDDLE - 1).to(torch.int64) + MIDDLE
    # Stored zero points are one less (GPTQ's first format).
    zeros = torch.full((outputs, inputs // GROUP), MIDDLE - 1)
    return {
        "qweight": pack(codes.view(outputs, inputs).t().contiguous()),
        "qzeros": pack(zeros).t().contiguous(),
        "scales": scales[..., 0].t().contiguous().half(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def convert(model: Path, folder: Path) -> None:
    """Write the folder unless it exists."""
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(model, partial, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith("_proj") and kind == "weight":
            tensors |= {f"{stem}.{part}": packed for part, packed in quantize(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    config = json.loads((partial / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    }
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    partial.rename(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
