"""Headers of a model's GGUF files, with the keys of its architecture.

Files that hold something else than a language model are refused here.
"""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gllm.models.config_reader import FLOAT32_MAX, MAX_LAYERS
from gllm.models.errors import ModelError
from gllm.models.formats.gguf_file import GgufFile, GgufTensor
from gllm.models.formats.gguf_metadata import REMEDY, GgufMetadata

EMBEDDING = "token_embd.weight"
"""Tensor of the token embedding."""


OTHER_CONTENTS = {
    "adapter": "a LoRA adapter, which is not implemented: name the file of a model into which the "
    "adapter is merged",
    "mmproj": "the image part of a model, which is not implemented: name the file of the text "
    "model",
    "imatrix": "statistics for quantization and no model: name the file of the model",
}
"""Contents of files, by `general.type`, that are no model."""


class GgufHeader:
    """Header of a model in one or several files.

    Args:
        paths: the parts of the model, in order.

    Raises:
        ModelError: a file is invalid, or no language model.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files = [GgufFile(path) for path in paths]
        self.path = paths[0]
        self.metadata = GgufMetadata(self.path, self.files[0].metadata)
        self._check_content()
        self.architecture = self.files[0].architecture
        self.tensors: dict[str, tuple[GgufFile, GgufTensor]] = {
            name: (file, tensor) for file in self.files for name, tensor in file.tensors.items()
        }
        if EMBEDDING not in self.tensors:
            raise ModelError(
                f"{self.path} has {len(self.tensors)} tensors, but no {EMBEDDING!r}: it is no "
                "language model, or a part of one; name the file of a model, or its first part"
            )

    def _check_content(self) -> None:
        kind = self.metadata.text("general.type", "model")
        if self.metadata.get("general.architecture") == "clip":
            kind = "mmproj"
        if kind in OTHER_CONTENTS:
            raise ModelError(f"{self.path} is {OTHER_CONTENTS[kind]}")

    def key(self, name: str) -> str:
        """Return the full name of a key of the architecture."""
        return f"{self.architecture}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer of the architecture."""
        return self.metadata.integer(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number of the architecture, in the shortest form that float32 has."""
        value = self.metadata.number(self.key(name), default)
        if abs(value) > FLOAT32_MAX:
            raise self.metadata.error(self.key(name), "a number of float32")
        return float(str(np.float32(value)))

    def has(self, name: str) -> bool:
        """Return True if the file has a key of the architecture."""
        return self.metadata.get(self.key(name)) is not None

    def has_tensor(self, name: str) -> bool:
        """Return True if the file has a tensor."""
        return name in self.tensors

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        heads = self.integer("attention.head_count")
        if heads <= 0:
            raise self.metadata.error(self.key("attention.head_count"), "positive")
        head_dim = self.integer("attention.key_length", self.integer("embedding_length") // heads)
        if head_dim <= 0:
            raise self.metadata.error(self.key("attention.key_length"), "positive")
        return head_dim

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        count = self.integer("block_count")
        if not 0 < count <= MAX_LAYERS:
            raise self.metadata.error(self.key("block_count"), f"1 to {MAX_LAYERS}")
        return count

    def read_numbers(self, name: str) -> list[float]:
        """Return a tensor of one dimension in float32."""
        file, tensor = self.tensors[name]
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.nbytes > 2**16:
            raise ModelError(
                f"{file.path}: tensor {name!r} of type {tensor.type.name} and shape "
                f"{tensor.shape} has to be a short list in F32: {REMEDY}"
            )
        with file.open() as content:
            octets = content.read(tensor.offset, tensor.nbytes)
        return [float(str(np.float32(x))) for (x,) in struct.iter_unpack("<f", octets)]
