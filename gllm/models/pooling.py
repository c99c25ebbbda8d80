"""Pooling of the hidden states of a text to its embedding.

Source: Reimers and Gurevych, "Sentence-BERT" (2019), section 3; the dense layers are those of
sentence-transformers.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gllm.models.errors import ModelError
from gllm.models.spec.model import DenseSpec, PoolingSpec
from gllm.models.weight_files import SINGLE


class MeanPooling:
    """Mean of the hidden states of a text, and dense layers after it, in float32."""

    def __init__(self, spec: PoolingSpec, folder: Path) -> None:
        """Read the dense layers from the model's folder.

        Raises:
            ModelError: a file is missing, or does not have the tensors.
        """
        self.dense_layers = [(dense, *_read_dense(dense, folder)) for dense in spec.dense_layers]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the embedding [size] float32 of the hidden states [tokens, hidden] of a text.

        hidden: after the final norm, float32.
        """
        pooled = hidden.mean(dim=0)
        for dense, weight, bias in self.dense_layers:
            pooled = torch.nn.functional.linear(pooled, weight, bias)
            if dense.has_tanh:
                pooled = pooled.tanh()
        return pooled


def _read_dense(dense: DenseSpec, folder: Path) -> tuple[Tensor, Tensor | None]:
    """Return weight [outputs, inputs] and bias [outputs] of a dense layer in float32."""
    path = folder / dense.folder / SINGLE
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (dense.outputs, dense.inputs)}
    if dense.has_bias:
        shapes["linear.bias"] = (dense.outputs,)
    try:
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != shapes:
        found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ModelError(f"{path} has {found or 'no tensors'}, but has to have {shapes}")
    return tensors["linear.weight"], tensors.get("linear.bias")
