"""Checkpoints in formats of few bits, rounded to nearest, from a folder with floats.

The layouts are written by the writers of the tests; no tool calibrates the weights.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from gllm.models.config import read_config
from gllm.models.loader import Checkpoint
from tests.support.models import packed_models
from tests.support.models.packed_models import Array, Integers, Tensors

GROUP = 64
"""Inputs that share a scale; a divisor of all widths of SmolLM2-135M."""
FILES = "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"


def round_in_groups(weight: Array, width: int = 4, is_symmetric: bool = False) -> Integers:
    """Round a weight [outputs, inputs] to the nearest codes between the ends of each group."""
    outputs, inputs = weight.shape
    groups = np.arange(inputs) // GROUP
    blocks = weight.reshape(outputs, -1, GROUP)
    top = (1 << width) - 1
    if is_symmetric:
        scales = (np.abs(blocks).max(2) / (top // 2)).astype(np.float16)
        zeros = np.full(scales.shape, (top + 1) // 2)
    else:
        low, high = np.minimum(blocks.min(2), 0), np.maximum(blocks.max(2), 0)
        scales = ((high - low) / top).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, top).astype(np.int64)
    codes = np.rint(weight / scales[:, groups].astype(np.float32)) + zeros[:, groups]
    return Integers(np.clip(codes, 0, top).astype(np.int64), scales, zeros, groups)


WRITTEN: dict[str, tuple[dict[str, Any], Callable[[Array], Tensors]]] = {
    "AWQ, groups of 64": (
        packed_models.awq_config(GROUP),
        lambda weight: packed_models.pack_awq(round_in_groups(weight)),
    ),
    "GPTQ, groups of 64": (
        packed_models.gptq_config(4, GROUP, sym=True),
        lambda weight: packed_models.pack_gptq(round_in_groups(weight, is_symmetric=True), 4),
    ),
    "GPTQ, 3 bits, groups of 64": (
        packed_models.gptq_config(3, GROUP),
        lambda weight: packed_models.pack_gptq(round_in_groups(weight, 3), 3),
    ),
    "GPTQ, 8 bits, groups of 64": (
        packed_models.gptq_config(8, GROUP),
        lambda weight: packed_models.pack_gptq(round_in_groups(weight, 8), 8),
    ),
    "W8A8 int8": (
        packed_models.compressed_config("int-quantized", 8, None),
        lambda weight: packed_models.write_int8(weight)[0],
    ),
    "MXFP4 checkpoint": (
        packed_models.compressed_config("mxfp4-pack-quantized", 4, 32, "float"),
        lambda weight: packed_models.write_fp4(weight, 32, is_nvidia=False)[0],
    ),
    "NVFP4 checkpoint": (
        packed_models.compressed_config(
            "nvfp4-pack-quantized", 4, 16, "float", strategy="tensor_group"
        ),
        lambda weight: packed_models.write_fp4(weight, 16, is_nvidia=True)[0],
    ),
}
"""quantization_config and writer of a weight, by row of the page."""


def write_floats(source: Path, target: Path) -> None:
    """Write the float32 numbers of a folder with GGUF files as a Hugging Face folder."""
    model = read_config(source).model
    with Checkpoint(source, torch.float32, model, range(model.num_layers)) as checkpoint:
        tensors = {
            name: checkpoint.read([name], [shape]).clone()
            for name, shape in checkpoint.stored_shapes.items()
        }
    _write(source, target, tensors, {})


def write_format(source: Path, name: str, target: Path) -> None:
    """Write the folder of floats in a format of WRITTEN; embedding and norms stay floats."""
    quantization, write = WRITTEN[name]
    tensors: Tensors = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            stem = key.removesuffix("weight")
            tensors |= {stem + end: part for end, part in write(tensor.numpy()).items()}
        else:
            tensors[key] = tensor
    _write(source, target, tensors, {"quantization_config": quantization})


def _write(source: Path, target: Path, tensors: Tensors, changes: dict[str, Any]) -> None:
    """Write a folder at once, so that a run that was stopped leaves none."""
    unfinished = target.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    for file in FILES:
        if (source / file).exists():
            shutil.copy(source / file, unfinished / file)
    config = json.loads((source / FILES[0]).read_text()) | changes
    (unfinished / FILES[0]).write_text(json.dumps(config))
    save_file(tensors, unfinished / "model.safetensors")
    unfinished.rename(target)
