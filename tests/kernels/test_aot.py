"""What is read from compilers' texts, and that every fault of a kernel is found."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from gllm.kernels.aot import (
    SHARED_MEMORY,
    CompileResult,
    count_buffers,
    count_tensor_core_instructions,
    find_problems,
    format_compile_table,
    parse_resource_usage,
    select_specs,
)

DUMP = """
Resource usage:
 Common:
  GLOBAL:0
 Function _norm:
  REG:{} STACK:{} SHARED:0 LOCAL:{} CONSTANT[0]:580 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
GOOD = CompileResult("norm._norm", "bf16", 90, True, 168, 0, 232_448, 16, stages=3, buffers=2)


@pytest.mark.parametrize(("stack", "local", "wanted"), [(0, 0, 0), (24, 0, 24), (0, 8, 8)])
def test_usage_is_registers_and_local_memory(stack: int, local: int, wanted: int) -> None:
    assert parse_resource_usage(DUMP.format(40, stack, local)) == (40, wanted)


def test_usage_is_that_of_the_largest_function() -> None:
    assert parse_resource_usage(DUMP.format(255, 0, 0) + DUMP.format(32, 16, 0)) == (255, 16)


def test_usage_has_to_be_there() -> None:
    with pytest.raises(ValueError, match="no resource usage in 'cuobjdump fatal'"):
        parse_resource_usage("cuobjdump fatal")


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 };", 1),
        ("\t@%p2 wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1};", 1),
        ("@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1;", 1),
        ("\twgmma.fence.sync.aligned;\n\twgmma.commit_group.sync.aligned;", 0),
        ("\tfma.rn.f32 %f1, %f2, %f3, %f4; // mma.sync.", 0),
        ("\ttcgen05.ld.sync.aligned.32x32b.x32.b32 {%r1}, [%r2];", 0),
    ],
)
def test_tensor_cores_are_counted(line: str, count: int) -> None:
    ptx = f".entry _norm(\n{line}\n\tret;\n{line}\n"
    assert count_tensor_core_instructions(ptx) == 2 * count


LOOP = """
%q = ttg.local_alloc %x : (tensor<16x128xbf16>) -> !ttg.memdesc<16x128xbf16, #shared, #smem>
%b = ttg.local_alloc : () -> !ttg.memdesc<1x64xi32, #shared1, #smem, mutable>
%k = ttg.local_alloc : () -> !ttg.memdesc<{}x64x128xbf16, #shared, #smem, mutable>
%v = ttg.local_alloc : () -> !ttg.memdesc<{}x64x128xbf16, #shared, #smem, mutable>
"""


@pytest.mark.parametrize(("keys", "values", "fewest"), [(2, 2, 2), (3, 2, 2), (1, 5, 1)])
def test_buffers_are_those_of_the_tile_that_has_fewest(keys: int, values: int, fewest: int) -> None:
    assert count_buffers(LOOP.format(keys, values)) == fewest


def test_tiles_that_are_not_loaded_within_a_loop_have_no_buffers() -> None:
    assert count_buffers("\n".join(LOOP.splitlines()[:3])) == 0


def test_a_kernel_within_its_limits_is_well() -> None:
    assert find_problems(GOOD) == []
    plain = replace(GOOD, num_tensor_core_instructions=0, wants_tensor_cores=False, buffers=0)
    assert find_problems(plain) == []
    assert find_problems(replace(GOOD, stages=2, buffers=1)) == []


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"spilled": 4}, ["spills 4 bytes"]),
        ({"shared": 232_449}, ["needs 232,449 bytes of shared memory; 232,448 are available"]),
        ({"num_tensor_core_instructions": 0}, ["does not multiply on tensor cores"]),
        ({"buffers": 1}, ["prefetches no tile: its loads have 1 buffers, but there are 3 stages"]),
        ({"buffers": 0, "stages": 6}, ["prefetches no tile: its loads have 0 buffers"]),
        ({"error": "ValueError: no"}, ["does not compile: ValueError: no"]),
        ({"spilled": 4, "shared": 10**6}, ["spills 4 bytes", "needs 1,000,000 bytes"]),
    ],
)
def test_every_fault_is_found(changes: dict[str, Any], reasons: list[str]) -> None:
    found = find_problems(replace(GOOD, **changes))
    assert len(found) == len(reasons)
    for complaint, reason in zip(found, reasons, strict=True):
        assert complaint.startswith(f"norm._norm (bf16) for sm_90 {reason}")


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_shared_memory_is_judged_by_architecture(arch: int) -> None:
    limit = SHARED_MEMORY[arch]
    assert find_problems(replace(GOOD, arch=arch, shared=limit)) == []
    assert find_problems(replace(GOOD, arch=arch, shared=limit + 1)) != []


def test_the_table_has_a_line_for_each() -> None:
    lines = format_compile_table(
        [GOOD, replace(GOOD, label="fp16, wide", arch=100, error="no")]
    ).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[:4] == ["kernel", "label", "arch", "registers"]
    words = [" ".join(line.split()) for line in lines[1:]]
    assert words[0] == "norm._norm bf16 sm_90 168 0 232,448 of 232,448 16 3 2"
    assert words[1] == "norm._norm fp16, wide sm_100 failed - - - - -"


@dataclass(frozen=True)
class Listed:
    """As much of a compilation as is needed to choose it."""

    kernel: Any
    min_arch: int = 80


def one() -> None: ...


def other() -> None: ...


def test_the_first_of_each_kernel_that_an_architecture_has() -> None:
    load_kernel_specs: list[Any] = [Listed(one, 89), Listed(one), Listed(other, 90), Listed(one)]
    assert select_specs(load_kernel_specs, 80, everything=False) == [1]
    assert select_specs(load_kernel_specs, 80, everything=True) == [1, 3]
    assert select_specs(load_kernel_specs, 89, everything=False) == [0]
    assert select_specs(load_kernel_specs, 90, everything=False) == [0, 2]
    assert select_specs(load_kernel_specs, 100, everything=True) == [0, 1, 2, 3]
