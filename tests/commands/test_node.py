"""`gllm node`: the file of node secrets."""

import stat
from pathlib import Path

import pytest

from gllm.__main__ import main
from gllm.runtime.messaging.security import read_secrets


def test_secret_is_created_once_and_rotated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "secret"
    assert main(["node", "--new-secret", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = read_secrets(path)
    assert main(["node", "--new-secret", str(path)]) == 2
    assert main(["node", "--add-secret", str(path)]) == 0
    assert main(["node", "--drop-secret", str(path)]) == 0
    assert main(["node", "--drop-secret", str(path)]) == 2
    assert len(read_secrets(path)) == 1
    assert read_secrets(path) != first
    output = capsys.readouterr()
    assert "exists already" in output.err
    assert "only one secret" in output.err
    for line in path.read_text().splitlines()[1:]:
        assert line not in output.out + output.err


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "--add-secret", str(tmp_path / "none")]) == 2
    assert main(["node", "--new-secret", str(tmp_path / "none" / "secret")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("gllm node: ") for line in lines)
    with pytest.raises(SystemExit, match="2"):
        main(["node"])
