"""Command blocks of the documents: the commands in blocks that are indented by four spaces.

A block whose first word is none of PROGRAMS shows output or data. A block that the test of
tests/e2e/test_command_blocks.py cannot run has a comment before it, `<!-- not run: REASON -->`.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.support.sources import text_of

PROGRAMS = {
    "aiperf", "cd", "claude", "codex", "curl", "deploy/torchrun.sh", "docker", "echo", "export",
    "gh", "git", "gllm", "kill", "kubectl", "lm_eval", "make", "npm", "pip", "pkill",
    "prometheus", "python", "ray", "sbatch", "scp", "source", "ssh", "vllm", "wsl",
}  # fmt: skip
"""First words of commands."""
ENTRY_PAGES = ("README.md", "docs/tutorial.md")
"""Pages that new users read first. The others assume what they say about PATH."""
ACTIVATION = "source .venv/bin/activate"
"""Command that puts the programs of the environment on PATH."""
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
INDENT = "    "
ASSIGNMENT = re.compile(r"\w+=")


@dataclass(frozen=True)
class CommandBlock:
    """A block of commands of a page."""

    page: Path
    line: int
    """Number of its first line, from 1."""
    text: str
    """Its lines, without their indentation."""
    not_run: str = ""
    """Reason for which a test cannot run the block; empty if it can."""

    @property
    def commands(self) -> list[str]:
        """Commands with the lines on which they go on, without comments; loops are one command."""
        commands: list[str] = []
        for line in self.text.splitlines():
            if commands and not _is_complete(commands[-1]):
                commands[-1] += "\n" + line
            elif line.strip() and not line.lstrip().startswith("#"):
                commands.append(line)
        return commands


def _is_complete(command: str) -> bool:
    """Return False if the next line belongs to a command: an open quote or a backslash."""
    if command.endswith("\\"):
        return False
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def words_of(command: str) -> list[list[str]]:
    """Return the words of each program that a command line calls, without assignments."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars="&;|>(")
    lexer.whitespace_split = True
    calls: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("&;|>("):
            calls.append([])
        elif calls[-1] or not (ASSIGNMENT.match(word) or word in ("do", "done")):
            calls[-1].append(word)
    return [call for call in calls if call]


def command_blocks(page: Path) -> list[CommandBlock]:
    """Return the command blocks of a page, in their order."""
    blocks: list[CommandBlock] = []
    lines = text_of(page).splitlines()
    is_fenced, number = False, 0
    while number < len(lines):
        line = lines[number]
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        if is_fenced or not line.startswith(INDENT) or (number and lines[number - 1].strip()):
            number += 1
            continue
        start = number
        while number < len(lines) and (lines[number].startswith(INDENT) or not lines[number]):
            number += 1
        text = "\n".join(part[len(INDENT) :] for part in lines[start:number]).rstrip()
        before = "\n".join(lines[max(0, start - 2) : start])
        reason = NOT_RUN.search(before)
        block = CommandBlock(page, start + 1, text, reason[1] if reason else "")
        calls = words_of(block.commands[0]) if block.commands else []
        if calls and calls[0][0] in PROGRAMS:
            blocks.append(block)
    return blocks
