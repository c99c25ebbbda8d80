"""Commands on pages that measurements wrote ("Made by ...") are valid."""

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gllm.options.flags import FlagParser

ROOT = Path(__file__).parents[2]
MADE_BY = re.compile(r"^(?:Made|Merged|Measured) by `([^`]+)`", re.MULTILINE)


def commands() -> list[str]:
    """Return the command of every page under docs/ and experiments/."""
    pages = sorted(page for top in ("docs", "experiments") for page in (ROOT / top).rglob("*.md"))
    found = (command for page in pages for command in MADE_BY.findall(page.read_text("utf-8")))
    return sorted(set(found))


class CommandParsed(BaseException):
    """Raised in place of what a command does after it has parsed its arguments."""


def parse_only(parse_args: Callable[..., object]) -> Callable[..., None]:
    """Return a parse_args that raises CommandParsed for valid arguments."""

    def parse(parser: argparse.ArgumentParser, *arguments: object, **options: object) -> None:
        parse_args(parser, *arguments, **options)
        raise CommandParsed

    return parse


def parse_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command until its arguments are parsed.

    Raises:
        SystemExit: An argument is invalid.
    """
    words = shlex.split(command)
    module = "gllm" if words[0] == "gllm" else words[2]
    if (ROOT / module / "__main__.py").exists():
        module += ".__main__"
    for parser_class in (argparse.ArgumentParser, FlagParser):
        monkeypatch.setattr(parser_class, "parse_args", parse_only(parser_class.parse_args))
    monkeypatch.setattr(sys, "argv", words[words[0] != "gllm" and 2 :])
    # A module that another one imported runs again.
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.chdir(ROOT)
    with pytest.raises(CommandParsed):
        runpy.run_module(module, run_name="__main__", alter_sys=False)


@pytest.mark.full
def test_commands_on_pages_are_valid() -> None:
    assert len(commands()) > 20
    for command in commands():
        assert command.startswith(("gllm ", "python -m "))
        with pytest.MonkeyPatch.context() as monkeypatch:
            parse_command(command, monkeypatch)


def test_invalid_argument_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        parse_command("python -m experiments slo folder", monkeypatch)
