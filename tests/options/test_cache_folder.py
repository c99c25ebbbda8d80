"""The cache folder of users with and without a home directory."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from gllm.models.errors import ModelError
from gllm.models.hub import find_folder, resolve_model
from gllm.options.cache_folder import cache_folder


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without HOME and without an entry in the user database; returns $TMPDIR."""

    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_home_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/anna")
    assert cache_folder() == Path("/home/anna/.cache/gllm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/gllm")


def test_without_a_home_it_is_among_the_temporary_files(homeless: Path) -> None:
    folder = cache_folder()
    assert folder == cache_folder()
    assert folder.parent == homeless
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_another_user_has_made_is_refused(
    homeless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (homeless / "gllm-cache-4711").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(PermissionError, match="set HOME"):
        cache_folder()


@pytest.mark.parametrize("find", [resolve_model, find_folder])
def test_a_model_in_a_home_that_does_not_exist(homeless: Path, find: object) -> None:
    with pytest.raises(ModelError, match=r"'~/model'.*HOME"):
        find("~/model")  # type: ignore[operator]
