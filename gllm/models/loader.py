"""Reading one stage's weights from a Hugging Face folder.

Owns files, names and shapes: tensors are read straight from memory-mapped safetensors, only those
that are asked for, and every tensor of the stage has to be asked for. Does not know what a model
computes with them.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gllm.models.errors import ModelError
from gllm.models.spec import Model

Progress = Callable[[int, int], None]
CPU = torch.device("cpu")


class Checkpoint:
    """The tensors of a folder that one stage reads; a context manager that closes the files."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        model: Model,
        layers: range,
        device: torch.device = CPU,
    ) -> None:
        """Tensors of a stage with these layers of the model, as `dtype` on a device. Raises
        ModelError."""
        self.folder = folder
        self.dtype = dtype
        self._device = device
        self.weight_bytes = 0
        """Bytes of the tensors handed out, as they are in memory."""
        self._progress: Progress = lambda done, total: None
        self._done = 0
        self._files = ExitStack()
        self._ignored = re.compile("|".join(model.ignored) or "(?!)")
        self._homes = {
            name: home
            for name, home in self._open(model.optional_prefix).items()
            if _belongs(name, model, layers)
        }
        self._unread = set(self._homes)
        self._total = sum(_stored_bytes(*home) for home in self._homes.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    def report_to(self, progress: Progress) -> None:
        """Call `progress` with (bytes read, bytes in all) after each tensor, and once now."""
        self._progress = progress
        progress(self._done, self._total)

    def read(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The tensors of these names and shapes, one after the other along the first dimension."""
        return torch.cat(self.parts(names, shapes, dtype))

    def parts(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """The tensors by themselves; to be copied, for they may be the files' memory."""
        each = zip(names, shapes, strict=True)
        kind = dtype or self.dtype
        found = [self._tensor(name, shape).to(self._device, kind) for name, shape in each]
        self.weight_bytes += sum(part.nbytes for part in found)
        return found

    def finish(self) -> None:
        """Check that nothing of the stage was left unread. Raises ModelError."""
        left = sorted(name for name in self._unread if not self._ignored.fullmatch(name))
        if left:
            raise ModelError(
                f"{self.folder} has tensors that its architecture has no use for, so it would be "
                f"computed wrongly: {', '.join(left[:5])} ({len(left)} in all)"
            )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._homes:
            raise ModelError(f"{self.folder} lacks the tensor {name!r}")
        handle, stored = self._homes[name]
        with CPU:  # whatever the default is meanwhile
            tensor: Tensor = handle.get_tensor(stored)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.folder}: tensor {name!r} has shape {tuple(tensor.shape)}, but by "
                f"config.json it has to be {shape}"
            )
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f"{self.folder}: tensor {name!r} is of type {tensor.dtype}; quantized "
                "checkpoints are not implemented"
            )
        self._unread.discard(name)
        self._done += tensor.nbytes
        self._progress(self._done, self._total)
        return tensor

    def _open(self, prefix: str) -> dict[str, tuple[Any, str]]:
        """The open file of each tensor in the folder, and its name there, by its full name."""
        homes: dict[str, tuple[Any, str]] = {}
        for path in _files_of(self.folder):
            try:
                handle = self._files.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError as error:
                raise ModelError(f"{path} is missing: download the model again") from error
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from error
            homes |= {name: (handle, name) for name in handle.keys()}  # noqa: SIM118
        if prefix and not any(name.startswith(prefix) for name in homes):
            homes = {prefix + name: home for name, home in homes.items()}
        return homes


class Weights:
    """Tensors of a checkpoint whose names begin alike."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str = "", quantization: str = "none"
    ) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix
        self.quantization = quantization
        """What linear maps are to be made of these weights, by a name of gllm.kernels.linear."""

    def at(self, part: str) -> "Weights":
        """Those below `part`, a name without the final dot."""
        return Weights(self._checkpoint, f"{self._prefix}{part}.", self.quantization)

    def read(self, name: str, *shape: int) -> Tensor:
        """One tensor of this shape."""
        return self._checkpoint.read([self._prefix + name], [shape])

    def read_exact(self, name: str, *shape: int) -> Tensor:
        """One tensor of this shape in float32, for what a smaller type would round too much."""
        return self._checkpoint.read([self._prefix + name], [shape], torch.float32)

    def fused(self, names: Sequence[str], kind: str, rows: Sequence[int], *rest: int) -> Tensor:
        """Tensors `name.kind` of shapes [rows[i], *rest], stacked along the first dimension."""
        return torch.cat(self.parts(names, kind, rows, *rest))

    def parts(
        self, names: Sequence[str], kind: str, rows: Sequence[int], *rest: int
    ) -> list[Tensor]:
        """The same by themselves; to be copied."""
        full = [f"{self._prefix}{name}.{kind}" for name in names]
        return self._checkpoint.parts(full, [(count, *rest) for count in rows])


def _files_of(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index where it has one. Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} has no usable weight_map: {error!r}") from error
        return [folder / name for name in sorted(names)]
    if single.is_file():
        return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise ModelError(
            f"{folder} has weights in PyTorch's pickle format only; convert them to safetensors "
            "(transformers: from_pretrained, then save_pretrained)"
        )
    raise ModelError(f"{folder} has no model.safetensors and no model.safetensors.index.json")


def _belongs(name: str, model: Model, layers: range) -> bool:
    """Whether a stage with these layers has a tensor."""
    in_layer = re.match(re.escape(model.layer_name).replace(r"\{\}", r"(\d+)") + r"\.", name)
    if in_layer is not None:
        return int(in_layer[1]) in layers
    return name.rpartition(".")[0] in model.outside_layers(layers)


def _stored_bytes(handle: Any, name: str) -> int:
    """Bytes of a tensor in its file, from the header alone."""
    described = handle.get_slice(name)
    size = {"F32": 4, "BF16": 2, "F16": 2}.get(described.get_dtype(), 1)
    for length in described.get_shape():
        size *= length
    return size
