"""Parse tool calls written as JSON objects with a name and arguments.

Arguments are streamed while they arrive if the name comes before them.
"""

from gllm.text.output import json_parser
from gllm.text.output.reader import ParserCoroutine, TextReader, discard
from gllm.text.output.tool_calls import ToolCallEmitter

NAME_KEYS = ("name", "tool_name")
"""Keys of the name: the second is Cohere's."""
ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys of the arguments; models write the one of another family at times."""


def parse_json_call(reader: TextReader, emitter: ToolCallEmitter) -> ParserCoroutine[bool]:
    """Parse a tool call written as a JSON object with a name and arguments, as its text arrives.

    The object is a call as soon as it has a name and arguments: invalid text after them is left
    unread.

    Args:
        reader: Text of the output.
        emitter: Receives the events of the call.

    Returns:
        True if there is a call; all of its events have been emitted then.
    """
    parser = _CallParser(reader, emitter)
    yield from parser.parse_members()
    return parser.finish()


class _CallParser:
    """Parser of one object."""

    def __init__(self, reader: TextReader, emitter: ToolCallEmitter) -> None:
        self._reader = reader
        self._emitter = emitter
        self._name: str | None = None
        self._arguments: str | None = None
        """Complete arguments that came before the name."""
        self._is_emitted = False
        """True if all arguments have been emitted."""
        self._is_closed = False

    def finish(self) -> bool:
        """Return whether the object is a call, after emitting what has not been emitted."""
        if self._is_emitted or self._name is None:
            return self._is_emitted
        if self._arguments is None and not self._is_closed:
            return False
        if not self._emitter.start_call(self._name):
            return False
        self._emitter.add_arguments(self._arguments or "{}")
        return True

    def parse_members(self) -> ParserCoroutine[None]:
        """Parse the members up to the closing brace or to the first invalid text."""
        reader = self._reader
        if not (yield from reader.consume_any("{")):
            return
        while True:
            yield from reader.skip_space()
            key = yield from json_parser.parse_decoded_string(reader)
            yield from reader.skip_space()
            if key is None or not (yield from reader.consume_any(":")):
                return
            yield from reader.skip_space()
            if not (yield from self._parse_value(key)):
                return
            end = yield from reader.consume_next(",", "}")
            if end != ",":
                self._is_closed = end == "}"
                return

    def _parse_value(self, key: str) -> ParserCoroutine[bool]:
        """Parse the value of a key; return False if it is invalid."""
        if key in NAME_KEYS and self._name is None:
            self._name = yield from json_parser.parse_decoded_string(self._reader)
            return self._name is not None
        if key in ARGUMENT_KEYS and self._arguments is None and not self._is_emitted:
            return (yield from self._parse_arguments())
        return (yield from json_parser.parse_value(self._reader, discard))

    def _parse_arguments(self) -> ParserCoroutine[bool]:
        """Parse an object, null, or an object inside a string; return False for other values."""
        opening = yield from self._reader.peek()
        if opening == "{" and self._name is not None:
            if not self._emitter.start_call(self._name):
                self._name = None
                return False
            sink = self._emitter.add_arguments
            self._is_emitted = yield from json_parser.parse_value(self._reader, sink)
            return self._is_emitted
        pieces: list[str] = []
        if not (yield from json_parser.parse_value(self._reader, pieces.append)):
            return False
        self._arguments = _object_text("".join(pieces))
        return self._arguments is not None


def _object_text(text: str) -> str | None:
    """Return the text of the object that a JSON text stands for, None if it is no object."""
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
