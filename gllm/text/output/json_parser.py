"""Parse JSON while it is being written.

Values are checked character by character, so that the text passed on is the beginning of valid JSON
at any time.
"""

import json
import re
from typing import Any

from gllm.text.output.reader import ParserCoroutine, TextReader, TextSink

BLANK = re.compile(r"[ \t\r\n]+")
"""Whitespace of JSON."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
"""Characters that need no escape inside a string."""
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z]+")
SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}


def parse_value(reader: TextReader, sink: TextSink) -> ParserCoroutine[bool]:
    """Parse a JSON value as its text arrives, and write the text to a sink.

    Args:
        reader: Text of the output.
        sink: Receives the text of the value.

    Returns:
        False if the JSON is invalid; the valid beginning has been written then.
    """
    closers: list[str] = []
    while True:
        # Before a value.
        yield from reader.consume_while(BLANK, sink)
        char = yield from reader.peek()
        if char in _CLOSERS:
            sink(reader.consume(1))
            closers.append(_CLOSERS[char])
            yield from reader.consume_while(BLANK, sink)
            if (yield from reader.peek()) != closers[-1]:
                if char == "{" and not (yield from _parse_key(reader, sink)):
                    return False
                continue
        else:
            parse_scalar = parse_string if char == '"' else _parse_scalar
            if not (yield from parse_scalar(reader, sink)):
                return False
        # After a value, or before the end of an empty container.
        while closers:
            yield from reader.consume_while(BLANK, sink)
            char = yield from reader.peek()
            if char not in (",", closers[-1]) or not char:
                return False
            sink(reader.consume(1))
            if char == ",":
                break
            closers.pop()
        if not closers:
            return True
        if closers[-1] == "}":
            yield from reader.consume_while(BLANK, sink)
            if not (yield from _parse_key(reader, sink)):
                return False


def parse_string(reader: TextReader, sink: TextSink) -> ParserCoroutine[bool]:
    """Parse a JSON string as its text arrives and write the text to a sink; False if it is invalid.

    Control characters, which JSON does not allow in strings but models write, are written as
    escapes.
    """
    if not (yield from reader.consume_any('"')):
        return False
    sink('"')
    while True:
        yield from reader.consume_while(_PLAIN, sink)
        char = yield from reader.peek()
        if not char:
            return False
        if char == "\\":
            if not (yield from _parse_escape(reader, sink)):
                return False
            continue
        reader.consume(1)
        sink(char if char == '"' else json.dumps(char)[1:-1])
        if char == '"':
            return True


def parse_decoded_string(reader: TextReader) -> ParserCoroutine[str | None]:
    """Parse a JSON string as its text arrives and return its value; None if it is invalid."""
    pieces: list[str] = []
    if not (yield from parse_string(reader, pieces.append)):
        return None
    text: str = json.loads("".join(pieces))
    return text


def load_json(text: str) -> Any:
    """Parse a complete JSON text, strictly: without NaN and infinities, with limited nesting.

    Raises:
        ValueError: The text is invalid JSON, has NaN or infinities, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_raise_for_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _raise_for_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _parse_key(reader: TextReader, sink: TextSink) -> ParserCoroutine[bool]:
    """Parse a key and its colon."""
    if not (yield from parse_string(reader, sink)):
        return False
    yield from reader.consume_while(BLANK, sink)
    if not (yield from reader.consume_any(":")):
        return False
    sink(":")
    return True


def _parse_escape(reader: TextReader, sink: TextSink) -> ParserCoroutine[bool]:
    """Parse an escape sequence and pass it on as a whole."""
    reader.consume(1)
    char = yield from reader.peek()
    if not char or char not in '"\\/bfnrtu':
        return False
    pieces = ["\\", reader.consume(1)]
    if char == "u":
        for _ in range(4):
            digit = yield from reader.peek()
            if digit not in _HEX:
                return False
            pieces.append(reader.consume(1))
    sink("".join(pieces))
    return True


def _parse_scalar(reader: TextReader, sink: TextSink) -> ParserCoroutine[bool]:
    """Parse a number, true, false or null and pass it on as a whole."""
    text = yield from reader.read_while(_SCALAR_CHARS)
    if not SCALAR.fullmatch(text):
        return False
    sink(text)
    return True
