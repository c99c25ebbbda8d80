"""A package that is installed contains every file that the checkout needs at run time."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD_ONLY = {".cpp", ".h", ".so", ".pyc"}
"""Suffixes of files that a wheel compiles or leaves out."""


def package_files(folder: Path) -> set[str]:
    """Return the files that an installed package needs, relative to `folder`."""
    files = (path for path in (folder / "gllm").rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in files if path.suffix not in BUILD_ONLY}


def test_built_package_has_every_file(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run([*command, "egg_info", "--egg-base", str(tmp_path)], cwd=ROOT, check=True)
    assert package_files(tmp_path) == package_files(ROOT)
