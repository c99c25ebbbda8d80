"""Selection of a build of the compiled CPU kernels: by GLLM_CPU_KERNELS, else the best usable one.

A build is usable if it was compiled and the processor supports its instruction set. This module
does not import torch: the parent process checks the variable before it starts the workers.
"""

import ctypes
import hashlib
import os
import platform
from collections.abc import Callable, Mapping, Set
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

BUILD_VARIABLE = "GLLM_CPU_KERNELS"
"""Environment variable that names a build, or OFF."""
OFF = "off"
BFLOAT16 = "avx512_bf16"
"""The build with AVX-512 dot products of bfloat16."""
AMX = "amx_bf16"
"""The build with AMX tile products of bfloat16 and of 8-bit codes."""
TILES_PERMITTED = "amx_permitted"
"""Pseudo feature: Linux permits this process to use the AMX tile registers."""

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"})
BUILDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        AMX: _AVX512
        | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8", TILES_PERMITTED},
        BFLOAT16: _AVX512 | {"avx512_bf16", "avx512_vnni"},
        "avx512": _AVX512,
        "avx2": frozenset({"avx2", "fma", "f16c"}),
        "portable": frozenset(),
    }
)
"""Builds and the processor features that each one needs, best first. As in setup.py."""

_NO_TILES = "Linux does not permit this process to use AMX (arch_prctl ARCH_REQ_XCOMP_PERM)"
HOW_TO_COMPILE = "install a C++ compiler and install gllm again"


class BuildSelection(NamedTuple):
    """Shared library of compiled CPU kernels that this process uses, and why it was selected.

    There is one library per instruction set, such as AVX2 or AVX-512; each is called a build.
    """

    name: str
    """Key of BUILDS, or OFF."""
    path: Path | None
    """The shared library; None for OFF."""
    reason: str
    """Reason for the selection, for the log."""
    is_named: bool
    """True if GLLM_CPU_KERNELS names the build."""


def select_build(
    environment: Mapping[str, str] | None = None,
    features: Set[str] | None = None,
    folder: Path | None = None,
) -> BuildSelection:
    """Select the shared library of compiled CPU kernels, one of several builds per instruction set.

    The environment variable GLLM_CPU_KERNELS names a build or "off". If it is unset, the best build
    that was compiled and that the processor supports is used.

    Args:
        environment: Environment variables, by default those of the process.
        features: Processor features, by default those of this processor.
        folder: Folder of the libraries, by default that of this module.

    Raises:
        ValueError: The name is unknown, or the build was not compiled or is not supported by the
            processor. The message names the variable and its usable values.
    """
    features = processor_features() if features is None else features
    name = (os.environ if environment is None else environment).get(BUILD_VARIABLE, "")
    libraries = find_compiled_builds(folder)
    usable = {build: path for build, path in libraries.items() if features >= BUILDS[build]}
    if not name:
        if usable:
            best, path = next(iter(usable.items()))
            reason = "the best that this processor supports" + _without_tiles(libraries, features)
            return BuildSelection(best, path, reason, False)
        return BuildSelection(OFF, None, _reason_for_none(libraries), False)
    if name == OFF:
        return BuildSelection(OFF, None, f"{BUILD_VARIABLE} is {OFF}", True)
    if name not in usable:
        raise ValueError(_unusable_message(name, list(usable), name in libraries, features))
    return BuildSelection(name, usable[name], f"{BUILD_VARIABLE} names it", True)


def find_compiled_builds(folder: Path | None = None) -> dict[str, Path]:
    """Return the paths of the compiled CPU kernel libraries by build name, best first.

    A build is the library for one instruction set, for example "avx2".
    """
    libraries = {}
    for flavor in BUILDS:
        paths = sorted((folder or Path(__file__).parent).glob(f"_{flavor}.*"))
        if paths:
            libraries[flavor] = paths[0]
    return libraries


def digest_sources(folder: Path) -> str:
    """Return a digest of the C++ files in a folder, which a build compiled from them has in it."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def check_sources(path: Path, digest: str) -> None:
    """Refuse a shared library that was compiled from other sources than those beside it.

    Kernels read structures whose layout Python writes: an old library computes wrong numbers. An
    installed package has no sources, and is not checked.

    Args:
        path: of the shared library.
        digest: that the library has in it; empty for none.

    Raises:
        ValueError: They differ.
    """
    if any(path.parent.glob("*.cpp")) and digest != digest_sources(path.parent):
        raise ValueError(
            f"{path} was compiled from other sources than those in its folder: run `make setup`, "
            "or pip install -e ., and look for errors of the compiler"
        )


def processor_features(
    cpuinfo: Path = Path("/proc/cpuinfo"), permit_tiles: Callable[[], bool] | None = None
) -> set[str]:
    """Return the instruction-set flags of this processor from /proc/cpuinfo; empty if unknown.

    Also requests Linux's permission to use the AMX tile registers in this process, and adds
    TILES_PERMITTED to the flags if it is granted.

    Args:
        cpuinfo: file to read.
        permit_tiles: requests the permission and returns True if it is granted; by default from
            Linux.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    if "amx_tile" in flags and (permit_tiles or _permit_tiles)():
        flags.add(TILES_PERMITTED)
    return flags


@cache
def _permit_tiles() -> bool:
    """Request permission from Linux to use tile registers; return True if it is granted.

    Linux saves these 8 KB of registers per thread only for processes that requested them. Source:
    Linux, Documentation/arch/x86/xstate.rst.
    """
    system_call, request_permission, tile_data = 158, 0x1023, 18
    if platform.machine() != "x86_64":
        return False
    numbers = [ctypes.c_long(number) for number in (system_call, request_permission, tile_data)]
    result = ctypes.CDLL(None, use_errno=True).syscall(*numbers)
    return bool(result == 0)


def _without_tiles(libraries: Mapping[str, Path], features: Set[str]) -> str:
    """Return a note for the reason if AMX only lacks the permission for tile registers."""
    if AMX in libraries and BUILDS[AMX] - features == {TILES_PERMITTED}:
        return f"; not {AMX}: {_NO_TILES}"
    return ""


def _unusable_message(name: str, usable: list[str], is_compiled: bool, features: Set[str]) -> str:
    choices = ", ".join([*usable, OFF])
    if name not in BUILDS:
        names = ", ".join([*BUILDS, OFF])
        return (
            f"{BUILD_VARIABLE} is {name!r}, but has to be one of {names}, of which this machine "
            f"has {choices}; unset it for the best one"
        )
    missing = sorted(BUILDS[name] - features)
    if missing:
        lacked = ", ".join(feature for feature in missing if feature != TILES_PERMITTED)
        reason = f"this processor lacks {lacked}" if lacked else _NO_TILES
        return f"{BUILD_VARIABLE} is {name}, but {reason}: choose one of {choices}, or unset it"
    assert not is_compiled
    return (
        f"{BUILD_VARIABLE} is {name}, but that build was not compiled: choose one of {choices}, "
        f"or {HOW_TO_COMPILE}"
    )


def _reason_for_none(libraries: Mapping[str, Path]) -> str:
    if not libraries:
        return f"none was compiled; {HOW_TO_COMPILE}"
    return (
        f"this processor supports none of those compiled ({', '.join(libraries)}); {HOW_TO_COMPILE}"
    )
