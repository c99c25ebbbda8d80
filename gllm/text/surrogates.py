"""Replace lone surrogates, which are no characters, in JSON and its values by U+FFFD.

JSON can escape half of a surrogate pair, and JavaScript's strings can hold one: a client that cuts
a text in the middle of an emoji sends it. No encoder of UTF-8 accepts such a text.
"""

import re
from typing import Any

_LONE = re.compile("[\ud800-\udfff]")
MAX_PIECES = 2**16
"""Escapes and texts between them that one search consumes; other threads can run in between."""
_PART = re.compile(
    rb"((?:[^\\]++|\\(?:[^u]|u(?:[^dD]|[dD](?:[0-7]|[89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F])))"
    rb"){0,%d}+)(\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\)?" % MAX_PIECES,
    re.DOTALL,
)
"""A part of a JSON text and the escaped lone surrogate behind it, or a backslash that begins no
escape."""


def replace_surrogates(text: str) -> str:
    """Return a text with U+FFFD in place of each lone surrogate."""
    return text if text.isascii() else _LONE.sub("\ufffd", text)


def replace_surrogates_in(value: Any) -> Any:
    """Return a JSON value with U+FFFD in place of each lone surrogate of its keys and strings."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [replace_surrogates_in(item) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates_in(item) for key, item in value.items()}
    return value


def replace_escaped_surrogates(body: bytes) -> bytes:
    """Return a JSON text in which each escaped lone surrogate is an escaped U+FFFD."""
    if rb"\u" not in body:
        return body
    pieces = []
    for match in _PART.finditer(body):
        lone = match[2] or b""
        pieces += [match[1], rb"\ufffd" if len(lone) > 1 else lone]
    return b"".join(pieces)
