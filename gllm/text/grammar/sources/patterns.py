"""Inspect regular expressions of JSON Schemas without matching them."""

import re

MAX_PATTERN_CHARACTERS = 2**13
"""Largest length of an enforced pattern."""
_PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(\]?)|\(\?<?[=!]|.", re.DOTALL)
"""Part of a regular expression: an escape, a class of characters, a look-around or a character. The
group is empty for a class without an end."""
_UNSUPPORTED_ESCAPES = frozenset("bBAzZGkKQ123456789")
"""Second characters of escapes for positions and back references."""


def is_supported(pattern: object) -> bool:
    """Return whether the grammar compiler supports a regular expression of a JSON Schema.

    It has no look-around, word boundaries and back references, and `^` and `$` only at the ends.
    """
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARACTERS:
        return False
    depth = 0
    for match in _PATTERN_PART.finditer(pattern):
        part, start, end = match[0], match.start(), match.end()
        is_unsupported_escape = part[0] == "\\" and part[1:] in _UNSUPPORTED_ESCAPES
        if part == "\\" or match[1] == "" or part.startswith("(?") or is_unsupported_escape:
            return False
        if (part == "^" and start > 0) or (part == "$" and end < len(pattern)):
            return False
        depth += (part == "(") - (part == ")")
        if depth < 0:
            return False
    return depth == 0


def split_alternatives(pattern: str) -> list[str]:
    """Return the outermost alternatives of a regular expression."""
    alternatives, depth, begin = [], 0, 0
    for match in _PATTERN_PART.finditer(pattern):
        part = match[0]
        depth += part.startswith("(") - (part == ")")
        if part == "|" and depth == 0:
            alternatives.append(pattern[begin : match.start()])
            begin = match.end()
    return [*alternatives, pattern[begin:]]


def strip_anchors(alternative: str) -> str:
    """Return an alternative without `^` at its start and `$` at its end."""
    ends = [match.start() for match in _PATTERN_PART.finditer(alternative) if match[0] == "$"]
    core = alternative[:-1] if ends and ends[-1] == len(alternative) - 1 else alternative
    return core.removeprefix("^")
