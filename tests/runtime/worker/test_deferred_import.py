"""Modules that are executed when an attribute of them is first read."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gllm.runtime.worker.deferred_import import defer_import

PACKAGE = "gllm_test_package"
CHECK = """
import sys
from gllm.runtime.worker.deferred_import import UNUSED_TORCH_MODULES, defer_import
for name in UNUSED_TORCH_MODULES:
    defer_import("torch", name)
import gllm.runtime.worker.worker
import gllm.runtime.worker.cpu.executor
import torch
assert torch.ones(2, 3).softmax(-1).sum() == 2
assert "torch._refs" not in sys.modules, "something imports what is not to be executed"
assert torch._meta_registrations.register_meta
assert "torch._refs" in sys.modules
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of a package whose __init__ imports its module `part`."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text("log = []\nfrom gllm_test_package import part\n")
    (folder / "part.py").write_text(
        "import gllm_test_package\nnumber = 7\ngllm_test_package.log.append('part')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_a_module_is_executed_once_when_an_attribute_is_read() -> None:
    defer_import(PACKAGE, "part")
    assert PACKAGE not in sys.modules
    package = importlib.import_module(PACKAGE)
    part = importlib.import_module(f"{PACKAGE}.part")
    assert package.part is part
    assert part.__name__ == f"{PACKAGE}.part"
    assert not hasattr(part, "__path__"), "of a package alone"
    assert package.log == []
    assert part.number == 7
    assert not hasattr(part, "other")
    assert package.log == ["part"]


@pytest.mark.usefixtures("package")
def test_unknown_and_imported_modules_are_left_as_they_are() -> None:
    defer_import(PACKAGE, "missing")
    defer_import(f"{PACKAGE}_missing", "part")
    assert f"{PACKAGE}.missing" not in sys.modules
    package = importlib.import_module(PACKAGE)
    assert package.log == ["part"]
    defer_import(PACKAGE, "part")
    assert sys.modules[f"{PACKAGE}.part"] is package.part
    assert package.log == ["part"]


def test_workers_do_not_execute_the_modules_of_compilers() -> None:
    """And torch has them as soon as something uses them."""
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
