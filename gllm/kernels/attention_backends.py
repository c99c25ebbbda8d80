"""Ways to compute paged attention, by name: what each reads, and which one a stage takes.

Owns the table. A backend is a module with `paged_attention`, as the operation in attention.py, and
where it cannot compute everything `refusal`: why not what a stage wants, and what to do about it.
`auto_refusal`, where there is one, says why another backend is the better choice. A
new one is one file and one line here (and its name among the choices of gllm/config/engine.py).
Modules are imported when first asked for. Does not know what they compute.
"""

import importlib
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Literal

import torch

from gllm.kernels.native.library import native

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Backend:
    """Where a backend is, and where it can be used."""

    module: str
    """Within gllm.kernels."""
    devices: tuple[Device, ...]
    reads: Literal["gathers", "rows", "tables"]
    """The part of an AttentionPlan that it needs. Tables of as many decodes are always alike, so
    that work on them can be recorded and replayed."""


BACKENDS = MappingProxyType(
    {
        "flash-attn": Backend("attention_flash", ("cuda",), "tables"),
        "native": Backend("native.attention", ("cpu",), "rows"),
        "torch": Backend("attention_torch", ("cpu", "cuda"), "gathers"),
        "triton": Backend("triton.attention", ("cuda",), "tables"),
    }
)
AUTO: MappingProxyType[Device, tuple[str, ...]] = MappingProxyType(
    {
        "cpu": ("native", "torch"),
        # FlashAttention's kernels are tuned by hand for each size of head, those in triton/ have
        # never been timed: where both fit, the former are the safer choice. With the default block
        # size of 16 that is nowhere, for FlashAttention wants multiples of 256.
        "cuda": ("flash-attn", "triton"),
    }
)
"""The first that fits is taken. Not torch on a GPU: it is there to find faults in the others."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What the attention of a layer looks like."""

    key_dim: int
    value_dim: int
    shared: bool = False
    """Values are the first elements of the keys: latent attention."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a stage asks of attention."""

    device: Device
    capability: tuple[int, int]
    """Compute capability of the GPU; (0, 0) on a CPU."""
    dtype: torch.dtype
    """Of queries and results."""
    cached: torch.dtype
    """Of keys and values in the cache."""
    block_size: int
    shapes: frozenset[HeadShape]
    """Of the stage's layers."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend and why it is this one."""

    name: str
    reason: str


def choose(requested: str, wanted: Wanted) -> Choice:
    """The backend that is requested, or for auto the first of AUTO that fits.

    Raises ValueError that names the flag, the reason and the fix where the requested one does not.
    """
    if requested != "auto":
        why = refusal(requested, wanted)
        if why is not None:
            raise ValueError(f"--attention-backend {requested}: {why}")
        return Choice(requested, "as asked for")
    refused: list[str] = []
    for name in AUTO[wanted.device]:
        why = refusal(name, wanted) or auto_refusal(name, wanted)
        if why is None:
            return Choice(name, f"not {'; '.join(refused)}" if refused else "fits and is preferred")
        refused.append(f"{name}: {why}")
    raise ValueError(f"--attention-backend auto: none fits; {'; '.join(refused)}")


def refusal(name: str, wanted: Wanted) -> str | None:
    """Why a backend cannot do what is wanted, and what to do; None where it can."""
    if wanted.device not in BACKENDS[name].devices:
        there = "on a CPU" if wanted.device == "cpu" else "on GPUs"
        usable = (other for other, each in BACKENDS.items() if wanted.device in each.devices)
        return f"does not compute {there}; choose auto or one of {', '.join(usable)}"
    found = getattr(implementation(name), "refusal", None)
    return None if found is None else found(wanted)


def auto_refusal(name: str, wanted: Wanted) -> str | None:
    """Why auto goes on to the next backend, although this one can do what is wanted."""
    found = getattr(implementation(name), "auto_refusal", None)
    return None if found is None else found(wanted)


@cache
def implementation(name: str) -> ModuleType:
    """A backend's module."""
    return importlib.import_module(f"gllm.kernels.{BACKENDS[name].module}")


def usual_backend(dtype: torch.dtype, device: torch.device) -> str:
    """What computes queries of a dtype on a device against a cache of the same dtype, where nobody
    has chosen."""
    if device.type != "cpu":
        return "triton"
    library = native(torch.empty(0, dtype=dtype), "attention")
    return "torch" if library is None else "native"
