"""Sockets have short paths, whatever TMPDIR is."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gllm.runtime.messaging.socket_folder import MAX_PATH_BYTES, create_socket_folder


@pytest.fixture(params=[30, 95, 180])
def temporary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """$TMPDIR, whose path has about so many characters."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        path = Path(folder) / ("x" * max(request.param - len(folder), 1))
        path.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(path))
        yield path


def test_a_socket_can_be_bound_with_a_tmpdir_of_any_length(temporary: Path) -> None:
    folder = create_socket_folder("gllm123456-driver-")
    try:
        assert len(os.fsencode(folder / "driver")) <= MAX_PATH_BYTES
        is_short = len(str(temporary)) < 60
        assert (folder.parent == temporary) is is_short
    finally:
        folder.rmdir()


def test_tmpdir_is_named_where_no_folder_is_short(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "y" * 120)
    with pytest.raises(OSError, match=r"TMPDIR.*too long"):
        create_socket_folder("gllm-", [str(temporary / "missing")])
