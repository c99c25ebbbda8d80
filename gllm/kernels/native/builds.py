"""Builds of the compiled kernels for CPUs: those that were compiled and that this processor runs.

Owns the selection, by GLLM_CPU_KERNELS or the best build. Imports no torch: the parent of the
workers checks the variable before it starts them.
"""

import ctypes
import os
import platform
from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

VARIABLE = "GLLM_CPU_KERNELS"
"""Environment variable that names a build, or OFF."""
OFF = "off"
BFLOAT16 = "avx512_bf16"
"""The build that multiplies bfloat16 in vectors."""
AMX = "amx_bf16"
"""The build that multiplies bfloat16 in tiles."""
TILES_PERMITTED = "amx_permitted"
"""Not a feature of the processor: Linux lets this process use AMX's tile registers."""

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"})
FLAVORS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        AMX: _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", TILES_PERMITTED},
        BFLOAT16: _AVX512 | {"avx512_bf16", "avx512_vnni"},
        "avx512": _AVX512,
        "avx2": frozenset({"avx2", "fma", "f16c"}),
        "portable": frozenset(),
    }
)
"""Builds and the processor features that each needs, best first. As in setup.py."""

_NO_TILES = "Linux does not let this process use AMX (arch_prctl ARCH_REQ_XCOMP_PERM)"
HOW_TO_COMPILE = "install a C++ compiler and install gllm again"


class Selection(NamedTuple):
    """The build that this process uses."""

    name: str
    """Of FLAVORS, or OFF."""
    path: Path | None
    """None for OFF."""
    reason: str
    is_named: bool
    """GLLM_CPU_KERNELS names it."""


def select(
    environment: Mapping[str, str] | None = None,
    features: Set[str] | None = None,
    folder: Path | None = None,
) -> Selection:
    """Select the build that GLLM_CPU_KERNELS names, or the best one where it is unset.

    features: of the processor, default this one's; folder: of the libraries. Raises ValueError
    that names the variable and its usable values for a name that is none and for a build that was
    not compiled or that the processor does not run.
    """
    features = processor_features() if features is None else features
    name = (os.environ if environment is None else environment).get(VARIABLE, "")
    libraries = compiled(folder)
    usable = {each: path for each, path in libraries.items() if features >= FLAVORS[each]}
    if not name:
        if usable:
            best, path = next(iter(usable.items()))
            reason = "the best that this processor runs" + _without_tiles(libraries, features)
            return Selection(best, path, reason, False)
        return Selection(OFF, None, _reason_for_none(libraries), False)
    if name == OFF:
        return Selection(OFF, None, f"{VARIABLE} is {OFF}", True)
    if name not in usable:
        raise ValueError(_refusal(name, list(usable), name in libraries, features))
    return Selection(name, usable[name], f"{VARIABLE} names it", True)


def compiled(folder: Path | None = None) -> dict[str, Path]:
    """Libraries that were compiled, best first."""
    found = {}
    for flavor in FLAVORS:
        paths = sorted((folder or Path(__file__).parent).glob(f"_{flavor}.*"))
        if paths:
            found[flavor] = paths[0]
    return found


def processor_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the instruction sets as Linux names them, and TILES_PERMITTED; empty where it does not
    tell.

    Requests the permission for AMX's tile registers, for this process and all of its threads.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    found = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    if "amx_tile" in found and _permit_tiles():
        found.add(TILES_PERMITTED)
    return found


@cache
def _permit_tiles() -> bool:
    """Request Linux's permission to use tile registers. Return True if it is granted.

    Linux saves their 8 KB with a thread only where a process has asked for it. Source: Linux,
    Documentation/arch/x86/xstate.rst.
    """
    system_call, request_permission, tile_data = 158, 0x1023, 18
    if platform.machine() != "x86_64":
        return False
    result = ctypes.CDLL(None, use_errno=True).syscall(
        *(ctypes.c_long(number) for number in (system_call, request_permission, tile_data))
    )
    return bool(result == 0)


def _without_tiles(libraries: Mapping[str, Path], features: Set[str]) -> str:
    """Return what a reason adds where only the permission for tile registers is missing."""
    if AMX in libraries and FLAVORS[AMX] - features == {TILES_PERMITTED}:
        return f"; not {AMX}: {_NO_TILES}"
    return ""


def _refusal(name: str, usable: list[str], is_compiled: bool, features: Set[str]) -> str:
    choices = ", ".join([*usable, OFF])
    if name not in FLAVORS:
        names = ", ".join([*FLAVORS, OFF])
        return (
            f"{VARIABLE} is {name!r}, but has to be one of {names}, of which this machine has "
            f"{choices}; unset it for the best one"
        )
    missing = sorted(FLAVORS[name] - features)
    if missing:
        lacked = ", ".join(feature for feature in missing if feature != TILES_PERMITTED)
        reason = f"this processor lacks {lacked}" if lacked else _NO_TILES
        return f"{VARIABLE} is {name}, but {reason}: choose one of {choices}, or unset it"
    assert not is_compiled
    return (
        f"{VARIABLE} is {name}, but that build was not compiled: choose one of {choices}, "
        f"or {HOW_TO_COMPILE}"
    )


def _reason_for_none(libraries: Mapping[str, Path]) -> str:
    if not libraries:
        return f"none was compiled; {HOW_TO_COMPILE}"
    return f"this processor runs none of those compiled ({', '.join(libraries)}); {HOW_TO_COMPILE}"
