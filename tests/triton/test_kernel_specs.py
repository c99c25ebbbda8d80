"""All kernels compile for every architecture, fit onto it and use what it has."""

import importlib
import os
import subprocess
import sys

import pytest
import triton

from gllm.kernels.aot import SHARED_MEMORY, list_kernel_modules

WITHOUT = {
    "kernel_specs",
    "attention_shapes",
    "attention_tiles",
    "common",
    "expert_blocks",
    "tiles",
}
WITHOUT |= {"compilations", "workloads"}
"""Files of the room that have no kernels of their own."""


TRY = """
from functools import partial
from gllm.kernels import aot, tune
from gllm.kernels.triton import tiles
row = tiles.find_default_row("quantize", {})
for use in (row.use, {"groups": 64, "warps": 1}):
    print(tune.is_trusted(80, partial(map, aot.compile_kernel), "quantize", row, use))
"""


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process that does not interpret kernels unless told so."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *(arguments or ("-m", "gllm.kernels.aot"))],
        env=kept | variables,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", sorted({*list_kernel_modules()} - WITHOUT))
def test_every_file_lists_what_is_compiled(name: str) -> None:
    module = importlib.import_module(f"gllm.kernels.triton.{name}")
    assert module.KERNEL_SPECS
    assert len({one.label + one.kernel.__name__ for one in module.KERNEL_SPECS}) == len(
        module.KERNEL_SPECS
    )
    for one in module.KERNEL_SPECS:
        assert {*one.signature, *one.launch()[0]} == {*one.kernel.arg_names}
        assert {*one.aligned} <= {*one.signature}


@pytest.mark.parametrize(
    "architectures",
    [
        pytest.param((86, 90), marks=pytest.mark.full),
        pytest.param((*SHARED_MEMORY,), marks=pytest.mark.long),
    ],
    ids=["least memory and wgmma", "all"],
)
def test_the_first_of_each_kernel_is_well(architectures: tuple[int, ...]) -> None:
    done = command("-m", "gllm.kernels.aot", "--arch", *map(str, architectures))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].endswith(f" compiled by Triton {triton.__version__}, all well")
    for arch in architectures:
        assert any(f" sm_{arch} " in line for line in lines[1:])


def test_nothing_is_compiled_where_kernels_are_interpreted() -> None:
    done = command(TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert done.stderr.strip() == "TRITON_INTERPRET is set: kernels would be interpreted"


def test_another_version_of_triton_is_refused() -> None:
    done = command("-m", "gllm.kernels.aot", "--triton", "1.0")
    assert done.returncode == 2
    assert done.stderr.strip() == f"Triton is {triton.__version__}, not 1.0"


@pytest.mark.full
def test_tiles_that_spill_do_not_fit() -> None:
    done = command("-c", TRY)
    assert done.stdout.split() == ["True", "False"], done.stderr
