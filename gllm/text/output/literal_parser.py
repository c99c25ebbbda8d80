"""Parse literals of other languages than JSON while they are being written, and convert them.

The text passed on is the beginning of valid JSON at any time.
"""

import json
import re
from dataclasses import dataclass
from functools import partial

from gllm.text.output.json_parser import SCALAR
from gllm.text.output.reader import ParserCoroutine, TextReader, TextSink

_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z_]+")
_BARE_KEY = re.compile(r"[^\s:,{}\[\]\"'<>|]+")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""JSON texts of Python's constants."""
_OPENERS = {"{": ("{", "}"), "[": ("[", "]"), "(": ("[", "]")}
"""JSON's brackets by those of literals; a tuple becomes a list."""
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_HEX = re.compile(r"[0-9a-fA-F]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"'}
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}
"""Hexadecimal digits of a code point, by the character after the backslash."""


@dataclass(frozen=True)
class LiteralSyntax:
    """Syntax of the values of a language."""

    quotes: tuple[str, ...]
    """Texts around a string."""
    has_escapes: bool = True
    """True if a backslash in a string escapes characters."""
    has_bare_keys: bool = False
    """True if keys of objects may stand without quotes."""


PYTHON = LiteralSyntax(("'", '"'))
"""Literals of Python; constants of JSON are accepted too."""


def parse_literal(
    reader: TextReader, sink: TextSink, syntax: LiteralSyntax
) -> ParserCoroutine[bool]:
    """Parse a literal as its text arrives, and write it as JSON to a sink.

    Args:
        reader: Text of the output.
        sink: Receives the JSON text.
        syntax: Syntax of the literal.

    Returns:
        False if the literal is invalid; the valid beginning has been written then.
    """
    closers: list[tuple[str, str]] = []
    while True:
        # Before a value, a key, or the end of an empty container.
        yield from reader.skip_space()
        char = yield from reader.peek()
        if char in _OPENERS and char:
            reader.consume(1)
            opening, closing = _OPENERS[char]
            sink(opening)
            closers.append((_CLOSERS[char], closing))
            yield from reader.skip_space()
            if (yield from reader.peek()) != closers[-1][0]:
                if opening == "{" and not (yield from _parse_key(reader, sink, syntax)):
                    return False
                continue
        elif not (yield from _parse_scalar(reader, sink, syntax)):
            return False
        # After a value.
        while closers:
            end, closing = closers[-1]
            mark = yield from reader.consume_next(",", end)
            if mark == ",":
                yield from reader.skip_space()
                if (yield from reader.peek()) != end:
                    sink(", ")
                    break
                reader.consume(1)
            elif not mark:
                return False
            sink(closing)
            closers.pop()
        if not closers:
            return True
        if closers[-1][1] == "}" and not (yield from _parse_key(reader, sink, syntax)):
            return False


def _parse_key(reader: TextReader, sink: TextSink, syntax: LiteralSyntax) -> ParserCoroutine[bool]:
    """Parse a key and its colon."""
    quote = yield from reader.consume_any(*syntax.quotes)
    if quote:
        pieces: list[str] = []
        if not (yield from _parse_string(reader, pieces.append, syntax, quote)):
            return False
        key = "".join(pieces)
    else:
        name = (yield from reader.read_while(_BARE_KEY)) if syntax.has_bare_keys else ""
        key = json.dumps(name, ensure_ascii=False) if name else ""
    if not key or not (yield from reader.consume_next(":")):
        return False
    sink(f"{key}: ")
    return True


def _parse_scalar(
    reader: TextReader, sink: TextSink, syntax: LiteralSyntax
) -> ParserCoroutine[bool]:
    """Parse a string, a number or a constant."""
    quote = yield from reader.consume_any(*syntax.quotes)
    if quote:
        return (yield from _parse_string(reader, sink, syntax, quote))
    word = yield from reader.read_while(_SCALAR_CHARS)
    text = _CONSTANTS.get(word, word)
    if not SCALAR.fullmatch(text):
        return False
    sink(text)
    return True


def _parse_string(
    reader: TextReader, sink: TextSink, syntax: LiteralSyntax, quote: str
) -> ParserCoroutine[bool]:
    """Parse the rest of a string; return False if it has no end."""
    sink('"')
    if syntax.has_escapes:
        is_closed = yield from _parse_escaped(reader, sink, quote)
    else:
        is_closed = bool((yield from reader.consume_until((quote,), partial(_put, sink))))
    if is_closed:
        sink('"')
    return is_closed


def _parse_escaped(reader: TextReader, sink: TextSink, quote: str) -> ParserCoroutine[bool]:
    """Parse the rest of a string with escapes; return False if it has no end."""
    while stop := (yield from reader.consume_until((quote, "\\"), partial(_put, sink))):
        if stop == quote:
            return True
        char = yield from reader.peek()
        if not char:
            return False
        reader.consume(1)
        if char in _CODE_LENGTHS:
            digits = ""
            while len(digits) < _CODE_LENGTHS[char]:
                digit = yield from reader.peek()
                if not _HEX.fullmatch(digit):
                    return False
                digits += reader.consume(1)
            if char == "U" and int(digits, 16) > 0x10FFFF:
                return False
            # Halves of a surrogate pair stay escapes, which JSON joins.
            sink(f"\\u{digits:>04}" if len(digits) <= 4 else json.dumps(chr(int(digits, 16)))[1:-1])
        elif char != "\n":
            # Python keeps the backslash before other characters.
            _put(sink, _ESCAPES.get(char, f"\\{char}" if char != "/" else char))
    return False


def _put(sink: TextSink, text: str) -> None:
    """Write text as it is written inside a JSON string."""
    sink(json.dumps(text, ensure_ascii=False)[1:-1])
