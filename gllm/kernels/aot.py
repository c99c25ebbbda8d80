"""`python -m gllm.kernels.aot`: compiles the kernels for GPUs, without a GPU, and judges them.

Owns what a compiled kernel has to satisfy to run well on an architecture: no registers spilled to
memory, no more shared memory than a block can have, tensor cores where there are products, loads of
later tiles under way while one is computed where the kernel has the stages for that. What is
compiled is listed by the kernels' own files (COMPILED; gllm/kernels/triton/ahead.py). Does not know
what kernels compute.

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
    from gllm.kernels.triton.ahead import Compiled

ROOM = "gllm.kernels.triton"
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
"""Bytes that a block can have, by architecture."""
TENSOR_CORES = re.compile(r"^\s*(?:@\S+\s+)?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.", re.M)
BUFFERS = re.compile(
    r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x[^>]*\bmutable\b", re.M
)
"""A tile's buffers in shared memory, [buffers, rows, columns], as the software pipeliner makes them
for a load within a loop."""
PIPELINED_STAGES = 3
"""Fewest stages by which a load is under way while another tile is computed: with n of them there
are n - 1 buffers, and one more where products are asynchronous (from sm_90 on)."""
USAGE = re.compile(r"\bREG:(\d+)\s+STACK:(\d+).*?\bLOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Job:
    """One compilation, named so that another process can find it."""

    module: str
    index: int
    """In the module's COMPILED."""
    arch: int
    use: tuple[tuple[str, int], ...] = ()
    """Tiles to be tried in place of those that the architecture's table says."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a job."""

    kernel: str
    label: str
    arch: int
    wants_tensor_cores: bool
    registers: int = 0
    """Of a thread."""
    spilled: int = 0
    """Bytes of a thread's memory in place of registers."""
    shared: int = 0
    """Bytes of a block."""
    tensor_core_instructions: int = 0
    stages: int = 1
    """Of the software pipeline, as requested."""
    buffers: int = 0
    """Fewest buffers of a tile that is loaded within a loop; 0 where there is no such load."""
    error: str = ""
    """Why it does not compile."""


def usage(text: str) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread, from `cuobjdump --dump-resource-usage`.

    The most of all functions. Raises ValueError where the text names none.
    """
    found = [tuple(map(int, groups)) for groups in USAGE.findall(text)]
    if not found:
        raise ValueError(f"no resource usage in {text!r}")
    return max(one[0] for one in found), max(max(one[1:]) for one in found)


def tensor_core_instructions(ptx: str) -> int:
    """How many instructions of a kernel in PTX multiply on tensor cores."""
    return len(TENSOR_CORES.findall(ptx))


def num_buffers(ttgir: str) -> int:
    """Return the fewest buffers that a tile loaded within a loop has, from Triton's GPU dialect.

    1 means that the load waits for the products of the tile before; 0 that nothing is buffered.
    """
    return min(map(int, BUFFERS.findall(ttgir)), default=0)


def complaints(result: Result) -> list[str]:
    """What is wrong with a compiled kernel, in words."""
    name = f"{result.kernel} ({result.label}) for sm_{result.arch}"
    if result.error:
        return [f"{name} does not compile: {result.error}"]
    found = []
    if result.spilled:
        found.append(f"{name} spills {result.spilled} bytes")
    limit = SHARED_MEMORY[result.arch]
    if result.shared > limit:
        found.append(f"{name} needs {result.shared:,} bytes of shared memory; {limit:,} are there")
    if result.wants_tensor_cores and not result.tensor_core_instructions:
        found.append(f"{name} does not multiply on tensor cores")
    if result.wants_tensor_cores and result.stages >= PIPELINED_STAGES and result.buffers < 2:
        found.append(
            f"{name} prefetches no tile: its loads have {result.buffers} buffers, "
            f"but there are {result.stages} stages"
        )
    return found


def table(results: Iterable[Result]) -> str:
    """One line for each result, below a head, in columns."""
    head = (
        *("kernel", "label", "arch", "registers", "spilled", "shared memory", "tensor cores"),
        *("stages", "buffers"),
    )
    rows: list[tuple[str, ...]] = [head]
    for one in results:
        shared = f"{one.shared:,} of {SHARED_MEMORY[one.arch]:,}"
        numbers = (
            *(one.registers, one.spilled, shared, one.tensor_core_instructions),
            *(one.stages, one.buffers),
        )
        shown = ("failed", *"-----") if one.error else tuple(map(str, numbers))
        rows.append((one.kernel, one.label, f"sm_{one.arch}", *shown))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        texts = (c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(cells))
        lines.append("  ".join(texts).rstrip())
    return "\n".join(lines)


def chosen(compiled: Sequence["Compiled"], arch: int, everything: bool) -> list[int]:
    """Indices of what is compiled for an architecture: all, or the first of each kernel."""
    found: dict[object, int] = {}
    for index, one in enumerate(compiled):
        if one.least <= arch:
            found.setdefault(index if everything else one.kernel.__name__, index)
    return list(found.values())


def jobs(modules: Iterable[str], archs: Sequence[int], everything: bool) -> list[Job]:
    """What there is to do for these modules."""
    made = []
    for name in modules:
        compiled = listed(name)
        indices = {arch: chosen(compiled, arch, everything) for arch in archs}
        for index in range(len(compiled)):
            made += [Job(name, index, arch) for arch in archs if index in indices[arch]]
    return made


def room() -> list[str]:
    """The names of the files of kernels."""
    return [found.name for found in pkgutil.iter_modules(importlib.import_module(ROOM).__path__)]


def listed(module: str) -> Sequence["Compiled"]:
    """What a file of kernels has compiled."""
    return getattr(importlib.import_module(f"{ROOM}.{module}"), "COMPILED", ())


def run(job: Job) -> Result:
    """Compile, in this process."""
    from gllm.kernels.triton import tiles

    one = listed(job.module)[job.index]
    name = f"{job.module}.{one.kernel.__name__}"
    tried = {}
    if job.use and one.tiled is not None:
        row = tiles.row_for(one.tiled.table, one.tiled.sizes)
        tried[one.tiled.table] = [tiles.Row(row.up_to, dict(job.use))]
    try:
        with tiles.using(tried, tiles.tables_for("", job.arch)):
            figures = _figures(one, job.arch)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
        return Result(name, one.label, job.arch, one.tensor_cores, error=reason)
    return Result(name, one.label, job.arch, one.tensor_cores, *figures)


def _figures(one: "Compiled", arch: int) -> tuple[int, int, int, int, int, int]:
    """Registers, spilled, shared, instructions of tensor cores, stages, buffers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants, warps, stages = one.launch()
    signature = {**one.signature, **dict.fromkeys(constants, "constexpr")}
    places = {name: (place,) for place, name in enumerate(one.kernel.arg_names)}
    attributes = {places[name]: [["tt.divisibility", 16]] for name in one.aligned}
    source = ASTSource(one.kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    kernel = compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spilled = usage(_resource_usage(kernel.asm["cubin"]))
    instructions = tensor_core_instructions(kernel.asm["ptx"])
    buffers = num_buffers(kernel.asm["ttgir"])
    return registers, spilled, kernel.metadata.shared, instructions, stages, buffers


def _resource_usage(cubin: bytes) -> str:
    """What cuobjdump says of a binary."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(prog="python -m gllm.kernels.aot", description=__doc__)
    known = sorted(SHARED_MEMORY)
    made.add_argument("modules", nargs="*", help="files of gllm/kernels/triton; all by default")
    made.add_argument("--all", action="store_true", help="not only the first of each kernel")
    made.add_argument("--arch", type=int, nargs="+", choices=known, default=known)
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    made.add_argument("--triton", metavar="VERSION", help="fail unless this version is installed")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table and what is wrong; the status is 1 where something is."""
    options = parser().parse_args(arguments)
    from triton import __version__, knobs

    if options.triton not in (None, __version__):
        print(f"Triton is {__version__}, not {options.triton}", file=sys.stderr)
        return 2
    if knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: kernels would be interpreted", file=sys.stderr)
        return 2
    work = jobs(options.modules or room(), options.arch, options.all)
    # Workers are started afresh: the compiler has threads, which forks would lose.
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(run, work))
    print(table(results))
    found = [complaint for result in results for complaint in complaints(result)]
    print(
        "\n".join(["", *found])
        if found
        else f"\n{len(results)} compiled by Triton {__version__}, all well"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
