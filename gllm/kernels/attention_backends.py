"""Table of attention backends, and the choice of one backend per stage.

A backend is a module with a function `paged_attention` (signature: gllm/kernels/attention.py). A
backend with limits also has `unsupported_reason`: it returns why the backend cannot meet a stage's
requirements, and the fix. Optionally `auto_skip_reason` returns why `auto` should try the next
backend. To add a backend, add a file, a line to BACKENDS, and its name to the choices in
gllm/config/engine.py. Modules are imported on first use.
"""

import importlib
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Literal

import torch

from gllm.kernels.native.library import library_for

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """Entry of the registry of attention backends: its module, devices and kind of metadata."""

    module: str
    """Name within gllm.kernels."""
    devices: tuple[DeviceType, ...]
    reads: Literal["gathers", "rows", "tables"]
    """The field of AttentionPlan that the backend reads. Tables of the same number of decodes have
    the same shape, so that work on them can be captured in a graph and replayed."""


BACKENDS = MappingProxyType(
    {
        "flash-attn": AttentionBackend("attention_flash", ("cuda",), "tables"),
        "native": AttentionBackend("native.attention", ("cpu",), "rows"),
        "torch": AttentionBackend("attention_torch", ("cpu", "cuda"), "gathers"),
        "triton": AttentionBackend("triton.attention", ("cuda",), "tables"),
    }
)
AUTO: MappingProxyType[DeviceType, tuple[str, ...]] = MappingProxyType(
    {
        "cpu": ("native", "torch"),
        # FlashAttention's kernels are hand-tuned per head size and those in triton/ have never been
        # timed, so FlashAttention is preferred where both are supported. That needs a block size
        # that is a multiple of 256; the default is 16.
        "cuda": ("flash-attn", "triton"),
    }
)
"""Backends that `auto` tries, in order. torch on a GPU is a reference and only used by name."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of the key head and the value head that one layer stores in the KV cache."""

    key_dim: int
    """Elements of a key head."""
    value_dim: int
    """Elements of a value head."""
    shared: bool = False
    """Values are the first elements of the keys (latent attention)."""
    has_sinks: bool = False
    """The softmax has a further key without a value (AttentionScaling.sinks)."""
    has_chunks: bool = False
    """The window is an AttentionChunk."""
    is_symmetric: bool = False
    """The window is a SymmetricWindow."""


@dataclass(frozen=True, slots=True)
class AttentionRequirements:
    """Device, dtypes, block size and head sizes that an attention backend must support."""

    device: DeviceType
    capability: tuple[int, int]
    """Compute capability of the GPU; (0, 0) on a CPU."""
    dtype: torch.dtype
    """Dtype of queries and outputs."""
    cache_dtype: torch.dtype
    """Dtype of the KV cache."""
    block_size: int
    """Tokens per KV block."""
    shapes: frozenset[HeadShape]
    """Head shapes of all layers of the stage."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Name of the selected attention backend, and the reason, which is logged."""

    name: str
    reason: str


def choose_backend(requested: str, requirements: AttentionRequirements) -> BackendChoice:
    """Select the attention backend: the requested one, or for "auto" the first suitable one.

    "auto" tries the backends that AUTO lists for the device. It skips those that do not support the
    requirements and those that were measured to be slower than the next one.

    Raises:
        ValueError: The requested backend, or every backend that "auto" tries, is not supported. The
            message names the flag, the reason and the fix.
    """
    if requested != "auto":
        reason = unsupported_reason(requested, requirements)
        if reason is not None:
            raise ValueError(f"--attention-backend {requested}: {reason}")
        return BackendChoice(requested, "as requested")
    skipped: list[str] = []
    for name in AUTO[requirements.device]:
        reason = unsupported_reason(name, requirements) or auto_skip_reason(name, requirements)
        if reason is None:
            return BackendChoice(
                name, f"not {'; '.join(skipped)}" if skipped else "supported and preferred"
            )
        skipped.append(f"{name}: {reason}")
    raise ValueError(f"--attention-backend auto: none is supported; {'; '.join(skipped)}")


def find_supported_backend(requested: str, requirements: AttentionRequirements) -> str:
    """Return the requested backend, or for "auto" the first one that supports the requirements.

    Unlike `choose_backend`, it ignores measured times, so the result is the same on every machine.
    At least one backend must be supported.
    """
    if requested != "auto":
        return requested
    names = AUTO[requirements.device]
    return next(name for name in names if unsupported_reason(name, requirements) is None)


def unsupported_reason(name: str, requirements: AttentionRequirements) -> str | None:
    """Explain why an attention backend cannot be used and how to fix it; None if it can be used.

    The backend is looked up by name and checked against the device, dtypes, block size and head
    sizes.
    """
    if requirements.device not in BACKENDS[name].devices:
        place = "on a CPU" if requirements.device == "cpu" else "on GPUs"
        usable = (
            other for other, backend in BACKENDS.items() if requirements.device in backend.devices
        )
        return f"does not compute {place}; choose auto or one of {', '.join(usable)}"
    check = getattr(backend_module(name), "unsupported_reason", None)
    return None if check is None else check(requirements)


def symmetric_reason(requirements: AttentionRequirements) -> str | None:
    """Explain why a backend of causal kernels cannot be used; None if all layers are causal."""
    if not any(shape.is_symmetric for shape in requirements.shapes):
        return None
    fix = "choose torch" if requirements.device == "cpu" else "choose --device cpu"
    return f"does not compute bidirectional attention; {fix}"


def auto_skip_reason(name: str, requirements: AttentionRequirements) -> str | None:
    """Explain why `--attention-backend auto` skips a supported backend; None if it does not.

    The native CPU backend, for example, is skipped where torch was measured to be faster.
    """
    check = getattr(backend_module(name), "auto_skip_reason", None)
    return None if check is None else check(requirements)


@cache
def backend_module(name: str) -> ModuleType:
    """Import and return the Python module of an attention backend, by the backend's name."""
    return importlib.import_module(f"gllm.kernels.{BACKENDS[name].module}")


def default_backend(dtype: torch.dtype, device: torch.device) -> str:
    """Return the name of the attention backend to use when none was configured.

    Args:
        dtype: dtype of the queries and the KV cache.
        device: device of the tensors.
    """
    if device.type != "cpu":
        return "triton"
    library = library_for(torch.empty(0, dtype=dtype), "attention")
    return "torch" if library is None else "native"
