"""The search for the processes of a server, as tests use it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.server import children


def test_children_are_found_while_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that ends while the threads are listed has no file any more."""
    iterdir = Path.iterdir

    def list_ended_too(folder: Path) -> Iterator[Path]:
        yield folder / "999999999"
        yield from iterdir(folder)

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        monkeypatch.setattr(Path, "iterdir", list_ended_too)
        assert child.pid in children(os.getpid())
        child.communicate(b"\n")
