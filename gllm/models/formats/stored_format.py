"""Quantized weights in checkpoints: the interface of each stored format, and the registry.

A stored format knows the tensors that a checkpoint has for a linear layer, and reads them, or the
part of one tensor parallel rank, as a `Weight`: in the memory format of the kernels that multiply
by it. A format is one file of this package and one line of STORED_FORMATS.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gllm.kernels.weight_format import Weight
from gllm.models.shard import TensorShards
from gllm.models.spec.model import QuantizationSpec
from gllm.models.spec.parts import DimensionShard

STORED_FORMATS = MappingProxyType(
    {
        "fp8": "gllm.models.formats.fp8:StoredFp8",
        "int-quantized": "gllm.models.formats.int8:StoredInt8",
        "awq": "gllm.models.formats.packed_integers:StoredAwq",
        "gptq": "gllm.models.formats.packed_integers:StoredGptq",
        "gptq_v2": "gllm.models.formats.packed_integers:StoredGptqV2",
        "pack-quantized": "gllm.models.formats.packed_integers:StoredPackQuantized",
        "mxfp4-pack-quantized": "gllm.models.formats.packed_floats:StoredMxfp4",
        "nvfp4-pack-quantized": "gllm.models.formats.packed_floats:StoredNvfp4",
    }
)
"""Formats by name, as "module:class", imported on first use; `read_quantization` selects one."""


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A quantized linear layer in a checkpoint: its tensors, and the part of it to load."""

    spec: QuantizationSpec
    shape: tuple[int, int]
    """Outputs and inputs of the whole layer."""
    rows: DimensionShard | None
    """Outputs to load; None for all."""
    columns: DimensionShard | None
    """Inputs to load; None for all."""
    dtype: torch.dtype
    """Dtype of the floats that the weight represents."""
    shape_of: Callable[[str], tuple[int, ...] | None]
    """Shape of the layer's tensor whose name ends so; None if there is none."""
    read_shards: Callable[[str, TensorShards], Tensor]
    """Reads the shards of that tensor's dimensions; none for all of it."""

    def has(self, name: str) -> bool:
        """Return True if the layer has a tensor whose name ends so."""
        return self.shape_of(name) is not None

    def read(self, name: str, shape: tuple[int, ...], shards: TensorShards = ()) -> Tensor:
        """Return a tensor of the layer, or its shard.

        Args:
            name: last part of its name.
            shape: shape that the whole tensor has to have.
            shards: shards of its dimensions; empty for all of it.

        Raises:
            ValueError: the tensor is missing or has another shape.
        """
        stored = self.shape_of(name)
        if stored is None:
            raise ValueError(f"has no {name!r} beside it")
        if stored != shape:
            outputs, inputs = self.shape
            raise ValueError(
                f"has {name!r} of shape {stored}, but {outputs} outputs and {inputs} inputs by "
                f"config.json need {shape}"
            )
        return self.read_shards(name, shards if any(shards) else ())


class StoredFormat(ABC):
    """Reader of one format of quantized weights in checkpoints. Instances have no state."""

    codes: ClassVar[str] = "weight"
    """Last part of the name of a layer's tensor with the codes."""
    dtypes: ClassVar[frozenset[str]]
    """Types of that tensor, by their safetensors names; others are not quantized."""
    devices: ClassVar[tuple[str, ...]]
    """Types of devices whose kernels multiply by the weights. On others they become floats."""
    is_read_on_cpu: ClassVar[bool] = True
    """True if `load` computes on the CPU, whatever device multiplies by the weights."""

    @abstractmethod
    def load(self, layer: StoredLinear) -> Weight:
        """Load the part of a layer's weight.

        Raises:
            ValueError: a tensor is missing or does not fit; the message continues the name of the
                tensor with the codes.
        """


@cache
def stored_format(name: str) -> StoredFormat:
    """Return the stored format with this name, a key of STORED_FORMATS."""
    module, class_name = STORED_FORMATS[name].split(":")
    instance: StoredFormat = getattr(importlib.import_module(module), class_name)()
    return instance
