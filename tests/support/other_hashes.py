"""Output of code in another process, in which strings have other hashes."""

import os
import subprocess
import sys
from pathlib import Path


def run_with_other_hashes(code: str) -> bytes:
    """Run Python code that may import the tests; return what it writes to standard output."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
    ).stdout
