"""Flags of files, folders and URLs, and errors of a command line: one line with cause and fix."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gllm import __main__ as cli
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.engine.preflight import plan_model
from gllm.options.flags import (
    FlagParser,
    FlagType,
    input_file,
    output_file,
    output_folder,
    parse_url,
)


def refusal(type_: Callable[[str], str], value: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a command ends with; empty where the value is accepted."""
    parser = FlagParser(prog="gllm test")
    parser.add_argument("--it", type=FlagType(type_))
    with suppress(SystemExit):
        assert parser.parse_args([f"--it={value}"]).it == value
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 1
    return "".join(lines)


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("http://127.0.0.1:8000", True),
        ("https://llm.example/v1", True),
        ("nonsense", False),
        ("localhost:8000", False),
        ("http://[::1", False),
        ("http://a:99999", False),
        ("http://", False),
        ("file:///etc/passwd", False),
        ("http://a b", False),
        ("", False),
    ],
)
def test_urls(url: str, good: bool, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(parse_url, url, capsys)
    assert good == (line == "")
    assert good or ("--it" in line and "http://127.0.0.1:8000" in line)


def test_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    new, deep = tmp_path / "new", tmp_path / "a" / "b"
    for type_, path, why in (
        (input_file, file, ""),
        (input_file, new, "No such file"),
        (input_file, tmp_path, "directory"),
        (output_file, file, ""),
        (output_file, new, ""),
        (output_file, deep, f"no folder {deep.parent}"),
        (output_file, tmp_path, "is a folder"),
        (output_folder, deep, ""),
        (output_folder, file / "x", f"{file} is not a folder"),
    ):
        line = refusal(type_, str(path), capsys)
        assert why in line
        assert bool(why) == ("argument --it" in line)
    assert file.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [file]


def test_unknown_flags_get_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    parser = FlagParser(prog="gllm test")
    parser.add_argument("--max-model-len")
    with pytest.raises(SystemExit):
        parser.parse_args(["--max-model-length=5", "--zzz"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "--max-model-length: did you mean --max-model-len?" in line
    assert "--zzz: did" not in line


def test_a_step_log_that_cannot_be_written_is_refused_from_python_too() -> None:
    with pytest.raises(ValueError, match="step_log /nowhere/log: there is no folder /nowhere"):
        plan_model(EngineConfig(step_log="/nowhere/log"))


def test_no_bar_of_weights_before_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    Engine(EngineConfig(), progress=True)
    assert capsys.readouterr().err == ""


def interrupted(argv: list[str]) -> int:
    """Run a command that the user interrupts."""
    raise KeyboardInterrupt


def test_an_interrupted_command_ends_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["test"], {"test": (f"{__name__}:interrupted", "")}) == 130
    assert capsys.readouterr().err == "gllm test: interrupted\n"
