"""`python -m gllm.kernels.aot`: compile the Triton kernels without a GPU and check the binaries.

A compiled kernel must not spill registers to memory, must fit into the shared memory of a block,
must use tensor cores where it multiplies tiles, and must prefetch tiles where it has the pipeline
stages for it. Each kernel module lists its variants in KERNEL_SPECS (triton/kernel_specs.py).

Limits of shared memory: NVIDIA, "CUDA C++ Programming Guide", table of technical specifications by
compute capability.
"""

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gllm.kernels.triton.kernel_specs import KernelSpec

KERNEL_PACKAGE = "gllm.kernels.triton"
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
"""Bytes of shared memory per block, by architecture."""
TENSOR_CORES = re.compile(r"^\s*(?:@\S+\s+)?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.", re.M)
BUFFERS = re.compile(
    r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x[^>]*\bmutable\b", re.M
)
"""Buffers of a tile in shared memory, [buffers, rows, columns], that the software pipeliner
allocates for a load within a loop."""
PIPELINED_STAGES = 3
"""Minimum number of stages at which a load overlaps the computation of another tile: n stages use
n - 1 buffers, one more where products are asynchronous (from sm_90 on)."""
USAGE = re.compile(r"\bREG:(\d+)\s+STACK:(\d+).*?\bLOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Request to compile one variant of a Triton kernel for one GPU architecture.

    The variant is named by module and index, so that a job can be sent to another process.
    """

    module: str
    """Name of the kernel module within gllm.kernels.triton."""
    index: int
    """Index in the KERNEL_SPECS of the module."""
    arch: int
    """GPU architecture, for example 90 for sm_90."""
    use: tuple[tuple[str, int], ...] = ()
    """Tile sizes that replace those of the table for the architecture."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """Registers, memory and tensor-core use of a compiled Triton kernel, or the compile error."""

    kernel: str
    """Module and function name of the kernel."""
    label: str
    """Description of the variant, for example `decode, heads of 128, bf16`."""
    arch: int
    """GPU architecture, for example 90 for sm_90."""
    wants_tensor_cores: bool
    """True if the kernel must use tensor cores."""
    registers: int = 0
    """Registers per thread."""
    spilled: int = 0
    """Bytes of local memory per thread for spilled registers."""
    shared: int = 0
    """Bytes of shared memory per block."""
    num_tensor_core_instructions: int = 0
    stages: int = 1
    """Requested stages of the software pipeline."""
    buffers: int = 0
    """Smallest number of buffers of a tile loaded within a loop; 0 without such loads."""
    error: str = ""
    """Message of the compiler; empty if the kernel compiles."""


def parse_resource_usage(text: str) -> tuple[int, int]:
    """Parse the registers and the bytes of local memory per thread from the output of cuobjdump.

    Each is the maximum over all functions in the output of `cuobjdump --dump-resource-usage`.

    Raises:
        ValueError: The text contains no resource usage.
    """
    functions = [tuple(map(int, groups)) for groups in USAGE.findall(text)]
    if not functions:
        raise ValueError(f"no resource usage in {text!r}")
    return max(usage[0] for usage in functions), max(max(usage[1:]) for usage in functions)


def count_tensor_core_instructions(ptx: str) -> int:
    """Count the tensor-core instructions (mma.sync, wgmma, tcgen05) in the PTX code of a kernel."""
    return len(TENSOR_CORES.findall(ptx))


def count_buffers(ttgir: str) -> int:
    """Return the smallest number of shared-memory buffers of a tile that a kernel loads in a loop.

    0 means that no tile is buffered. 1 means that a load cannot overlap the computation of the
    previous tile. ttgir is Triton's GPU intermediate representation of the kernel.
    """
    return min(map(int, BUFFERS.findall(ttgir)), default=0)


def find_problems(result: CompileResult) -> list[str]:
    """Return error messages for a compiled kernel; empty if it passes all checks.

    The checks: it compiles, spills no registers, fits into shared memory, uses tensor cores where
    it should, and prefetches tiles if it has enough pipeline stages.
    """
    name = f"{result.kernel} ({result.label}) for sm_{result.arch}"
    if result.error:
        return [f"{name} does not compile: {result.error}"]
    problems = []
    if result.spilled:
        problems.append(f"{name} spills {result.spilled} bytes")
    limit = SHARED_MEMORY[result.arch]
    if result.shared > limit:
        problems.append(
            f"{name} needs {result.shared:,} bytes of shared memory; {limit:,} are available"
        )
    if result.wants_tensor_cores and not result.num_tensor_core_instructions:
        problems.append(f"{name} does not multiply on tensor cores")
    if result.wants_tensor_cores and result.stages >= PIPELINED_STAGES and result.buffers < 2:
        problems.append(
            f"{name} prefetches no tile: its loads have {result.buffers} buffers, "
            f"but there are {result.stages} stages"
        )
    return problems


def format_compile_table(results: Iterable[CompileResult]) -> str:
    """Format compile results as a text table with a header and one line per kernel variant."""
    head = (
        "kernel",
        "label",
        "arch",
        "registers",
        "spilled",
        "shared memory",
        "tensor cores",
        "stages",
        "buffers",
    )
    rows: list[tuple[str, ...]] = [head]
    for result in results:
        shared = f"{result.shared:,} of {SHARED_MEMORY[result.arch]:,}"
        numbers = (
            result.registers,
            result.spilled,
            shared,
            result.num_tensor_core_instructions,
            result.stages,
            result.buffers,
        )
        shown = ("failed", *"-----") if result.error else tuple(map(str, numbers))
        rows.append((result.kernel, result.label, f"sm_{result.arch}", *shown))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        texts = (c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(cells))
        lines.append("  ".join(texts).rstrip())
    return "\n".join(lines)


def select_specs(compiled: Sequence["KernelSpec"], arch: int, everything: bool) -> list[int]:
    """Return the indices of the kernel variants to compile for a GPU architecture.

    Args:
        compiled: kernel variants of a module.
        arch: architecture, for example 90 for sm_90; variants that need a newer one are skipped.
        everything: True selects all variants, False the first variant of each kernel.
    """
    indices: dict[object, int] = {}
    for index, spec in enumerate(compiled):
        if spec.min_arch <= arch:
            indices.setdefault(index if everything else spec.kernel.__name__, index)
    return list(indices.values())


def list_jobs(modules: Iterable[str], archs: Sequence[int], everything: bool) -> list[CompileJob]:
    """List the compile jobs for the given kernel modules and GPU architectures.

    Args:
        modules: names of modules in gllm.kernels.triton.
        archs: architectures, for example 90 for sm_90.
        everything: True compiles all variants, False the first variant of each kernel.
    """
    jobs = []
    for name in modules:
        compiled = load_kernel_specs(name)
        indices = {arch: select_specs(compiled, arch, everything) for arch in archs}
        for index in range(len(compiled)):
            jobs += [CompileJob(name, index, arch) for arch in archs if index in indices[arch]]
    return jobs


def list_kernel_modules() -> list[str]:
    """Return the names of all modules in the package gllm.kernels.triton."""
    return [
        module.name
        for module in pkgutil.iter_modules(importlib.import_module(KERNEL_PACKAGE).__path__)
    ]


def load_kernel_specs(module: str) -> Sequence["KernelSpec"]:
    """Import a module of gllm.kernels.triton and return its KERNEL_SPECS, empty if it has none."""
    return getattr(importlib.import_module(f"{KERNEL_PACKAGE}.{module}"), "KERNEL_SPECS", ())


def compile_kernel(job: CompileJob) -> CompileResult:
    """Compile one kernel variant in this process, without a GPU, and read its resource usage.

    A failed compilation gives a result with the compiler's error instead of raising.
    """
    from gllm.kernels.triton import tiles

    spec = load_kernel_specs(job.module)[job.index]
    name = f"{job.module}.{spec.kernel.__name__}"
    tried = {}
    if job.use and spec.tuned is not None:
        row = tiles.find_default_row(spec.tuned.table, spec.tuned.sizes)
        tried[spec.tuned.table] = [tiles.TileRow(row.up_to, dict(job.use))]
    try:
        with tiles.override_tiles(tried, tiles.load_tables("", job.arch)):
            figures = _figures(spec, job.arch)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
        return CompileResult(name, spec.label, job.arch, spec.tensor_cores, error=reason)
    return CompileResult(name, spec.label, job.arch, spec.tensor_cores, *figures)


def _figures(spec: "KernelSpec", arch: int) -> tuple[int, int, int, int, int, int]:
    """Return registers, spilled and shared bytes, tensor-core instructions, stages, buffers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants, warps, stages = spec.launch()
    signature = {**spec.signature, **dict.fromkeys(constants, "constexpr")}
    places = {name: (place,) for place, name in enumerate(spec.kernel.arg_names)}
    attributes = {places[name]: [["tt.divisibility", 16]] for name in spec.aligned}
    source = ASTSource(spec.kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    kernel = compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spilled = parse_resource_usage(_resource_usage(kernel.asm["cubin"]))
    instructions = count_tensor_core_instructions(kernel.asm["ptx"])
    buffers = count_buffers(kernel.asm["ttgir"])
    return registers, spilled, kernel.metadata.shared, instructions, stages, buffers


def _resource_usage(cubin: bytes) -> str:
    """Return the resource usage that cuobjdump prints for a binary."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `python -m gllm.kernels.aot`."""
    parser = argparse.ArgumentParser(prog="python -m gllm.kernels.aot", description=__doc__)
    known = sorted(SHARED_MEMORY)
    parser.add_argument("modules", nargs="*", help="files of gllm/kernels/triton; all by default")
    parser.add_argument(
        "--all", action="store_true", help="compile all variants, not only the first one per kernel"
    )
    parser.add_argument("--arch", type=int, nargs="+", choices=known, default=known)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--triton", metavar="VERSION", help="fail unless this version is installed")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the requested Triton kernels, print their resource usage and the problems found.

    Returns:
        Exit status: 0 if all kernels pass, 1 if a kernel has a problem, 2 if the installed Triton
        cannot be used.
    """
    options = make_parser().parse_args(arguments)
    from triton import __version__, knobs

    if options.triton not in (None, __version__):
        print(f"Triton is {__version__}, not {options.triton}", file=sys.stderr)
        return 2
    if knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: kernels would be interpreted", file=sys.stderr)
        return 2
    jobs = list_jobs(options.modules or list_kernel_modules(), options.arch, options.all)
    # Spawned, not forked: the compiler has threads, which a fork would lose.
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(compile_kernel, jobs))
    print(format_compile_table(results))
    problems = [problem for result in results for problem in find_problems(result)]
    print(
        "\n".join(["", *problems])
        if problems
        else f"\n{len(results)} compiled by Triton {__version__}, all well"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
