"""Result of a check."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Outcome of a check of `gllm doctor`, as printed: ok, note or FAIL."""

    GOOD = "ok"
    NOTE = "note"
    """Nothing that keeps machines from forming an engine."""
    BAD = "FAIL"


@dataclass(frozen=True)
class Finding:
    """Printed result of a check of `gllm doctor`: topic, outcome, text and a fix."""

    topic: str
    verdict: Verdict
    text: str
    fix: str = ""
    """Command or change that fixes the problem; empty if there is nothing to fix."""

    def __str__(self) -> str:
        line = f"{self.verdict:4}  {self.topic}: {self.text}"
        return f"{line}\n      fix: {self.fix}" if self.fix else line


def good(topic: str, text: str) -> Finding:
    """Return the result of a check that has passed."""
    return Finding(topic, Verdict.GOOD, text)


def note(topic: str, text: str, fix: str = "") -> Finding:
    """Return the result of a check that has found a disadvantage, but no error."""
    return Finding(topic, Verdict.NOTE, text, fix)


def bad(topic: str, text: str, fix: str) -> Finding:
    """Return the result of a check that has found an error, with its fix."""
    return Finding(topic, Verdict.BAD, text, fix)
