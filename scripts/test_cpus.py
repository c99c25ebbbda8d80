"""Run the tests as on other CPUs: `python -m scripts.test_cpus [BUILD ...] [-- PYTEST_ARGUMENTS]`.

One run for each build of the compiled kernels (`GLLM_CPU_KERNELS`), with PyTorch, oneDNN, MKL and
OpenBLAS limited to the instructions that such a CPU has. A build that this CPU cannot run is named
and left out.
"""

import os
import subprocess
import sys
import time

from gllm.kernels.native.builds import BUILD_VARIABLE, select_build

LIMITS: dict[str, dict[str, str]] = {
    "amx_bf16": {},
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "OPENBLAS_CORETYPE": "SkylakeX",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "portable": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Prescott",
    },
    "off": {},
}
"""Environment variables for each kernel build."""

TEST_RUNS = (
    ("-n", "auto", "--maxprocesses", "8", "tests", "--ignore", "tests/e2e"),
    ("-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "tests/e2e"),
)
"""Arguments of pytest if none are given."""


def run_tests(build: str, pytest_runs: list[tuple[str, ...]]) -> bool:
    """Run pytest with the limits of a kernel build. Return True if everything passed."""
    variables = {BUILD_VARIABLE: build, **LIMITS[build]}
    print(f"== {build}: {' '.join(f'{name}={value}' for name, value in variables.items())}")
    begin = time.monotonic()
    codes = [
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rs", *arguments],
            env=os.environ | variables,
        ).returncode
        for arguments in pytest_runs
    ]
    outcome = "passed" if not any(codes) else "FAILED"
    print(f"== {build}: {outcome} in {time.monotonic() - begin:.0f} s", flush=True)
    return not any(codes)


def main(arguments: list[str]) -> int:
    """Run the tests for the named builds, or for all; return the exit code."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    names, pytest_arguments = arguments[:split], tuple(arguments[split + 1 :])
    unknown = set(names) - set(LIMITS)
    if unknown:
        print(f"no build {', '.join(sorted(unknown))}: {', '.join(LIMITS)}", file=sys.stderr)
        return 2
    has_passed = True
    for build in names or list(LIMITS):
        try:
            select_build({BUILD_VARIABLE: build})
        except ValueError as error:
            print(f"== {build}: not run. {error}")
            continue
        has_passed &= run_tests(build, [pytest_arguments] if pytest_arguments else list(TEST_RUNS))
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
