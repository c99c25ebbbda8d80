"""Setup of all tests: Triton kernels run under its interpreter, on CPU tensors.

The choice is made when Triton and the kernels are imported, whichever test does it first.
"""

import gc
import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from gllm.kernels.native.builds import BUILD_VARIABLE, OFF, select_build
from tests.support.examples import LONG_PROFILE

os.environ["TRITON_INTERPRET"] = "1"
# A named build computes everything, so that no test hangs on a short measurement.
if BUILD_VARIABLE not in os.environ and select_build().name != OFF:
    os.environ[BUILD_VARIABLE] = select_build().name

# On a busy machine an example may take any time, and so may its epoch.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(LONG_PROFILE)


def stop_tracing() -> None:
    """Stop the coverage of this process, which makes Python code two to three times as slow."""
    sys.settrace(None)
    threading.settrace(None)


# Coverage of a forked process is never saved.
os.register_at_fork(after_in_child=stop_tracing)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect thousands of tests without garbage collections, which would go over all of them.

    Those during the tests leave out what exists by then.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture
def broken_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes that cannot import a module which all of them need."""
    (tmp_path / "setproctitle.py").write_text("raise ImportError('broken')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    monkeypatch.setenv("PYTHONPATH", path)


TRACED_SHARE = 3
"""Of the cases of a test in EXPENSIVE, one of this number is traced for coverage."""
EXPENSIVE = (
    "experiments/test_splitwise",
    "runtime/test_device_",
    "runtime/test_engine_deaths",
    "runtime/test_greedy",
    "runtime/test_int8",
    "runtime/test_resume",
    "scheduler/",
    "sim/",
    "simulation/",
    "triton/",
)
"""Tests whose cases take two to three times as long if traced, and reach the same lines."""
UNSEEN = (
    "triton/test_activation",
    "triton/test_attention",
    "triton/test_experts",
    "triton/test_linear_fp8",
    "triton/test_masking",
    "triton/test_penalties",
    "triton/test_qkv",
    "triton/test_ranks",
    "triton/test_rms_norm",
    "triton/test_sampling",
)
"""Tests of interpreted kernels alone, whose files pyproject.toml leaves out of the coverage."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests in UNSEEN and most cases of those in EXPENSIVE out of the coverage.

    Other tests without parameters are always traced.
    """
    for item in items:
        path = item.nodeid.removeprefix("tests/")
        is_case = path.startswith(EXPENSIVE) and hasattr(item, "callspec")
        if path.startswith(UNSEEN) or (is_case and crc32(path.encode()) % TRACED_SHARE):
            item.add_marker(pytest.mark.no_cover)
