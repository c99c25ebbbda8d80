"""Result of a check."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Verdict of a check, as it is printed."""

    GOOD = "ok"
    NOTE = "note"
    """Nothing that keeps machines from forming an engine."""
    BAD = "FAIL"


@dataclass(frozen=True)
class Finding:
    """Result of a check, with a command that fixes the problem."""

    topic: str
    verdict: Verdict
    text: str
    fix: str = ""
    """Command or change that mends it; empty if there is nothing to mend."""

    def __str__(self) -> str:
        line = f"{self.verdict:4}  {self.topic}: {self.text}"
        return f"{line}\n      fix: {self.fix}" if self.fix else line


def good(topic: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(topic, Verdict.GOOD, text)


def note(topic: str, text: str, fix: str = "") -> Finding:
    """Return a finding that is worth knowing, but no problem."""
    return Finding(topic, Verdict.NOTE, text, fix)


def bad(topic: str, text: str, fix: str) -> Finding:
    """Return a finding with a problem and its fix."""
    return Finding(topic, Verdict.BAD, text, fix)
