"""JSON while it is written.

Owns the check of values character by character, so that what is passed on is the beginning of valid
JSON at any time. Knows nothing of tool calls.
"""

import json
import re
from typing import Any

from gllm.text.output.reader import ParserCoroutine, TextReader, TextSink

BLANK = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}


def parse_value(reader: TextReader, sink: TextSink) -> ParserCoroutine[bool]:
    """Take a value and pass it on; false where it is none, with what was one so far passed on."""
    closers: list[str] = []
    while True:
        # In front of a value.
        yield from reader.word(BLANK, sink)
        char = yield from reader.peek()
        if char in _CLOSERS:
            sink(reader.take(1))
            closers.append(_CLOSERS[char])
            yield from reader.word(BLANK, sink)
            if (yield from reader.peek()) != closers[-1]:
                if char == "{" and not (yield from _key(reader, sink)):
                    return False
                continue
        else:
            scalar = parse_string if char == '"' else _scalar
            if not (yield from scalar(reader, sink)):
                return False
        # Behind a value, or in front of the end of an empty container.
        while closers:
            yield from reader.word(BLANK, sink)
            char = yield from reader.peek()
            if char not in (",", closers[-1]) or not char:
                return False
            sink(reader.take(1))
            if char == ",":
                break
            closers.pop()
        if not closers:
            return True
        if closers[-1] == "}":
            yield from reader.word(BLANK, sink)
            if not (yield from _key(reader, sink)):
                return False


def parse_string(reader: TextReader, sink: TextSink) -> ParserCoroutine[bool]:
    """Take a string, quotes included. Control characters, which JSON does not allow in strings and
    models write, are passed on as escapes."""
    if not (yield from reader.starts('"')):
        return False
    sink('"')
    while True:
        yield from reader.word(_PLAIN, sink)
        char = yield from reader.peek()
        if not char:
            return False
        if char == "\\":
            if not (yield from _escape(reader, sink)):
                return False
            continue
        reader.take(1)
        sink(char if char == '"' else json.dumps(char)[1:-1])
        if char == '"':
            return True


def parse_decoded_string(reader: TextReader) -> ParserCoroutine[str | None]:
    """Take a string: what it says, None where it is none."""
    pieces: list[str] = []
    if not (yield from parse_string(reader, pieces.append)):
        return None
    text: str = json.loads("".join(pieces))
    return text


def load_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, for NaN, infinities and absurd depth too."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _key(reader: TextReader, sink: TextSink) -> ParserCoroutine[bool]:
    """Take a key and its colon."""
    if not (yield from parse_string(reader, sink)):
        return False
    yield from reader.word(BLANK, sink)
    if not (yield from reader.starts(":")):
        return False
    sink(":")
    return True


def _escape(reader: TextReader, sink: TextSink) -> ParserCoroutine[bool]:
    """Take a backslash and what belongs to it, all at once."""
    reader.take(1)
    char = yield from reader.peek()
    if not char or char not in '"\\/bfnrtu':
        return False
    pieces = ["\\", reader.take(1)]
    if char == "u":
        for _ in range(4):
            digit = yield from reader.peek()
            if digit not in _HEX:
                return False
            pieces.append(reader.take(1))
    sink("".join(pieces))
    return True


def _scalar(reader: TextReader, sink: TextSink) -> ParserCoroutine[bool]:
    """Take a number, true, false or null, all at once."""
    pieces: list[str] = []
    yield from reader.word(_SCALAR_CHARS, pieces.append)
    text = "".join(pieces)
    if not _SCALAR.fullmatch(text):
        return False
    sink(text)
    return True
