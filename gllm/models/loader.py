"""Reading one stage's weights from a Hugging Face folder.

Owns files, names and shapes: tensors are read straight from memory-mapped safetensors, only those
that are asked for, and every tensor of the stage has to be asked for. Does not know what a model
computes with them.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gllm.kernels.fp8_weights import Fp8Matrix
from gllm.kernels.linear_fp8 import dequantize, prepare_fp8
from gllm.models.errors import ModelError
from gllm.models.spec import Model
from gllm.models.stored_tensor import CPU, StoredTensor, StoredTensors, split_experts
from gllm.models.tensor_names import TensorNames
from gllm.models.weight_files import find_weight_files, is_lfs_pointer, lfs_error

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
COMPARED_ROWS = 1024
SCALES = ("weight_scale_inv", "weight_scale")
"""What codes of 8-bit floats are multiplied by; both names mean this."""
ACTIVATION_SCALES = ("input_scale", "activation_scale")
"""Scales of activations in 8 bits, not used: activations keep their type, or are scaled here."""


class Checkpoint:
    """The tensors of a folder that one stage reads; a context manager that closes the files."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        model: Model,
        layers: range,
        device: torch.device = CPU,
        keeps_fp8: bool | None = None,
    ) -> None:
        """Tensors of a stage with these layers of the model, as `dtype` on a device; keeps_fp8:
        `matrices` in 8-bit floats stay so, on GPUs where it is not given. Raises ModelError."""
        self.folder = folder
        self.dtype = dtype
        self._device = device
        self._keeps_fp8 = device.type == "cuda" if keeps_fp8 is None else keeps_fp8
        self._stored = model.stored
        self.weight_bytes = 0
        """Bytes of the tensors handed out, as they are in memory."""
        self._progress: Progress = lambda done, total: None
        self._done = 0
        self._files = ExitStack()
        homes = self._open(model.optional_prefix)
        split_experts(homes, model)
        self.model = self._with_head(model, homes, layers)
        """The model, with a head of its own where the checkpoint has one that differs."""
        self._names = TensorNames(self.model)
        self._check_names(homes)
        self._homes = {
            name: home for name, home in homes.items() if self._names.is_read(name, layers)
        }
        self._unread = set(self._homes)
        self._total = sum(home.nbytes for home in self._homes.values())

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
        found = self._all(names, shapes, dtype)
        made = [dequantize(part) if isinstance(part, Fp8Matrix) else part for part in found]
        self.weight_bytes += sum(part.nbytes for part in made)
        return made

    def matrices(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor] | list[Fp8Matrix]:
        """As `parts`; in 8-bit floats where all of them are and they are to be kept."""
        if not self._keeps_fp8 or not all(self._is_fp8(name) for name in names):
            return self.parts(names, shapes)
        made = [part for part in self._all(names, shapes, None) if isinstance(part, Fp8Matrix)]
        self.weight_bytes += sum(part.nbytes for part in made)
        return made

    def finish(self) -> None:
        """Check that nothing of the stage was left unread. Raises ModelError."""
        self._refuse(sorted(self._unread))

    def _check_names(self, names: Iterable[str]) -> None:
        """Refuse tensors that no stage reads. Raises ModelError."""
        unknown = self._names.unknown(names)
        layers = self._names.excess_layers(unknown)
        reason = ""
        if layers:
            count = self.model.num_layers
            reason = f"; config.json has {count} layers, the files have one of number {layers[-1]}"
        self._refuse(unknown, reason)

    def _refuse(self, names: Sequence[str], reason: str = "") -> None:
        """Refuse these tensors, if there are any. Raises ModelError."""
        if names:
            raise ModelError(
                f"{self.folder} has tensors that its architecture has no use for, so it would be "
                f"computed wrongly: {', '.join(names[:5])} ({len(names)} in all){reason}"
            )

    def _with_head(self, model: Model, homes: StoredTensors, layers: range) -> Model:
        """Return the model with the LM head that the files have; drops the copy of a tied one.

        transformers does not tie weights that differ, whatever config.json says.
        """
        embedding = f"{model.embedding.name}.weight"
        own = next(
            (name for name in _head_names(model) if name in homes and model.head_is_tied), None
        )
        if own is None:
            return model
        if embedding not in homes:
            homes[embedding] = homes[own]
        if _are_equal(homes[own], homes[embedding]):
            del homes[own]
            return model
        if layers.stop == model.num_layers:
            told = "%s differs from the embedding, which config.json ties it to: it is used"
            log.warning(told, own)
        return replace(model, head=replace(model.head, name=own.removesuffix(".weight")))

    def _all(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None,
    ) -> list[Tensor | Fp8Matrix]:
        each = zip(names, shapes, strict=True)
        return [self._tensor(name, shape, dtype or self.dtype) for name, shape in each]

    def _is_fp8(self, name: str) -> bool:
        """Whether a tensor is stored in 8-bit floats."""
        home = self._homes.get(name)
        return home is not None and home.dtype == "F8_E4M3"

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | Fp8Matrix:
        tensor = self._take(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.folder}: tensor {name!r} has shape {tuple(tensor.shape)}, but by "
                f"config.json it has to be {shape}"
            )
        if tensor.dtype == torch.float8_e4m3fn and self._stored is not None:
            return self._with_scales(name, tensor, dtype)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f"{self.folder}: tensor {name!r} is of type {tensor.dtype}; of quantized "
                "checkpoints only those in float8_e4m3fn are implemented, where config.json has "
                "their quantization_config"
            )
        return tensor.to(self._device, dtype)

    def _with_scales(self, name: str, codes: Tensor, dtype: torch.dtype) -> Fp8Matrix:
        """The weight of codes in 8-bit floats."""
        stem = name.removesuffix("weight")
        scales = next((stem + end for end in SCALES if stem + end in self._homes), None)
        if scales is None or codes.dim() != 2 or self._stored is None:
            raise ModelError(
                f"{self.folder}: tensor {name!r} is of type {codes.dtype} and shape "
                f"{tuple(codes.shape)}, but there is no {stem + SCALES[0]!r} to scale it by"
            )
        for end in ACTIVATION_SCALES:
            if stem + end in self._homes:
                self._take(stem + end)
        codes, factors = codes.to(self._device), self._take(scales).to(self._device)
        try:
            return prepare_fp8(codes, factors, self._stored.block, dtype)
        except ValueError as error:
            raise ModelError(f"{self.folder}: tensor {name!r} {error} ({scales})") from error

    def _take(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        if name not in self._homes:
            raise ModelError(f"{self.folder} lacks the tensor {name!r}")
        tensor = self._homes[name].read()
        self._unread.discard(name)
        self._done += tensor.nbytes
        self._progress(self._done, self._total)
        return tensor

    def _open(self, prefix: str) -> StoredTensors:
        """Open the files of the folder; return their tensors by their full names."""
        homes: StoredTensors = {}
        for path in find_weight_files(self.folder):
            try:
                handle = self._files.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError as error:
                raise ModelError(f"{path} is missing: download the model again") from error
            except (OSError, SafetensorError) as error:
                if is_lfs_pointer(path):
                    raise ModelError(lfs_error(path)) from error
                raise ModelError(f"{path} cannot be read: {error}") from error
            homes |= {name: StoredTensor(handle, name) for name in handle.keys()}  # noqa: SIM118
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

    def matrices(
        self, names: Sequence[str], rows: Sequence[int], inputs: int
    ) -> list[Tensor] | list[Fp8Matrix]:
        """Weights [rows[i], inputs] by themselves, to be copied, in 8-bit floats where they are to
        stay so."""
        full = [f"{self._prefix}{name}.weight" for name in names]
        return self._checkpoint.matrices(full, [(count, inputs) for count in rows])


def _head_names(model: Model) -> tuple[str, str]:
    """Return the names that a head of its own may have; files without the optional prefix get it
    before this name, too."""
    name = f"{model.head.own_name}.weight"
    return name, model.optional_prefix + name


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two matrices have the same values, comparing some rows at a time."""
    shape = first.shape
    if shape != second.shape or len(shape) != 2:
        return False
    parts = (slice(begin, begin + COMPARED_ROWS) for begin in range(0, shape[0], COMPARED_ROWS))
    return all(
        torch.equal(first.read_rows(rows).float(), second.read_rows(rows).float()) for rows in parts
    )
