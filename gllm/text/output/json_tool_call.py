"""Calls written as JSON objects of a name and arguments.

Owns the order in which they may be written: arguments are passed on while they come if the name was
there before. Knows nothing of what surrounds such objects.
"""

from gllm.text.output import json_parser
from gllm.text.output.reader import ParserCoroutine, TextReader, discard
from gllm.text.output.tool_calls import ToolCallEmitter


def parse_json_call(
    reader: TextReader,
    calls: ToolCallEmitter,
    *,
    arguments: tuple[str, ...] = ("arguments",),
) -> ParserCoroutine[bool]:
    """Take an object with `name` and one of `arguments`; other keys are skipped.

    It is a call from where name and arguments are there: whatever is wrong behind them is left.
    """
    found = _Object(reader, calls, arguments)
    yield from found.members()
    return found.is_call()


class _Object:
    """One object while it is read."""

    def __init__(
        self, reader: TextReader, calls: ToolCallEmitter, arguments: tuple[str, ...]
    ) -> None:
        self._reader = reader
        self._calls = calls
        self._keys = arguments
        self._name: str | None = None
        self._arguments: str | None = None
        """Complete ones that came before the name."""
        self._passed = False
        """Whether all of the arguments was passed on."""
        self._closed = False

    def is_call(self) -> bool:
        """Whether it was a call, all of which is passed on then."""
        if self._passed or self._name is None:
            return self._passed
        if self._arguments is None and not self._closed:
            return False
        if not self._calls.start(self._name):
            return False
        self._calls.arguments(self._arguments or "{}")
        return True

    def members(self) -> ParserCoroutine[None]:
        """Take what there is, up to the closing brace or to what is wrong."""
        reader = self._reader
        if not (yield from reader.starts("{")):
            return
        while True:
            yield from reader.space()
            key = yield from json_parser.parse_decoded_string(reader)
            yield from reader.space()
            if key is None or not (yield from reader.starts(":")):
                return
            yield from reader.space()
            if not (yield from self._value(key)):
                return
            yield from reader.space()
            end = yield from reader.starts(",", "}")
            if end != ",":
                self._closed = end == "}"
                return

    def _value(self, key: str) -> ParserCoroutine[bool]:
        """Take the value of a key."""
        if key == "name" and self._name is None:
            self._name = yield from json_parser.parse_decoded_string(self._reader)
            return self._name is not None
        if key in self._keys and self._arguments is None and not self._passed:
            return (yield from self._take_arguments())
        return (yield from json_parser.parse_value(self._reader, discard))

    def _take_arguments(self) -> ParserCoroutine[bool]:
        """Take an object, null, or an object within a string."""
        opening = yield from self._reader.peek()
        if opening == "{" and self._name is not None:
            if not self._calls.start(self._name):
                self._name = None
                return False
            self._passed = yield from json_parser.parse_value(self._reader, self._calls.arguments)
            return self._passed
        pieces: list[str] = []
        if not (yield from json_parser.parse_value(self._reader, pieces.append)):
            return False
        self._arguments = _object_text("".join(pieces))
        return self._arguments is not None


def _object_text(text: str) -> str | None:
    """The object that a JSON text stands for, None where it is none."""
    try:
        value = json_parser.load_json(text)
        if isinstance(value, str):
            text = value
            value = json_parser.load_json(text)
    except ValueError:
        return None
    if value is None:
        return "{}"
    return text if isinstance(value, dict) else None
