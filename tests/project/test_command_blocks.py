"""Command blocks of the documents parse: their programs, flags, choices, files and JSON exist."""

import functools
import importlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from gllm.__main__ import COMMANDS
from gllm.commands.bench.command import BENCHMARKS
from gllm.commands.plan.command import REPORTS
from gllm.options.flags import FlagParser
from gllm.plan.strategies import STRATEGIES
from tests.support.command_blocks import (
    ACTIVATION,
    ENTRY_PAGES,
    CommandBlock,
    command_blocks,
    words_of,
)
from tests.support.sources import ROOT, name_of, pages, text_of

GROUPS: dict[str, Collection[str]] = {"bench": BENCHMARKS, "plan": {**STRATEGIES, **REPORTS}}
"""Commands of gllm with commands of their own."""
PLACEHOLDER = re.compile(r"\[.*|.*\]|\.\.\.|[A-Z_]+(\.\.\.)?")


def blocks() -> Iterator[CommandBlock]:
    for page in pages():
        yield from command_blocks(page)


@functools.cache
def flags_of(module: str) -> FlagParser:
    make: Callable[[], FlagParser] = importlib.import_module(module).make_parser
    return make()


def faults_of_gllm(words: list[str]) -> list[str]:
    """Return what a command line of `gllm` has that its parser does not know."""
    if not words or words[0] not in COMMANDS:
        return [f"no command {' '.join(words[:1])}"]
    name, rest = words[0], words[1:]
    module = COMMANDS[name][0].partition(":")[0]
    if name in GROUPS:
        if not rest or rest[0] not in GROUPS[name]:
            return [f"no command {name} {' '.join(rest[:1])}"]
        module, rest = f"gllm.commands.{name}.{rest[0]}", rest[1:]
    actions = {flag: action for action in flags_of(module).flags for flag in action.option_strings}
    faults = []
    for number, word in enumerate(rest):
        flag, _, value = word.partition("=")
        if not flag.startswith("-") or PLACEHOLDER.fullmatch(word):
            continue
        if flag not in actions:
            faults.append(f"no flag {flag}")
            continue
        value = value or " ".join(rest[number + 1 : number + 2])
        choices = actions[flag].choices
        if choices and value not in choices and not PLACEHOLDER.fullmatch(value):
            faults.append(f"{flag} cannot be {value}")
    return faults


def faults_of_module(module: str, words: list[str]) -> list[str]:
    """Return the flags that no source beside a module of the checkout declares."""
    if module in ("gllm", "gllm.serve"):
        return faults_of_gllm(words if module == "gllm" else ["serve", *words])
    if module == "pytest":
        paths = [word for word in words if "/" in word and not word.startswith(("-", "/"))]
        # The guides of docs/extend.md add tests of their own.
        return [f"no {path}" for path in paths if not (ROOT / path).exists() and "clip" not in path]
    place = ROOT / module.replace(".", "/")
    if not place.is_dir() and not place.with_suffix(".py").is_file():
        return [f"no module {module}"] if module != "venv" else []
    sources = (place if place.is_dir() else place.parent).glob("*.py")
    text = "".join(map(text_of, sources))
    flags = sorted({word.partition("=")[0] for word in words if word.startswith("--")})
    return [f"no flag {flag} of {module}" for flag in flags if not declares(text, flag)]


def declares(source: str, flag: str) -> bool:
    """Return True for a source with a flag of argparse, or with an option that is its field."""
    field = flag.removeprefix("--").replace("-", "_")
    return (
        f'"{flag}"' in source or re.search(rf"^    {field}: .*= option\(", source, re.M) is not None
    )


def faults_of(words: list[str]) -> list[str]:
    """Return what is wrong with a call of a program."""
    if words[0] == "gllm":
        return faults_of_gllm(words[1:])
    if words[0] == "python":
        if words[1] == "-m":
            return faults_of_module(words[2], words[3:])
        is_here = not words[1].startswith("examples/") or (ROOT / words[1]).is_file()
        return [] if is_here else [f"no {words[1]}"]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
        return [
            f"no target {name}" for name in words[1:] if "=" not in name and name not in targets
        ]
    if words[0] == "curl" and "-d" in words:
        try:
            json.loads(words[words.index("-d") + 1])
        except ValueError as error:
            return [f"no JSON: {error}"]
    return []


def test_commands_use_flags_files_and_targets_that_exist() -> None:
    faults = {
        f"{name_of(block.page)}:{block.line}: {' '.join(words)}": found
        for block in blocks()
        for command in block.commands
        for words in words_of(command)
        if (found := faults_of(words))
    }
    assert faults == {}


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("gllm serve demo --no-such-flag 3", "no flag --no-such-flag"),
        ("gllm serve demo --policy fastest", "--policy cannot be fastest"),
        ("gllm plan everything --rate 3", "no command plan everything"),
        ("gllm bench serve --request-rat 4 &", "no flag --request-rat"),
        ("A=1 gllm bench latency --batch-sizes 3  # text", "no flag --batch-sizes"),
        ("python -m benchmarks.link --modes a", "no flag --modes of benchmarks.link"),
        ("python -m benchmarks.none", "no module benchmarks.none"),
        ("python -m pytest tests/none", "no tests/none"),
        ("python examples/none.py", "no examples/none.py"),
        ("make everything", "no target everything"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_found(command: str, fault: str) -> None:
    assert faults_of(words_of(command)[0]) == [fault]


def test_json_of_requests_is_checked() -> None:
    (fault,) = faults_of(words_of("curl URL -d '{\"model\": }'")[0])
    assert fault.startswith("no JSON")


@pytest.mark.parametrize("name", ENTRY_PAGES)
def test_entry_pages_put_gllm_on_the_path_before_they_call_it(name: str) -> None:
    """The pages after them call `gllm` and `python` without a path."""
    commands = [command for block in command_blocks(ROOT / name) for command in block.commands]
    activation = next(i for i, line in enumerate(commands) if line.startswith(ACTIVATION))
    assert not any(line.startswith(("gllm", "python")) for line in commands[:activation])


def test_commands_have_one_convention_for_programs_of_the_environment() -> None:
    named = {
        f"{name_of(page)}:{number}"
        for page in pages()
        for number, line in enumerate(text_of(page).splitlines(), 1)
        if ".venv/bin/" in line and ACTIVATION not in line
    }
    assert named == set()


def test_no_command_ends_processes_by_name_alone() -> None:
    """`pkill NAME` ends the servers of everybody on the machine."""
    calls = [words for block in blocks() for line in block.commands for words in words_of(line)]
    assert [w for w in calls if w[0] == "killall" or (w[0] == "pkill" and "-P" not in w)] == []


def test_blocks_are_found_with_their_reason(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text:\n\n    gllm top  # comment\n    curl URL -d '{\n      \"a\": 1}' &\n\n    INFO a\n\n"
        "<!-- not run: four GPUs -->\n\n    A=1 gllm serve \\\n      MODEL\n\n    {\"data\": 1}\n"
    )  # fmt: skip
    first, second = command_blocks(page)
    assert [words_of(command) for command in first.commands[:2]] == [
        [["gllm", "top"]],
        [["curl", "URL", "-d", '{\n  "a": 1}']],
    ]
    assert (first.line, first.not_run) == (3, "")
    assert words_of(second.commands[0]) == [["gllm", "serve", "MODEL"]]
    assert second.not_run == "four GPUs"
